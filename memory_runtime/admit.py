"""Candidates and what the scope holds -> insert, merge, supersede, short-term or drop.

Similarity alone decides nothing: two texts that differ in a digit, a date, a name or a negation are
different facts, however alike they look. They replace each other only where the newer one says that
something has changed, or where both speak of one attribute of one subject.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from difflib import SequenceMatcher
from typing import Literal as OneOf

import numpy as np
from numpy.typing import NDArray

from memory_runtime.config import MemoryConfig
from memory_runtime.days import seconds_of
from memory_runtime.index import ScopeIndex
from memory_runtime.lexical import content_terms, is_stop_term, normalise, overlap
from memory_runtime.literals import Literal, find_literals, same_value
from memory_runtime.schema import Candidate, Kind, Layer, Memory, State
from memory_runtime.store import HistoryEvent, StoredMemory
from memory_runtime.verify import negations

Action = OneOf["insert", "merge", "supersede", "outdated", "short_term", "drop"]

LIVING = (State.ACTIVE, State.SHORT_TERM)
"""States that count as held by the scope."""

_UPDATE_CUE = re.compile(
    "改成|改为|改到|改了|改用|换成|换了|换到|换为|变成|变了|现在是|现在[改换用住叫]|不再|已经不|更新|搬到|搬去|"
    "搬家|调整|升到|降到|涨到|不对|说错|记错|其实是|应该是|更正|纠正|取消|推迟|提前到|不是.{1,12}[而，,]\\s?是|"
    r"\bno longer\b|\bany ?more\b|\bchanged?\b|\bswitch(?:ed|ing)?\b|"
    r"\bmov(?:ed|ing) (?:to|from|out)\b|\binstead\b|\bnow\b|\bactually\b|\bcorrection\b|"
    r"\bupdated?\b|\bI mean(?:t)?\b|\bnot .{1,20}, but\b|\bfrom now on\b|"
    r"\breplac(?:ed|ing)\b|\brescheduled\b|\bpostponed\b|\bcancel(?:l?ed)?\b|"
    r"\bwas wrong\b|\bmisspoke\b", re.IGNORECASE)
_USER = frozenset(("", "user", "the user", "用户", "我", "i", "me", "本人"))
_TOKENS = re.compile(r"[\u3400-\u9fff]|[^\W_\u3400-\u9fff]+")
_LASTING_KINDS = frozenset((Kind.FACT, Kind.PREFERENCE, Kind.CONSTRAINT, Kind.DECISION, Kind.PLAN,
                            Kind.RELATIONSHIP))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A grounded candidate with what admission needs beside it.

    Attributes:
        candidate: Slots, explicit flag and language already set.
        vector: Unit vector of its text, [D] float32, or None.
        observed_at: ISO time at which its last evidence was said.
        source_text: Text of its evidence turns, for update cues.
        agent, session: Labels.
    """

    candidate: Candidate
    vector: NDArray[np.float32] | None
    observed_at: str
    source_text: str = ""
    agent: str | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with an arrival.

    Attributes:
        action: The verdict; `outdated` is an arrival that was superseded before it came.
        rows: Memories to store or replace.
        events: What goes into the history.
        memory_id: The memory that now stands for the arrival; None when it was dropped.
    """

    action: Action
    rows: tuple[StoredMemory, ...] = ()
    events: tuple[HistoryEvent, ...] = ()
    memory_id: str | None = None


@dataclass(frozen=True, slots=True)
class _Likeness:
    """An arrival beside one memory of the scope."""

    row: StoredMemory
    cosine: float
    shared: float
    same_subject: bool
    same_attribute: bool
    slots_agree: bool
    changed_types: frozenset[str]
    same_polarity: bool
    is_swap: bool

    @property
    def nearness(self) -> float:
        return max(self.cosine, self.shared)


# --- comparing two texts ---


def subject_key(subject: str) -> str:
    """The user under all names is one; everyone else by name."""
    name = normalise(subject).strip()
    return "user" if name in _USER else name


def attribute_key(attribute: str) -> str:
    """An attribute for comparison."""
    return "".join(_TOKENS.findall(normalise(attribute)))


def _unmatched(left: Sequence[Literal], right: Sequence[Literal]) -> list[Literal]:
    return [a for a in left if not any(same_value(a, b) for b in right)]


def compare_literals(
    left: Sequence[Literal], right: Sequence[Literal]
) -> tuple[bool, frozenset[str]]:
    """Whether two sets of literals say the same, and the types in which each has its own value."""
    only_left, only_right = _unmatched(left, right), _unmatched(right, left)
    changed = {a.type for a in only_left} & {b.type for b in only_right}
    measured = {"number", "money", "percent", "duration"}
    if measured & {a.type for a in only_left} and measured & {b.type for b in only_right}:
        changed |= measured & ({a.type for a in only_left} | {b.type for b in only_right})
    return not only_left and not only_right, frozenset(changed)


def is_swap(left: str, right: str) -> bool:
    """Whether two texts are one sentence with a word or a few characters exchanged.

    我的医生是陈默 and 我的医生是陈墨 are two facts although no form tells that these are names; a
    paraphrase differs in more places.
    """
    a, b = _TOKENS.findall(normalise(left)), _TOKENS.findall(normalise(right))
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    if not a or not b or matcher.ratio() < 0.6:
        return False
    swaps = [(a[i:j], b[k:m]) for op, i, j, k, m in matcher.get_opcodes() if op == "replace"]
    return any(not all(is_stop_term(t) for t in x) and not all(is_stop_term(t) for t in y)
               and len(x) <= 6 and len(y) <= 6 for x, y in swaps)


def is_newer(left: str, right: str) -> bool:
    """Whether one ISO time is at or after another; a time without an offset counts as UTC."""
    return seconds_of(left) >= seconds_of(right)


# --- the neighbours of an arrival ---


def _near_rows(arrival: Arrival, index: ScopeIndex) -> dict[int, float]:
    """Rows worth comparing: nearest by vector, by words, and of the same attribute -> cosine."""
    candidate = arrival.candidate
    living = index.allowed(lambda row: row.memory.state in LIVING)
    cosines: dict[int, float] = {}
    if arrival.vector is not None:
        cosines = dict(index.by_vector(arrival.vector, 20, living))
    numbers = set(cosines) | {n for n, _ in index.by_words(candidate.text, 20, living)}
    attribute, subject = attribute_key(candidate.attribute), subject_key(candidate.subject)
    if attribute:
        numbers |= {n for n, row in enumerate(index.rows) if living[n]
                    and attribute_key(row.memory.candidate.attribute) == attribute
                    and subject_key(row.memory.candidate.subject) == subject}
    for number in numbers - set(cosines):
        comparable = arrival.vector is not None and bool(index.has_vector[number])
        cosines[number] = float(index.matrix[number] @ arrival.vector) if comparable else 0.0
    return cosines


def _likeness(arrival: Arrival, row: StoredMemory, cosine: float) -> _Likeness:
    new, old = arrival.candidate, row.memory.candidate
    agree, changed = compare_literals(
        find_literals(new.text, arrival.observed_at),
        find_literals(old.text, row.memory.observed_at))
    attribute = attribute_key(new.attribute)
    return _Likeness(
        row=row, cosine=cosine, shared=overlap(content_terms(new.text), content_terms(old.text)),
        same_subject=subject_key(new.subject) == subject_key(old.subject),
        same_attribute=bool(attribute) and attribute == attribute_key(old.attribute),
        slots_agree=agree, changed_types=changed,
        same_polarity=new.polarity == old.polarity
        and negations(new.text) % 2 == negations(old.text) % 2,
        is_swap=is_swap(new.text, old.text))


def _is_same_fact(like: _Likeness, arrival: Arrival, config: MemoryConfig) -> bool:
    """Same meaning, and equal slots, subject and polarity."""
    old = like.row.memory.candidate
    if not (like.same_subject and like.same_polarity and like.slots_agree):
        return False
    texts = ["".join(_TOKENS.findall(normalise(c.text))) for c in (arrival.candidate, old)]
    if texts[0] == texts[1]:
        return True
    if like.is_swap or arrival.candidate.kind != old.kind and like.shared < 0.9:
        return False
    return like.shared >= 0.85 or (
        like.cosine >= config.admit.merge_cosine and like.shared >= 0.4)


def _replaces(like: _Likeness, arrival: Arrival, config: MemoryConfig) -> bool:
    """Whether arrival and memory are two values of one thing, of which the newer holds."""
    if not like.same_subject:
        return False
    cue = has_update_cue(arrival.source_text) or has_update_cue(arrival.candidate.text)
    changed = bool(like.changed_types) or not like.same_polarity
    if like.same_attribute:
        lasting = arrival.candidate.kind in _LASTING_KINDS
        # Two children have two ages: where the name differs too, only a cue makes it an update.
        many = "name" in like.changed_types and len(like.changed_types) > 1
        if cue and like.shared >= 0.2:
            return changed or (lasting and like.shared < 0.85)
        return changed and lasting and not many and like.shared >= 0.3
    return changed and cue and like.shared >= config.admit.similar_text


def has_update_cue(text: str) -> bool:
    """Whether a text says that something has changed (改成, no longer, now, actually)."""
    return bool(_UPDATE_CUE.search(text))


# --- scores ---


def novelty_of(arrival: Arrival, near: Sequence[_Likeness], config: MemoryConfig) -> float:
    """How much of an arrival the scope does not hold, in meaning and slot by slot, in [0, 1]."""
    floor = config.admit.unrelated_cosine
    known = 0.0
    for like in near:
        scaled = max(0.0, (like.cosine - floor) / (1 - floor)) if floor < 1 else 0.0
        known = max(known, min(1.0, max(scaled, like.shared)))
    literals = find_literals(arrival.candidate.text, arrival.observed_at)
    held = [literal for like in near for literal in find_literals(
        like.row.memory.candidate.text, like.row.memory.observed_at)]
    new_slots = len(_unmatched(literals, held)) / len(literals) if literals else 0.0
    return max(1.0 - known, 0.5 * new_slots)


def importance_of(candidate: Candidate, novelty: float, config: MemoryConfig) -> float:
    """Weighted sum of the scores, cut to [0, 1]."""
    weights, scores = config.importance, candidate.scores
    total = (weights.reuse * scores.reuse + weights.goal * scores.goal
             + weights.novelty * novelty + weights.emphasis * scores.emphasis
             + weights.emotion * scores.emotion + weights.commitment * scores.commitment)
    return min(1.0, max(0.0, total))


# --- the decision ---


def _event(memory_id: str, now: str, name: str, **detail: object) -> HistoryEvent:
    return HistoryEvent(memory_id, now, name, dict(detail))


def _new_row(
    arrival: Arrival, config: MemoryConfig, *, now: str, novelty: float, state: State
) -> StoredMemory:
    memory = Memory(
        id=f"m-{uuid.uuid4().hex[:20]}", candidate=arrival.candidate,
        observed_at=arrival.observed_at, created_at=now, novelty=novelty, state=state,
        importance=importance_of(arrival.candidate, novelty, config),
        agent=arrival.agent, session=arrival.session)
    return StoredMemory(memory, arrival.vector, config.store.embedder)


def _merge(like: _Likeness, arrival: Arrival, config: MemoryConfig, now: str) -> Decision:
    """Add the evidence of a repeat; a repeat is a sign of weight, and may lift a short-term one."""
    old, new = like.row.memory, arrival.candidate
    held = old.candidate
    explicit = held.explicit or new.explicit
    candidate = replace(
        held, evidence=tuple(dict.fromkeys((*held.evidence, *new.evidence))),
        slots=held.slots + tuple(slot for slot in new.slots if slot not in held.slots),
        explicit=explicit, layer=Layer.CORE if explicit else held.layer)
    importance = min(1.0, max(old.importance, importance_of(new, old.novelty, config)) + 0.05)
    lifted = explicit or importance >= config.admit.long_term
    state = State.ACTIVE if lifted else old.state
    memory = replace(old, candidate=candidate, importance=importance, state=state)
    events = [_event(old.id, now, "merged", evidence=list(new.evidence), text=new.text,
                     observed_at=arrival.observed_at)]
    if state != old.state:
        events.append(_event(old.id, now, "promoted"))
    return Decision("merge", (replace(like.row, memory=memory),), tuple(events), old.id)


def _supersede(
    replaced: list[_Likeness], arrival: Arrival, config: MemoryConfig, now: str, novelty: float
) -> Decision:
    """The newer observed time holds; an arrival that is older than what it meets is history."""
    newest = max(replaced, key=lambda like: seconds_of(like.row.memory.observed_at))
    row = _new_row(arrival, config, now=now, novelty=max(novelty, 0.5), state=State.ACTIVE)
    if not is_newer(arrival.observed_at, newest.row.memory.observed_at):
        other = newest.row.memory
        memory = replace(row.memory, state=State.SUPERSEDED, superseded_by=other.id,
                         valid_to=other.observed_at)
        event = _event(memory.id, now, "added_superseded", by=other.id)
        return Decision("outdated", (replace(row, memory=memory),), (event,), memory.id)
    rows, events = [row], [_event(row.memory.id, now, "added", state=row.memory.state.value)]
    for like in replaced:
        old = like.row.memory.with_state(
            State.SUPERSEDED, superseded_by=row.memory.id, valid_to=arrival.observed_at)
        rows.append(replace(like.row, memory=old))
        events.append(_event(old.id, now, "superseded", by=row.memory.id))
        events.append(_event(row.memory.id, now, "supersedes", memory=old.id,
                             text=old.candidate.text))
    return Decision("supersede", tuple(rows), tuple(events), row.memory.id)


def decide(arrival: Arrival, index: ScopeIndex, config: MemoryConfig, *, now: str = "") -> Decision:
    """What becomes of one arrival, given what the scope holds now.

    Args:
        arrival: The grounded candidate.
        index: The scope, up to date.
        config: Weights and thresholds.
        now: ISO time for the history; the clock's when empty.
    """
    now = now or datetime.now(UTC).isoformat()
    near = [_likeness(arrival, index.rows[number], cosine)
            for number, cosine in _near_rows(arrival, index).items()]
    near.sort(key=lambda like: -like.nearness)
    for like in near:
        if _is_same_fact(like, arrival, config):
            return _merge(like, arrival, config, now)
    novelty = novelty_of(arrival, near, config)
    replaced = [like for like in near if _replaces(like, arrival, config)]
    if replaced:
        return _supersede(replaced, arrival, config, now, novelty)
    importance = importance_of(arrival.candidate, novelty, config)
    explicit = arrival.candidate.explicit
    if importance < config.admit.drop_below and not explicit:
        return Decision("drop")
    long_term = explicit or importance >= config.admit.long_term
    state = State.ACTIVE if long_term else State.SHORT_TERM
    row = _new_row(arrival, config, now=now, novelty=novelty, state=state)
    event = _event(row.memory.id, now, "added", state=state.value)
    return Decision("insert" if long_term else "short_term", (row,), (event,), row.memory.id)
