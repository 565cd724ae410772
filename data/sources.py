"""One reader per public corpus, all giving annotated windows or question groups.

Corpora are read from a folder (`external_data/` by default) and never copied. A file that is not
there is skipped and reported; nothing here writes text that is not in the corpus, apart from the
frame sentence that turns a slot list into a statement. Public homes: RealMem (Apache-2.0), SGD
(github.com/google-research-datasets/dstc8-schema-guided-dialogue, CC BY-SA 4.0), CrossWOZ
(github.com/thu-coai/CrossWOZ, Apache-2.0), KdConv (github.com/thu-coai/KdConv, Apache-2.0),
MemoryBank (github.com/zhongwanjun/MemoryBank-SiliconFriend, MIT).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memory_runtime.corpus import KEEP_MUST, KEEP_OPTIONAL, AnnotatedWindow, Gold, role_of
from memory_runtime.literals import find_literals
from memory_runtime.schema import Candidate, Kind, Layer, Turn, Window
from memory_runtime.windows import (
    WindowLimits,
    clip_to_tokens,
    cut_windows,
    estimate_tokens,
    text_overlap,
)

TRAINING_PERSONAS = ("realmem/Ethan_Hunt", "realmem/Kenta_Tanaka", "realmem/Sarah_Miller")
"""RealMem users whose sessions may be learnt from; the other two are for evaluation."""

CLIP_TOKENS = 45
"""RealMem's turns are long; their middle is cut out."""

REALMEM = WindowLimits(max_turns=3, max_tokens=160)

SHORT = WindowLimits(max_turns=8, max_tokens=90, max_turn_tokens=80)
"""Windows of the long-winded corpora are cut short, so that a CPU run sees many of them."""


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """What a manifest says of a corpus file."""

    name: str
    path: str
    licence: str
    sha256: str
    records: list[str]


STORY = WindowLimits(max_turns=8, max_tokens=170)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def _turns(session: dict[str, Any]) -> list[Turn]:
    time = session.get("time")
    return [Turn(t["id"], t["speaker"], t["text"], role_of(t["speaker"]), t.get("time") or time,
                 session["id"]) for t in session["turns"]]


def _gold(
    text: str, evidence: list[str], layer: Layer, kind: Kind, *, must: bool, language: str,
    subject: str = "user", attribute: str = "", polarity: str = "affirmed",
) -> Gold:
    candidate = Candidate(
        text, tuple(evidence), subject, attribute, layer, kind,
        "negated" if polarity == "negated" else "affirmed",
        keep=KEEP_MUST if must else KEEP_OPTIONAL, language=language)
    literals = tuple(item.raw for item in find_literals(text))
    return Gold(candidate, literals, must, has_scores=False)


# --- RealMem: memory points with their source turn; chats about anything as windows of nothing ---

_KINDS: list[tuple[str, Kind]] = [
    (r"\b(must|budget|maximum|at most|deal-?breaker|no more than|constraint|cannot|limit)\b",
     Kind.CONSTRAINT),
    (r"\b(prefers?|likes?|loves?|enjoys?|dislikes?|favou?rite)\b", Kind.PREFERENCE),
    (r"\b(decided|agreed|chosen|chose|confirmed|selected|finali[sz]ed|locked in)\b", Kind.DECISION),
    (r"\b(will|plans?|scheduled?|next step|going to|aims?|goal)\b", Kind.PLAN),
]


_NOT = re.compile(r"\b(not|never|no longer)\b")


def _realmem_gold(memory: dict[str, Any]) -> Gold | None:
    text = re.sub(r"^【[^】]*】\s*", "", memory["text"]).strip()
    if not 20 <= len(text) <= 320 or text.lower().startswith("assistant is awaiting"):
        return None
    kind = next((k for pattern, k in _KINDS if re.search(pattern, text, re.I)), Kind.FACT)
    if memory["kind"] == "schedule":
        kind = Kind.PLAN
    firm = kind in (Kind.CONSTRAINT, Kind.DECISION) or bool(re.search(r"\d", text))
    loose = Layer.SEMANTIC if memory["kind"] == "static" else Layer.EPISODIC
    layer = Layer.CORE if firm else loose
    return _gold(text, memory["evidence"], layer, kind, must=True, language="en",
                 polarity="negated" if _NOT.search(text) else "affirmed")


def _clipped(turn: Turn) -> Turn:
    return replace(turn, text=clip_to_tokens(turn.text, CLIP_TOKENS))


