"""The check verbs of the cases: what a step brought forth against what was expected.

A verb that is not known here raises `Unsupported`, which makes a case void, never passed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Check = dict[str, Any]

_DENIAL = re.compile(r"\bnot\b|n['’]t\b|\bno\b|\bnever\b|\bwrong\b|不|没|未|否|误", re.I)
_SENTENCE = re.compile(r"[^。！？!?.;；\n]+")
_SUBJECT_IS_USER = re.compile(r"^\s*(?:the\s+)?(?:user\b|i\b|my\b|用户|我)", re.I)
_DATE = re.compile(r"(?<!\d)(\d{4})[-/.年](\d{1,2})[-/.月](\d{1,2})")


class Unsupported(Exception):
    """A step or a check that this runner cannot do; the message says which."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A memory as a step returned it."""

    text: str
    subject: str = ""
    event_time: str | None = None


@dataclass(slots=True)
class StepResult:
    """What one step brought forth; what does not apply stays None.

    Attributes:
        memories: Results in order, of one user.
        by_user: The same for steps over several users.
        reply: Text of an answer.
        verdict: `accept` or `reject` of a text check.
        wanted: The verdict that the step asked for.
        refused: Our own error that the call raised.
        values: Values that a library function returned.
        numbers: Named counts: errors, total, deleted.
        words: Named words: integrity.
        messages: What the answering model was sent.
    """

    memories: list[Shown] | None = None
    by_user: dict[str, list[Shown]] | None = None
    reply: str | None = None
    verdict: str | None = None
    wanted: str | None = None
    refused: str | None = None
    values: list[Any] | None = None
    numbers: dict[str, int] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    messages: list[dict[str, str]] | None = None


def _memories(result: StepResult, verb: str) -> list[Shown]:
    if result.memories is None:
        raise Unsupported(f"check {verb} on a step without memories")
    return result.memories


def _reply(result: StepResult, verb: str) -> str:
    if result.reply is None:
        raise Unsupported(f"check {verb} on a step without a reply")
    return result.reply


def _number(result: StepResult, name: str) -> int:
    if name not in result.numbers:
        raise Unsupported(f"check {name} on a step that does not count it")
    return result.numbers[name]


def _is_of_user(memory: Shown) -> bool:
    if memory.subject:
        return memory.subject.casefold() in ("user", "the user", "用户", "我", "i")
    return bool(_SUBJECT_IS_USER.match(memory.text))


def asserts(text: str, pattern: str) -> bool:
    """Whether a text matches in a sentence that denies nothing."""
    found = [match.span() for match in re.finditer(pattern, text)]
    return any(
        sentence.start() <= start < sentence.end() and not _DENIAL.search(sentence.group())
        for start, _ in found for sentence in _SENTENCE.finditer(text)
    )


def _counts(memory: Shown, check: Check) -> bool:
    if not re.search(check["match"], memory.text):
        return False
    if "also" in check and not re.search(check["also"], memory.text):
        return False
    if check.get("subject") == "user" and not _is_of_user(memory):
        return False
    return check.get("polarity") != "asserted" or asserts(memory.text, check["match"])


def _count(result: StepResult, check: Check, _: Sequence[StepResult]) -> str | None:
    found = sum(_counts(memory, check) for memory in _memories(result, "count"))
    low, high = check.get("min", 0), check.get("max", float("inf"))
    if low <= found <= high:
        return None
    return f"{found} results match {check['match']!r}, wanted {low}..{high}"


def _rank(result: StepResult, check: Check, _: Sequence[StepResult]) -> str | None:
    memories = _memories(result, "rank")
    if len(memories) < check["n"]:
        return f"only {len(memories)} results, wanted one at rank {check['n']}"
    return _text_fault(memories[check["n"] - 1].text, check)


def _text_fault(text: str, check: Check) -> str | None:
    if "match" in check and not re.search(check["match"], text):
        return f"{text!r} does not match {check['match']!r}"
    if "lack" in check and re.search(check["lack"], text):
        return f"{text!r} matches {check['lack']!r}"
    return None


def _text(result: StepResult, check: Check, _: Sequence[StepResult]) -> str | None:
    return _text_fault(_reply(result, "text"), check)


def _verdict(result: StepResult, check: Check, _: Sequence[StepResult]) -> str | None:
    wanted = check.get("equal", result.wanted)
    if result.verdict is None or wanted is None:
        raise Unsupported("check verdict on a step that gives none")
    allowed = ("accept", "reject") if wanted == "reject-or-out-of-scope" else (wanted,)
    return None if result.verdict in allowed else f"verdict {result.verdict}, wanted {wanted}"


