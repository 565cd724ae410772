"""Annotated windows on disk (`*.jsonl`, one a line) as types, for every part that reads them.

Used to train, to calibrate and to measure; holds no text of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memory_runtime.errors import SchemaError
from memory_runtime.schema import (
    SCORE_NAMES,
    Candidate,
    Kind,
    Layer,
    Role,
    Scores,
    Turn,
    Window,
    detect_language,
)

_ASSISTANTS = {"assistant", "agent", "ai", "bot", "system"}

KEEP_MUST = 1.0
"""keep of a memory that any good store holds."""

KEEP_OPTIONAL = 6 / 9
"""keep of a memory that may be held."""


@dataclass(frozen=True, slots=True)
class Gold:
    """A memory that an annotator would keep.

    Attributes:
        candidate: The memory; keep is 1 for must and 6/9 for optional ones.
        literals: Exact strings that have to survive.
        must: False when a good store may leave it out.
        has_scores: False when the source gives no scores, only what to keep.
    """

    candidate: Candidate
    literals: tuple[str, ...] = ()
    must: bool = True
    has_scores: bool = True


@dataclass(frozen=True, slots=True)
class Forbidden:
    """A wrong memory that a sloppy system would store."""

    text: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class AnnotatedWindow:
    """A window with what should and what must not come out of it."""

    window: Window
    language: str
    source: str
    domain: str = ""
    gold: tuple[Gold, ...] = ()
    forbidden: tuple[Forbidden, ...] = ()


def role_of(speaker: str) -> Role:
    """The role of a speaker of a corpus that names no roles."""
    name = speaker.strip().lower()
    if name == "tool":
        return "tool"
    return "assistant" if name in _ASSISTANTS else "user"


def _gold(row: dict[str, Any], language: str) -> Gold:
    scores = row.get("scores")
    values = {name: scores[name] / 9 for name in SCORE_NAMES} if scores else \
        dict.fromkeys(SCORE_NAMES, 5 / 9)
    must = bool(row.get("must", True))
    candidate = Candidate(
        text=row["text"], evidence=tuple(map(str, row["evidence"])),
        subject=row.get("subject") or "user",
        attribute=row.get("attribute") or "", layer=Layer(row["layer"]), kind=Kind(row["kind"]),
        polarity=row.get("polarity", "affirmed"), keep=KEEP_MUST if must else KEEP_OPTIONAL,
        scores=Scores(**values), event_time=row.get("event_time"),
        explicit=bool(row.get("explicit", False)), language=language,
    )
    return Gold(candidate, tuple(row.get("literals", ())), must, scores is not None)


def _turn(row: dict[str, Any], session_time: str | None) -> Turn:
    role = row.get("role") or role_of(row["speaker"])
    return Turn(str(row["id"]), row["speaker"], row["text"], role,
                row.get("observed_at") or row.get("time") or session_time)


def read_window(row: dict[str, Any]) -> AnnotatedWindow:
    """One line of a windows file.

    Raises:
        SchemaError: The line does not fit the format; names the window and the fault.
    """
    if not isinstance(row, dict):
        raise SchemaError(f"a window must be an object, got {type(row).__name__}")
    try:
        time = row.get("session_time")
        turns = tuple(_turn(t, time) for t in row["turns"])
        window = Window(
            id=str(row["id"]), turns=turns, session_time=time,
            goal=row.get("goal"), known=tuple(row.get("known") or ()),
            context=tuple(_turn(t, time) for t in row.get("context") or ()),
        )
        ids = set(window.turn_ids)
        stray = [e for g in row.get("gold", ()) for e in g["evidence"] if str(e) not in ids]
        if stray:
            raise SchemaError(f"evidence {stray[:3]} is not among the turns {window.turn_ids}")
        text = " ".join(turn.text for turn in turns)
        language = row.get("lang") or detect_language(text)
        if language not in ("zh", "en"):
            raise SchemaError(f"lang is {language!r}; allowed: zh, en")
        return AnnotatedWindow(
            window, language, row.get("source", ""), row.get("domain", ""),
            tuple(_gold(g, language) for g in row.get("gold", ())),
            tuple(Forbidden(f["text"], f.get("why", "")) for f in row.get("forbidden", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError, SchemaError) as error:
        raise SchemaError(f"no window ({row.get('id', 'without id')!r}): {error!r}") from error


def read_windows(path: str | Path) -> Iterator[AnnotatedWindow]:
    """All windows of a file.

    Raises:
        SchemaError: A line is no JSON object or no window, or an id comes twice; names the line.
    """
    seen: set[str] = set()
    with open(path, encoding="utf-8") as lines:
        for n, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise SchemaError(f"{path}:{n} is not JSON: {error}") from error
            try:
                annotated = read_window(row)
            except SchemaError as error:
                raise SchemaError(f"{path}:{n}: {error}") from error
            if annotated.window.id in seen:
                raise SchemaError(f"{path}:{n}: id {annotated.window.id!r} came before; ids must "
                                  "differ")
            seen.add(annotated.window.id)
            yield annotated


def read_examples(path: str | Path) -> list[tuple[Window, list[Candidate]]]:
    """Worked examples for prompt-based extraction: windows with what should come out of them."""
    return [(item.window, [g.candidate for g in item.gold]) for item in read_windows(path)]
