"""Questions made by code from the slots of CrossWOZ, SGD and KdConv.

A slot gives a statement ("The phone number of X is Y.") and questions that it answers; near
statements (another attribute, another name, one digit or one name off) do not. A value that is
wrong for a question that does not hold it is never used as a negative: the text alone does not
tell which of two values is true.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from data.pair_drafts import Draft, Harvest, Record, document

MAX_VALUE_CHARS = 40

QUESTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "zh": {
        "电话": ("{name}的电话是多少？", "怎么打电话给{name}？"),
        "地址": ("{name}在哪里？", "{name}的地址是哪儿？"),
        "评分": ("{name}的评分高吗？", "{name}评分多少？"),
        "价格": ("住{name}要多少钱？", "{name}的价格是多少？"),
        "门票": ("{name}的门票多少钱？", "去{name}要买票吗？"),
        "人均消费": ("在{name}吃饭人均多少钱？", "{name}人均消费高吗？"),
        "营业时间": ("{name}几点营业？", "{name}什么时候开门？"),
        "开放时间": ("{name}几点开放？", "{name}什么时候开门？"),
        "游玩时间": ("{name}要玩多久？", "逛{name}要多长时间？"),
        "推荐菜": ("{name}有什么推荐菜？", "在{name}吃什么好？"),
        "酒店类型": ("{name}是什么类型的酒店？",),
        "": ("{name}的{slot}是什么？", "你知道{name}的{slot}吗？"),
    },
    "en": {
        "street address": ("Where is {name}?", "What is the address of {name}?"),
        "phone number": ("How can I call {name}?", "What is {name}'s phone number?"),
        "price range": ("Is {name} expensive?", "What is the price range of {name}?"),
        "directed by": ("Who directed {name}?",),
        "artist": ("Who sings {name}?", "Which artist is {name} by?"),
        "time": ("When does {name} start?", "What time is {name}?"),
        "date": ("On which day is {name}?", "What is the date of {name}?"),
        "venue": ("Where does {name} take place?",),
        "cuisine": ("What kind of food does {name} serve?",),
        "": ("What is the {slot} of {name}?", "Do you know the {slot} of {name}?"),
    },
}

STATEMENT = {"zh": "{name}的{slot}是{value}。", "en": "The {slot} of {name} is {value}."}
REVERSE = {"zh": ("{slot}是{value}的是哪一家？", "哪里的{slot}是{value}？"),
           "en": ("Which one has the {slot} {value}?", "Whose {slot} is {value}?")}

# Attributes that can be asked for in the other language.
OTHER_LANGUAGE = {
    "电话": "What is the phone number of {name}?", "地址": "What is the address of {name}?",
    "评分": "How is {name} rated?", "门票": "How much is a ticket to {name}?",
    "人均消费": "How much does a meal at {name} cost per person?",
    "营业时间": "When is {name} open?", "价格": "How much is a night at {name}?",
    "游玩时间": "How long does a visit to {name} take?",
    "推荐菜": "Which dish is {name} known for?",
    "street address": "{name}的地址是什么？", "phone number": "{name}的电话是多少？",
    "price range": "{name}贵吗？", "directed by": "{name}的导演是谁？",
    "artist": "{name}是谁唱的？",
    "venue": "{name}在哪个场馆？", "venue address": "{name}的场馆地址是什么？",
    "time": "{name}几点开始？", "date": "{name}是哪一天？", "cuisine": "{name}是什么菜系？",
}

_NAME_SLOTS = ("名称", "restaurant_name", "event_name", "song_name", "title")
_TRUTH = ("true", "false", "dontcare", "是", "否")


@dataclass(frozen=True, slots=True)
class Fact:
    """A slot of a named thing, and the turn that says it."""

    record: str
    language: str
    name: str
    slot: str
    value: str
    turn: str

    @property
    def statement(self) -> str:
        """The slot as a sentence."""
        return state(self.language, self.name, self.slot, self.value)


def state(language: str, name: str, slot: str, value: str) -> str:
    """A slot as a sentence."""
    return STATEMENT[language].format(name=name, slot=slot, value=value)


def service_facts(record: Record) -> Iterator[Fact]:
    """What the other side said of a thing that was named before, or in the same turn.

    A domain whose name changes is skipped from the change on until the next name; a turn that
    names two things tells of neither.
    """
    turns = {t["id"]: t["text"] for t in record["sessions"][0]["turns"]}
    names: dict[str, str] = {}
    by_turn: dict[str, list[Record]] = {}
    for memory in record["memories"]:
        by_turn.setdefault(memory["evidence"][0], []).append(memory)
    for turn_id, memories in by_turn.items():
        named: dict[str, set[str]] = {}
        for memory in memories:
            domain, slot, value = memory["slot"]
            if slot in _NAME_SLOTS:
                named.setdefault(domain, set()).add(value)
        for domain, found in named.items():
            names.pop(domain, None)
            if len(found) == 1:
                names[domain] = next(iter(found))
        for memory in memories:
            domain, slot, value = memory["slot"]
            if memory["kind"] == "user_inform" or slot in _NAME_SLOTS or domain not in names:
                continue
            if slot.startswith("周边") or "-" in slot or value.lower() in _TRUTH \
                    or len(value) > MAX_VALUE_CHARS:
                continue
            yield Fact(record["id"], record["lang"], names[domain], slot.replace("_", " "), value,
                       document(turns[turn_id]))


def knowledge_facts(record: Record) -> Iterator[Fact]:
    """KdConv's facts about the world: `NAME（…） SLOT：VALUE`."""
    turns = {t["id"]: t["text"] for t in record["sessions"][0]["turns"]}
    form = re.compile(r"([^（(：/]{2,16})(?:（[^）]*）)? ([^ ：/]{2,6})：(.+?)。*")
    for memory in record["memories"]:
        found = form.fullmatch(memory["text"])
        if found and len(found[3]) <= MAX_VALUE_CHARS and not found[2].startswith("周边"):
            yield Fact(record["id"], "zh", found[1].strip(), found[2], found[3].strip(),
                       document(turns[memory["evidence"][0]]))


