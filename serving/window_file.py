"""Reads extraction windows (one JSON object a line, see the formats document) from files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memory_runtime.errors import SchemaError
from memory_runtime.schema import Candidate, Kind, Layer, Role, Scores, Turn, Window

OPTIONAL_KEEP = 6 / 9
"""`keep` of gold that a good extractor may leave out; what must be kept has 1."""

_ASSISTANTS = ("assistant", "agent", "bot", "system")


def read_windows(path: str | Path) -> list[Window]:
    """Windows of a file, in order.

    Raises:
        SchemaError: A line is no window, or two windows have the same id; names the line.
    """
    return [window for window, _ in read_gold(path)]


def read_gold(path: str | Path) -> list[tuple[Window, list[Candidate]]]:
    """Windows with their gold candidates (none where the line has no `gold`).

    Raises:
        SchemaError: As `read_windows`.
    """
    pairs = []
    seen: set[str] = set()
    for where, row in _rows(Path(path)):
        try:
            window = window_from_json(row)
            gold = [gold_candidate(item) for item in row.get("gold", ())]
        except (KeyError, TypeError, ValueError, AttributeError, SchemaError) as error:
            raise SchemaError(f"{where}: no window: {error!r}") from error
        if window.id in seen:
            raise SchemaError(f"{where}: id {window.id!r} came before; ids must differ")
        seen.add(window.id)
        pairs.append((window, gold))
    return pairs


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise SchemaError(f"{where}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise SchemaError(f"{where}: must be an object, got {type(row).__name__}")
            yield where, row


def _role(turn: dict[str, Any]) -> Role:
    return turn.get("role") or ("assistant" if turn["speaker"] in _ASSISTANTS else "user")


def window_from_json(row: dict[str, Any]) -> Window:
    """A window from its JSON form.

    Raises:
        KeyError, TypeError, SchemaError: A field is missing or wrong.
    """

    def turns(items: list[dict[str, Any]]) -> tuple[Turn, ...]:
        return tuple(
            Turn(str(t["id"]), t["speaker"], t["text"], _role(t), t.get("observed_at"))
            for t in items)

    return Window(
        id=str(row["id"]), turns=turns(row["turns"]), session_time=row.get("session_time"),
        goal=row.get("goal"), known=tuple(row.get("known") or ()),
        context=turns(row.get("context") or []),
    )


def gold_candidate(item: dict[str, Any]) -> Candidate:
    """A gold statement as the candidate that a perfect encoder would emit.

    Raises:
        KeyError, TypeError, ValueError, SchemaError: A field is missing or wrong.
    """
    scores = {name: value / 9 for name, value in item.get("scores", {}).items()}
    return Candidate(
        text=item["text"], evidence=tuple(map(str, item["evidence"])),
        subject=item.get("subject", "user"), attribute=item.get("attribute", ""),
        layer=Layer(item["layer"]), kind=Kind(item["kind"]),
        polarity=item.get("polarity", "affirmed"),
        keep=1.0 if item.get("must", True) else OPTIONAL_KEEP, scores=Scores(**scores),
        event_time=item.get("event_time"), explicit=bool(item.get("explicit", False)),
    )
