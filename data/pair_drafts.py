"""Questions with their answers, as sources give them, before negatives are mined.

One function per source; each fills a `Harvest` with drafts and with the pools of texts that
negatives may be mined from. Nothing is written here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from data.match import lexical_f1
from data.sources import TRAINING_PERSONAS
from memory_runtime.corpus import AnnotatedWindow, role_of

Record = dict[str, Any]

MAX_QUERY_CHARS = 240
MAX_DOCUMENT_CHARS = 360
SAME_CLAIM = 0.4
"""A wrong memory this near (lexical F1) to the right one differs in its value only: nothing in the
text says which of the two is true, so it is no negative."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A question and its answers.

    Attributes:
        id: Unique over all sources.
        lang: Language of the query.
        source: Name that caps and balance go by.
        record: Record that it comes from, for the data manifest.
        dialogue: All drafts of one dialogue fall on the same side of the split.
        query: The question.
        positives: Texts that answer it; none when nothing does.
        hard: Negatives that are known to be near, nearest first.
        pool: Pool that the rest is mined from, or none.
        before: Only texts of the pool with a smaller order number existed when it was asked.
        answers: A mined text that holds one of these might answer too, and is left out.
    """

    id: str
    lang: str
    source: str
    record: str
    dialogue: str
    query: str
    positives: tuple[str, ...]
    hard: tuple[str, ...] = ()
    pool: str | None = None
    before: int | None = None
    answers: tuple[str, ...] = ()


@dataclass
class Harvest:
    """What the readers found.

    Attributes:
        drafts: In the order of the sources.
        pools: Texts to mine from, by pool; each with the order number in which it came up.
    """

    drafts: list[Draft] = field(default_factory=list)
    pools: dict[str, dict[str, int]] = field(default_factory=dict)

    def add_to_pool(self, pool: str, texts: Iterable[str], *, order: int = 0) -> None:
        """Texts that negatives may be taken from; the first order number of a text counts."""
        known = self.pools.setdefault(pool, {})
        for text in texts:
            if text:
                known.setdefault(text, order)


def shorten(text: str, limit: int) -> str:
    """Cut at the end of the last sentence that fits, or hard."""
    text = re.sub(r"\s+", " ", text).strip()
    if len(text) <= limit:
        return text
    cut = max(text.rfind(mark, 0, limit) for mark in "。！？.!?")
    return text[: cut + 1] if cut > limit // 3 else text[:limit]


def document(text: str) -> str:
    """A turn or a memory as a document."""
    return shorten(text, MAX_DOCUMENT_CHARS)


# --- our own stories and windows ---


def story_drafts(story: Record, harvest: Harvest) -> None:
    """Questions of a detective scenario: facts and evidence turns answer, old values do not."""
    facts = {f["id"]: f for f in story["facts"]}
    turns = {t["id"]: document(t["text"]) for s in story["sessions"] for t in s["turns"]}
    pool = f"story/{story['id']}"
    harvest.add_to_pool(pool, [f["text"] for f in facts.values()])
    harvest.add_to_pool(pool, turns.values())

    def told(ids: Iterable[str]) -> list[str]:
        found = [facts[i] for i in ids]
        return [f["text"] for f in found] + [turns[t] for f in found for t in f["evidence"]]

    for question in story["questions"]:
        mine = set(question["facts"])
        versions = [f["id"] for f in facts.values() if f["id"] not in mine and (
            f.get("superseded_by") in mine
            or any(facts[m].get("superseded_by") == f["id"] for m in mine))]
        positives = tuple(dict.fromkeys(told(question["facts"])))
        harvest.drafts.append(Draft(
            f"{story['id']}/{question['id']}", story["lang"], "stories", story["id"], story["id"],
            question["question"], positives,
            tuple(t for t in dict.fromkeys(told(versions)) if t not in positives), pool))
    for fact in facts.values():
        harvest.drafts.append(Draft(
            f"{story['id']}/{fact['id']}/turn", story["lang"], "statement_to_turn", story["id"],
            story["id"], fact["text"], tuple(turns[t] for t in fact["evidence"]), (), pool))


_ASKED = {
    "zh": ("{whose}{what}是什么情况？", "关于{whose}{what}，之前是怎么说的？",
           "{whose}{what}来着？", "还记得{whose}{what}吗？"),
    "en": ("What did I say about {whose} {what}?", "What is the story with {whose} {what}?",
           "Can you remind me of {whose} {what}?", "What do you know about {whose} {what}?"),
}


def _whose(subject: str, language: str) -> str:
    if subject == "user":
        return "我的" if language == "zh" else "my"
    return f"{subject}的" if language == "zh" else f"{subject}'s"


def window_drafts(annotated: AnnotatedWindow, harvest: Harvest, rng: random.Random) -> None:
    """Gold memories of an authored window, asked for by subject and attribute, and as statements.

    Forbidden memories are negatives where their words, not only their value, are another's.
    """
    window, language = annotated.window, annotated.language
    turns = {t.id: document(t.text) for t in window.turns}
    pool = f"windows/{language}"
    harvest.add_to_pool(pool, turns.values())
    harvest.add_to_pool(pool, [g.candidate.text for g in annotated.gold])
    for n, gold in enumerate(annotated.gold):
        memory = gold.candidate
        told = tuple(turns[t] for t in memory.evidence if t in turns)
        wrong = [f.text for f in annotated.forbidden]
        other = [g.candidate.text for g in annotated.gold if g is not gold]
        hard = [t for t in other + wrong if lexical_f1(t, memory.text) < SAME_CLAIM]
        common = (window.id, window.id)
        if memory.attribute:
            query = rng.choice(_ASKED[language]).format(
                whose=_whose(memory.subject, language), what=memory.attribute)
            harvest.drafts.append(Draft(
                f"{window.id}/{n}", language, "windows", *common, query, (memory.text, *told),
                (*hard, *[t for t in turns.values() if t not in told]), pool))
        if told:
            harvest.drafts.append(Draft(
                f"{window.id}/{n}/turn", language, "statement_to_turn", *common, memory.text, told,
                tuple(t for t in turns.values() if t not in told), pool))


# --- RealMem ---


def realmem_drafts(record: Record, harvest: Harvest) -> None:
    """Questions to gold memories and memories to source turns, of a training persona only."""
    if record["id"] not in TRAINING_PERSONAS:
        return
    order = {s["id"]: n for n, s in enumerate(record["sessions"])}
    turns = {t["id"]: t["text"] for s in record["sessions"] for t in s["turns"]}
    session_of = {t["id"]: s["id"] for s in record["sessions"] for t in s["turns"]}
    texts, pool = {}, f"{record['id']}/memories"
    memories = [m for m in record["memories"] if m["evidence"]]
    for memory in memories:
        texts[memory["id"]] = document(re.sub(r"^【[^】]*】\s*", "", memory["text"]))
        harvest.add_to_pool(pool, [texts[memory["id"]]],
                            order=order[session_of[memory["evidence"][0]]])
    for question in record["questions"]:
        gold = [m for m in question.get("evidence_memories") or [] if m in texts]
        asked = question.get("asked_at")
        if gold and asked in session_of:
            harvest.drafts.append(Draft(
                question["id"], "en", "realmem", record["id"], _project(record["id"], gold[0]),
                shorten(question["question"], MAX_QUERY_CHARS),
                tuple(dict.fromkeys(texts[m] for m in gold)), (), pool,
                before=order[session_of[asked]]))
    _realmem_sources(record, memories, texts, turns, harvest)


def _project(record_id: str, memory_id: str) -> str:
    """A persona's project; memories of one project stay on one side of the split."""
    return f"{record_id}/{re.split('[-:]', memory_id)[0]}"