def one_digit_off(text: str, rng: random.Random) -> str | None:
    """The text with one of its digits changed, or nothing where it has none."""
    places = [n for n, c in enumerate(text) if c in "0123456789"]
    if not places:
        return None
    n = rng.choice(places)
    return text[:n] + rng.choice([d for d in "0123456789" if d != text[n]]) + text[n + 1:]


def name_off(name: str, others: list[str], rng: random.Random) -> str | None:
    """The name with one character (Chinese) or word (Latin) taken from another name."""
    if re.search(r"[\u4e00-\u9fff]", name):
        longer = [o for o in others if len(o) == len(name) and o != name]
        if not longer:
            return None
        donor, n = rng.choice(longer), rng.randrange(len(name))
        made = name[:n] + donor[n] + name[n + 1:]
    else:
        words, donor_words = name.split(), rng.choice(others).split() if others else []
        if len(words) < 2 or not donor_words:
            return None
        words[-1] = donor_words[-1]
        made = " ".join(words)
    return made if made not in (name, *others) else None


def slot_drafts(facts: list[Fact], harvest: Harvest, rng: random.Random, *, source: str) -> None:
    """Questions forwards, backwards where the value has digits, and in the other language."""
    language = facts[0].language if facts else "zh"
    pool = f"{source}/statements"
    unique = list({(f.name, f.slot): f for f in facts}.values())
    values: dict[tuple[str, str], set[str]] = {}
    for fact in facts:
        values.setdefault((fact.name, fact.slot), set()).add(fact.value)
    # Two values of one attribute: the statement is ambiguous, so it asks and answers nothing.
    unique = [f for f in unique if len(values[f.name, f.slot]) == 1]
    harvest.add_to_pool(pool, [f.statement for f in unique])
    names = sorted({f.name for f in unique})
    for n, fact in enumerate(unique):
        hard = _near_statements(fact, unique, names, rng)
        stem = f"{source}/{fact.record}/{n}"
        common = (fact.record, fact.record)
        asked = QUESTIONS[language].get(fact.slot, QUESTIONS[language][""])
        query = rng.choice(asked).format(name=fact.name, slot=fact.slot)
        harvest.drafts.append(Draft(
            f"{stem}/asked", language, source, *common, query, (fact.statement, fact.turn),
            hard, pool, answers=(fact.value,)))
        if fact.slot in OTHER_LANGUAGE:
            harvest.drafts.append(Draft(
                f"{stem}/other", "en" if language == "zh" else "zh", f"{source}_other", *common,
                OTHER_LANGUAGE[fact.slot].format(name=fact.name), (fact.statement, fact.turn),
                hard, pool, answers=(fact.value,)))
        off = one_digit_off(fact.value, rng) if len(re.findall(r"\d", fact.value)) >= 3 else None
        if off is not None:
            backwards = rng.choice(REVERSE[language]).format(slot=fact.slot, value=fact.value)
            wrong = state(language, fact.name, fact.slot, off)
            harvest.drafts.append(Draft(
                f"{stem}/backwards", language, f"{source}_backwards", *common, backwards,
                (fact.statement,), (wrong, *hard), pool, answers=(fact.value,)))