def _equal(result: StepResult, check: Check, _: Sequence[StepResult]) -> str | None:
    if result.values is None:
        raise Unsupported("check equal on a step without values")
    wrong = [f"{got!r} for {want!r}" for got, want in zip(result.values, check["to"], strict=True)
             if got != want]
    return f"values differ: {'; '.join(wrong)}" if wrong else None


def _named_count(name: str) -> Callable[[StepResult, Check, Sequence[StepResult]], str | None]:
    def check_count(result: StepResult, check: Check, _: Sequence[StepResult]) -> str | None:
        got = _number(result, name)
        return None if got == check["equal"] else f"{name} is {got}, wanted {check['equal']}"
    return check_count


def _integrity(result: StepResult, check: Check, _: Sequence[StepResult]) -> str | None:
    if "integrity" not in result.words:
        raise Unsupported("check integrity on a step that does not report it")
    got = result.words["integrity"]
    return None if got == check["equal"] else f"integrity is {got!r}, wanted {check['equal']!r}"


def _refuses(result: StepResult, check: Check, _: Sequence[StepResult]) -> str | None:
    return None if result.refused is not None else "the call was not refused"


def _each_only_own(result: StepResult, check: Check, earlier: Sequence[StepResult]) -> str | None:
    """Every user who said something sees it, all of it and nothing else."""
    if result.by_user is None:
        raise Unsupported("check each_only_own on a step without users")
    said = next((r.by_user for r in reversed(earlier) if r.by_user is not None), None)
    if said is None:
        raise Unsupported("check each_only_own: no earlier step says who said what")
    for user, memories in result.by_user.items():
        own = {memory.text for memory in said.get(user, ())}
        got = [memory.text for memory in memories]
        if set(got) - own:
            return f"user {user!r} sees {sorted(set(got) - own)}"
        if own - set(got):
            return f"user {user!r} does not see {sorted(own - set(got))}"
    return None


def _empty_for(result: StepResult, check: Check, _: Sequence[StepResult]) -> str | None:
    if result.by_user is None:
        raise Unsupported("check empty_for on a step without users")
    got = result.by_user.get(check["user"], [])
    return f"user {check['user']!r} sees {[m.text for m in got]}" if got else None


def _valid_utf8(result: StepResult, check: Check, _: Sequence[StepResult]) -> str | None:
    for memory in _memories(result, "all_valid_utf8_no_nul"):
        if "\x00" in memory.text or any("\ud800" <= c <= "\udfff" for c in memory.text):
            return f"{memory.text!r} holds NUL or a lone surrogate"
    return None


def _own_dates(result: StepResult, check: Check, _: Sequence[StepResult]) -> str | None:
    """Every date of a memory is among those of the turn that it came from."""
    for memory in _memories(result, check["do"]):
        allowed = {day for pattern, days in check["allowed"].items()
                   if re.search(pattern, memory.text) for day in days}
        seen = {f"{int(y):04}-{int(m):02}-{int(d):02}" for y, m, d in
                _DATE.findall(f"{memory.text} {memory.event_time or ''}")}
        if seen - allowed:
            return f"{memory.text!r} has the dates {sorted(seen - allowed)}"
    return None


def _system_role_lacks(result: StepResult, check: Check, _: Sequence[StepResult]) -> str | None:
    if result.messages is None:
        raise Unsupported("check system_role_lacks: no messages were captured")
    system = [m["content"] for m in result.messages if m["role"] == "system"]
    wrong = [text for text in system if re.search(check["match"], text)]
    return f"a system message matches {check['match']!r}" if wrong else None


_VERBS: dict[str, Callable[[StepResult, Check, Sequence[StepResult]], str | None]] = {
    "count": _count, "rank": _rank, "text": _text, "verdict": _verdict, "equal": _equal,
    "errors": _named_count("errors"), "total": _named_count("total"),
    "deleted": _named_count("deleted"), "integrity": _integrity, "refuses": _refuses,
    "each_only_own": _each_only_own, "empty_for": _empty_for,
    "all_valid_utf8_no_nul": _valid_utf8, "dates_subset_of_own_turn": _own_dates,
    "system_role_lacks": _system_role_lacks,
}
VERBS = tuple(_VERBS)


def fault_of(check: Check, results: Sequence[StepResult]) -> str | None:
    """What is wrong by this check; None when it holds.

    Raises:
        Unsupported: The verb is not known, or the step does not bring forth what it looks at.
    """
    verb = check["do"]
    if verb not in _VERBS:
        raise Unsupported(f"check {verb}")
    at = check["at"]
    if not 0 <= at < len(results):
        raise Unsupported(f"check {verb} looks at step {at}, which did not run")
    fault = _VERBS[verb](results[at], check, results[:at])
    return None if fault is None else f"step {at}: {fault}"