def _still_said(gold: Gold, window: Window) -> bool:
    """Whether the clipped evidence still carries the memory."""
    said = {turn.id: turn.text for turn in window.turns}
    text = " ".join(said[turn_id] for turn_id in gold.candidate.evidence if turn_id in said)
    return text_overlap(gold.candidate.text, text) >= 0.5


def realmem_windows(path: Path) -> Iterator[AnnotatedWindow]:
    """Windows of the training personas, long turns clipped; gold that is still said in them."""
    for record in _records(path):
        if record["id"] not in TRAINING_PERSONAS:
            continue
        by_turn: dict[str, list[dict[str, Any]]] = {}
        for memory in record["memories"]:
            for turn_id in memory["evidence"][:1]:
                by_turn.setdefault(turn_id, []).append(memory)
        for session in record["sessions"]:
            idle = str(session.get("topic", "")).startswith("Enhanced")
            turns = [_clipped(turn) for turn in _turns(session)]
            for window in cut_windows(turns, limits=REALMEM, prefix=f"{record['id']}/"
                                                                    f"{session['id']}/"):
                found = [m for turn_id in window.turn_ids for m in by_turn.get(turn_id, ())]
                read = [_realmem_gold(memory) for memory in found]
                gold = [g for g in read if g is not None and _still_said(g, window)]
                if None in read or not 0 < len(gold) + idle < 5 or len(window.turns) < 3:
                    continue
                yield AnnotatedWindow(replace(window, context=()), "en", "realmem",
                                      gold=tuple(gold))


# --- SGD: what was booked is a memory, what was looked up is not ---

_BOOKED = re.compile(
    r"\b(confirmed|booked|reserved|reservation (?:has been|is|was) made|successful|scheduled|"
    r"purchased|have been sent|has been sent|made without errors)\b", re.I)


def _sgd_booking(record: dict[str, Any], turns: list[Turn]) -> Gold | None:
    """The booking that the last of these turns confirms, from the slots said in them."""
    inside = {turn.id: n for n, turn in enumerate(turns)}
    slots: dict[str, tuple[str, str]] = {}
    service = ""
    for memory in record["memories"]:
        turn_id = memory["evidence"][0]
        if turn_id in inside and memory["kind"] != "agent_inform":
            service, slot, value = memory["slot"]
            if value.lower() not in ("true", "false", "dontcare"):
                slots[slot.replace("_", " ")] = (value, turn_id)
    said = list(slots.items())[-6:]
    if len(said) < 2:
        return None
    listed = ", ".join(f"{name} {value}" for name, (value, _) in said)
    evidence = sorted({turn_id for _, (_, turn_id) in said}, key=inside.__getitem__)[-5:]
    name = re.sub(r"s?_\d+$", "", service).lower()
    return _gold(f"The user made a {name} booking: {listed}.",
                 list(dict.fromkeys([*evidence, turns[-1].id])), Layer.CORE, Kind.DECISION,
                 must=True, language="en", attribute=f"{name} booking")


def sgd_windows(path: Path) -> Iterator[AnnotatedWindow]:
    """The turns up to a dialogue's first booking, or its start where it only looks things up."""
    for record in _records(path):
        turns = _turns(record["sessions"][0])
        done = next((n for n, turn in enumerate(turns) if turn.role == "assistant"
                     and _BOOKED.search(turn.text) and "?" not in turn.text), None)
        part = turns[:8] if done is None else turns[max(0, done - 7) : done + 1]
        booking = None if done is None else _sgd_booking(record, part)
        if (done is None) == (booking is None):
            yield AnnotatedWindow(Window(record["id"] + "/w", tuple(part)), "en", "sgd",
                                  gold=(booking,) if booking else ())


_DECIDES = re.compile(
    r"决定|就(?:去|住|选|它|这家|那家)|订|打算|孩子|爸|妈|老婆|老公|朋友")

# --- CrossWOZ: one-off wishes and look-ups, which are no memories ---


def crosswoz_windows(path: Path) -> Iterator[AnnotatedWindow]:
    """The first window of each dialogue: search filters and look-ups, so nothing to store.

    Dialogues in which the user says what he decides are left out; their slots do not tell what a
    memory of the decision would be.
    """
    for record in _records(path):
        window = cut_windows(_turns(record["sessions"][0]), limits=SHORT,
                             prefix=record["id"] + "/")[0]
        if not any(turn.role == "user" and _DECIDES.search(turn.text) for turn in window.turns):
            yield AnnotatedWindow(window, "zh", "crosswoz")