def _near_statements(
    fact: Fact, facts: list[Fact], names: list[str], rng: random.Random
) -> tuple[str, ...]:
    """Same name other attribute, other name same attribute, and a name that is slightly off."""
    others = [f.statement for f in facts if f.name == fact.name and f.slot != fact.slot]
    same = [f.statement for f in facts
            if f.slot == fact.slot and f.name != fact.name and f.value != fact.value]
    hard = rng.sample(others, min(4, len(others))) + rng.sample(same, min(4, len(same)))
    off = name_off(fact.name, names, rng)
    if off is not None:
        hard.insert(0, state(fact.language, off, fact.slot, fact.value))
    return tuple(dict.fromkeys(hard))


# --- what the user wanted ---

_WISH = {
    "zh": ("我想找的{domain}，{slot}要什么样的？", "我说过{domain}的{slot}有什么要求？",
           "用户要的{domain}{slot}是什么？"),
    "en": ("What {slot} did I ask for when it was about {domain}?",
           "For the {domain}, which {slot} did I want?",
           "What {slot} did the user choose for the {domain}?"),
}
_WISHED = {"zh": "用户想要{slot}为{value}的{domain}。",
           "en": "The user wants the {domain} with the {slot} {value}."}


def wish_drafts(record: Record, harvest: Harvest, rng: random.Random, *, source: str) -> None:
    """What the user asked for, by domain and attribute; only wishes that never changed."""
    language = record["lang"]
    turns = {t["id"]: document(t["text"]) for t in record["sessions"][0]["turns"]}
    wishes: dict[tuple[str, str], list[Record]] = {}
    for memory in record["memories"]:
        domain, slot, value = memory["slot"]
        if memory["kind"] == "user_inform" and "-" not in slot and value.lower() not in _TRUTH \
                and not slot.startswith("周边"):
            domain = domain.rpartition("_")[0].lower().rstrip("s") or domain
            wishes.setdefault((domain, slot.replace("_", " ")), []).append(memory)
    made = {}
    for (domain, slot), memories in wishes.items():
        value = memories[0]["slot"][2]
        if len({m["slot"][2] for m in memories}) == 1 and len(value) <= MAX_VALUE_CHARS:
            made[domain, slot] = _WISHED[language].format(domain=domain, slot=slot, value=value)
    for n, ((domain, slot), statement) in enumerate(made.items()):
        told = [turns[m["evidence"][0]] for m in wishes[domain, slot]]
        query = rng.choice(_WISH[language]).format(domain=domain, slot=slot)
        hard = [s for key, s in made.items() if key != (domain, slot)]
        hard += [t for t in turns.values() if t not in told]
        # Others wished for the same attribute of other things: their turns would answer as well,
        # so nothing is mined outside of the dialogue.
        harvest.drafts.append(Draft(
            f"{source}/{record['id']}/{n}", language, source, record["id"], record["id"], query,
            (statement, *told), tuple(hard)))
