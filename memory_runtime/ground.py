"""Grounding in code: every literal of a candidate must stand in its evidence.

A model may word a memory, but it may not make up a number, a date, a name or an identifier. A
candidate with a literal that its evidence turns do not hold, after normalisation and with relative
dates resolved, is refused. Names may come from the whole window, since `he` is resolved from
earlier turns; everything else must be in the turns that the candidate cites.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from memory_runtime.days import local_day
from memory_runtime.literals import Literal, find_literals, same_value
from memory_runtime.numerals import find_numbers, fold, plain
from memory_runtime.schema import Candidate, Kind, Layer, Slot, Turn, Window, detect_language

_DIRECTIVE = re.compile(
    r"记住|记牢|记死了|记一下|帮我[记存]|记下来|(?:千万)?(?:别|不要|不能)忘|务必|"
    r"以后(?:就|都)?(?:不用|不要|别)再问|不用再问|(?:很|非常|特别|十分|最|真的|相当)重要|"
    r"\bremember (?:this|that|it|my|to)\b|(?:please|do) remember|\bdon['’]?t (?:ever )?forget\b|"
    r"\bkeep (?:this |that |it )?in mind\b|\bmake a note\b|\bnote (?:this )?down\b|"
    r"\bthis is important\b|\b(?:very|really|extremely|super|so|most) important\b|"
    r"\bnever ask (?:me )?(?:about )?(?:this|that|it)? ?again\b|"
    r"\bno need to ask (?:me )?again\b|\bmatters? a (?:lot|great deal)\b", re.IGNORECASE)
_DIRECTIVE_DENIED = re.compile(
    r"(?:不|没那么|不是)(?:很|非常|特别|太)?重要|(?:不用|别|无需|没必要)(?:特意)?记|"
    r"记住了吗|(?:还|你)记住|"
    r"\b(?:not|isn['’]t|wasn['’]t) (?:very|really|that|so|super)? ?important\b|"
    r"\bdo(?:n['’]t| not| you) remember\b|\b(?:I|can['’]t) remember\b", re.IGNORECASE)


def has_directive(text: str) -> bool:
    """Whether the speaker says that this must be remembered (记住, this is very important)."""
    return bool(_DIRECTIVE.search(_DIRECTIVE_DENIED.sub(" ", text)))


@dataclass(frozen=True, slots=True)
class Grounded:
    """What grounding made of a candidate.

    Attributes:
        candidate: With slots, event time, explicit flag and language set; None when refused.
        missing: Literals that the evidence does not hold.
        repaired: How many literals were put back into the notation of the evidence.
    """

    candidate: Candidate | None
    missing: tuple[str, ...] = ()
    repaired: int = 0


def _observed(turn: Turn, window: Window) -> str | None:
    return turn.observed_at or window.session_time


def _squeezed(text: str) -> str:
    """Letters and digits only, for looking a literal up whatever its spacing and case."""
    return re.sub(r"[\W_]+", "", fold(text)).casefold()


def _find_raw(literal: Literal, turn: Turn) -> Slot | None:
    """The literal as written in a turn, not inside a longer number or word."""
    escaped = re.escape(fold(literal.raw))
    edge = r"[0-9]" if literal.raw[-1:].isdigit() else r"[A-Za-z0-9]"
    left = r"[0-9.,]" if literal.raw[:1].isdigit() else r"[A-Za-z0-9]"
    match = re.search(rf"(?<!{left}){escaped}(?!{edge})", fold(turn.text), re.IGNORECASE)
    if match is None:
        return None
    raw = turn.text[match.start() : match.end()]
    return Slot(literal.type, raw, literal.value, turn.id, match.span())


def _bare_number(literal: Literal, turn: Turn) -> Slot | None:
    """Numerals that are no literals of their own in the turn (三 without a measure word)."""
    wanted = literal.value.get("number") or literal.value.get("amount")
    text = list(fold(turn.text))
    for held in find_literals(turn.text):
        text[slice(*held.span)] = " " * (held.span[1] - held.span[0])
    for number in find_numbers("".join(text)):
        if wanted is not None and number.low == number.high and plain(number.low) == wanted:
            span = (number.start, number.end)
            return Slot(literal.type, turn.text[span[0] : span[1]], literal.value, turn.id, span)
    return None


def _is_day_of(literal: Literal, turns: list[Turn], window: Window) -> bool:
    """The very day of the dialogue, and its year, need no words in it."""
    if "date" not in literal.value:
        return False
    days = {local_day(_observed(turn, window)) for turn in turns} - {None}
    iso = str(literal.value["date"])
    return iso in {day.isoformat() for day in days if day} | {str(day.year) for day in days if day}


def _source(literal: Literal, turns: list[Turn], window: Window) -> Slot | None:
    """Where the evidence holds a literal."""
    for turn in turns:
        for held in find_literals(turn.text, _observed(turn, window)):
            if same_value(literal, held):
                return Slot(held.type, held.raw, held.value, turn.id, held.span)
    for turn in turns:
        slot = _bare_number(literal, turn)
        if slot is None and literal.type in ("name", "identifier", "date", "time"):
            slot = _find_raw(literal, turn)
        if slot is not None:
            return slot
    return None


def _name_is_known(literal: Literal, candidate: Candidate, window: Window) -> bool:
    """Names may come from any turn of the window, from a speaker or from the subject."""
    parts = [turn.text for turn in (*window.context, *window.turns)]
    parts += [turn.speaker for turn in (*window.context, *window.turns)]
    haystack = _squeezed("\n".join([*parts, *window.known]))
    words = [w for w in re.findall(r"\w+", literal.raw) if len(w) > 1] or [literal.raw]
    return _squeezed(literal.raw) in haystack or all(_squeezed(w) in haystack for w in words)


def _notation_twin(literal: Literal, turns: list[Turn], window: Window) -> Slot | None:
    """The one identifier of the evidence with the same letters and digits, else None."""
    if literal.type != "identifier":
        return None
    twins = [
        Slot(held.type, held.raw, held.value, turn.id, held.span)
        for turn in turns for held in find_literals(turn.text, _observed(turn, window))
        if held.type == "identifier" and _squeezed(held.raw) == _squeezed(literal.raw)]
    return twins[0] if len({twin.raw for twin in twins}) == 1 else None


def _event_time(candidate: Candidate, literals: list[Literal], slots: list[Slot]) -> str | None:
    """The date in the text; for events and plans, else the only date of the evidence."""
    dated = [literal.value["date"] for literal in literals if "date" in literal.value]
    if dated:
        return str(dated[0])
    held = {str(slot.value["date"]) for slot in slots if "date" in slot.value}
    timed = candidate.kind in (Kind.EVENT, Kind.PLAN, Kind.DECISION)
    return held.pop() if timed and len(held) == 1 else None


def ground(candidate: Candidate, window: Window) -> Grounded:
    """Check a candidate against its evidence and set the fields that only code may set."""
    wanted = set(candidate.evidence)
    turns = [turn for turn in window.turns if turn.id in wanted]
    if not turns:
        return Grounded(None, ("(no evidence turn)",))
    observed = _observed(turns[-1], window)
    text, slots, missing, repaired = candidate.text, [], [], 0
    literals = find_literals(text, observed)
    for literal in literals:
        slot = _source(literal, turns, window)
        twin = _notation_twin(literal, turns, window)
        if twin is not None and _squeezed(twin.raw) == _squeezed(literal.raw) != "":
            if fold(twin.raw).casefold() != fold(literal.raw).casefold():
                text, repaired = text.replace(literal.raw, twin.raw), repaired + 1
            slot = twin
        if slot is not None:
            slots.append(slot)
        elif not (literal.type == "name" and _name_is_known(literal, candidate, window)
                  or _is_day_of(literal, turns, window)):
            missing.append(literal.raw)
    if missing:
        return Grounded(None, tuple(missing), repaired)
    explicit = candidate.explicit or any(
        has_directive(turn.text) for turn in turns if turn.role == "user")
    return Grounded(replace(
        candidate, text=text, slots=tuple(slots),
        layer=Layer.CORE if explicit else candidate.layer, explicit=explicit,
        event_time=_event_time(candidate, literals, slots),
        language=detect_language(text)), repaired=repaired)