def _realmem_sources(
    record: Record, memories: list[Record], texts: dict[str, str], turns: dict[str, str],
    harvest: Harvest,
) -> None:
    session_of = {t["id"]: s["id"] for s in record["sessions"] for t in s["turns"]}
    pool = f"{record['id']}/turns"
    short = {i: document(text) for i, text in turns.items() if len(text) <= MAX_DOCUMENT_CHARS}
    harvest.add_to_pool(pool, short.values())
    for memory in memories:
        source, text = memory["evidence"][0], texts[memory["id"]]
        if source not in short or not 30 <= len(text) <= 200:
            continue
        near = [t for i, t in short.items()
                if session_of[i] == session_of[source] and i != source]
        harvest.drafts.append(Draft(
            f"{memory['id']}/turn/{record['id']}", "en", "realmem_turn", record["id"],
            _project(record["id"], memory["id"]), text, (short[source],), tuple(near), pool))


# --- questions and the turns that answer them ---

_QUESTION = re.compile(r"[?？]\s*$")


def turn_drafts(record: Record, harvest: Harvest, *, source: str, names: set[str]) -> None:
    """A question turn and the turn after it.

    Negatives are the dialogue's other turns; answers of other dialogues too where the question
    names what it is about (one of `names`), since others might answer it as well otherwise.
    """
    turns = record["sessions"][0]["turns"]
    texts = [document(t["text"]) for t in turns]
    pool = f"{source}/answers"
    for n in range(len(turns) - 1):
        question, answer = texts[n], texts[n + 1]
        if not _QUESTION.search(question) or _QUESTION.search(answer) or len(answer) < 6:
            continue
        if role_of(turns[n]["speaker"]) != "user" or len(question) < 6:
            continue
        harvest.add_to_pool(pool, [answer])
        whole = any(name in question for name in names)
        near = [t for m, t in enumerate(texts) if m not in (n, n + 1)]
        near.sort(key=lambda t: -lexical_f1(t, question))
        harvest.drafts.append(Draft(
            f"{record['id']}/{turns[n]['id']}", record["lang"], source, record["id"],
            record["id"], shorten(question, MAX_QUERY_CHARS), (answer,), tuple(near),
            pool if whole else None))


# --- two languages ---


def parallel_drafts(left: Record, right: Record, harvest: Harvest) -> None:
    """A turn and its counterpart in the other language, both ways.

    Only sessions in which the same roles speak in the same order are taken as parallel.
    """
    for a, b in zip(left["sessions"], right["sessions"], strict=False):
        if [role_of(t["speaker"]) for t in a["turns"]] != [role_of(t["speaker"])
                                                           for t in b["turns"]]:
            continue
        for record, mine, theirs in ((left, a, b), (right, b, a)):
            pool = f"{record['id']}/other"
            texts = [document(t["text"]) for t in theirs["turns"]]
            harvest.add_to_pool(pool, texts)
            for turn, text in zip(mine["turns"], texts, strict=True):
                if len(turn["text"]) < 8:
                    continue
                harvest.drafts.append(Draft(
                    f"{record['id']}/{turn['id']}/other", record["lang"], "parallel",
                    record["id"], left["group"], shorten(turn["text"], MAX_QUERY_CHARS), (text,),
                    tuple(t for t in texts if t != text), pool))