# --- KdConv: talk about films, music and places; facts about the world, none about the speakers ---

_SELF = re.compile(r"我(?!们?(?:国|知道|不知道|记得|听说))")


def kdconv_windows(path: Path) -> Iterator[AnnotatedWindow]:
    """Windows in which nobody speaks of himself: nothing in them is worth storing."""
    for record in _records(path):
        for window in cut_windows(_turns(record["sessions"][0]), limits=SHORT,
                                  prefix=record["id"] + "/"):
            if len(window.turns) >= 5 and not any(_SELF.search(t.text) for t in window.turns):
                yield AnnotatedWindow(window, "zh", "kdconv")
                break


# --- MemoryBank: a first talk in which a person names himself and his hobbies ---


def memorybank_windows(path: Path) -> Iterator[AnnotatedWindow]:
    """Opening turns of each user's first day, with the name and hobbies said in them."""
    for record in _records(path):
        language = record["lang"]
        turns = _turns(record["sessions"][0])[:6]
        window = Window(record["id"] + "/d0", tuple(turns), session_time=turns[0].observed_at)
        name = record["meta"]["name"] if isinstance(record["meta"], dict) else record["user"]
        listed_hobbies = str(record["meta"].get("hobbies", ""))
        hobbies = [h for h in re.split(r"[，,、;；]\s*", listed_hobbies) if h]
        gold = []
        for turn in turns:
            if turn.role != "user":
                continue
            liked = [h for h in hobbies if h.lower() in turn.text.lower()]
            if len(liked) >= 2:
                listed = "、".join(liked) if language == "zh" else ", ".join(liked)
                text = f"{name}喜欢{listed}。" if language == "zh" else f"{name} enjoys {listed}."
                gold.append(_gold(text, [turn.id], Layer.CORE, Kind.PREFERENCE, must=True,
                                  language=language, subject=name,
                                  attribute="爱好" if language == "zh" else "hobbies"))
        if gold:
            yield AnnotatedWindow(window, language, f"memorybank_{language}", gold=tuple(gold))


# --- our own stories: facts with evidence, without scores ---


def story_windows(path: Path) -> Iterator[AnnotatedWindow]:
    """Windows of an authored story with the facts that are told in them."""
    story = json.loads(path.read_text(encoding="utf-8"))
    for session in story["sessions"]:
        for window in cut_windows(_turns(session), limits=STORY,
                                  prefix=f"{story['id']}/{session['id']}/"):
            inside = set(window.turn_ids)
            gold = []
            for fact in story["facts"]:
                evidence = [turn_id for turn_id in fact["evidence"] if turn_id in inside]
                item = _gold(fact["text"], evidence, Layer(fact["layer"]), Kind.FACT, must=True,
                             language=story["lang"]) if evidence else None
                if item and (evidence == fact["evidence"] or _still_said(item, window)):
                    gold.append(item)
            if len(window.turns) > 2:
                yield AnnotatedWindow(replace(window, context=()), story["lang"], "stories",
                                      story["domain"], gold=tuple(gold))


Reader = Callable[[Path], Iterator[AnnotatedWindow]]

WINDOW_SOURCES: tuple[tuple[str, str, str, Reader], ...] = (
    ("realmem", "dev/realmem.jsonl", "Apache-2.0", realmem_windows),
    ("sgd", "dev/sgd.jsonl", "CC BY-SA 4.0", sgd_windows),
    ("crosswoz", "train_extra/crosswoz.jsonl", "Apache-2.0", crosswoz_windows),
    ("kdconv", "train_extra/kdconv.jsonl", "Apache-2.0", kdconv_windows),
    ("memorybank_zh", "dev/memorybank_zh.jsonl", "MIT", memorybank_windows),
    ("memorybank_en", "dev/memorybank_en.jsonl", "MIT", memorybank_windows),
)
"""Every corpus that released weights may learn from, and its reader. Nothing else is read."""


def source_info(name: str, path: Path, licence: str, records: list[str]) -> SourceInfo:
    """The manifest entry of a corpus file that was read."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return SourceInfo(name, path.name, licence, digest, records)


def fits(window: Window, max_tokens: int) -> bool:
    """Whether a window's text stays under a token estimate."""
    return sum(estimate_tokens(turn.text) for turn in window.turns) <= max_tokens
