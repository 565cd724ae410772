"""Detective scenarios on disk: sessions, facts and questions, read and checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pools import Document, Question
from memory_runtime.corpus import role_of
from memory_runtime.errors import ConfigError, SchemaError
from memory_runtime.schema import Turn, parse_time


@dataclass(frozen=True, slots=True)
class Scenario:
    """One story told over several sessions, and what is asked afterwards.

    Attributes:
        id, language, domain, user: As in the file.
        sessions: Turns of each session.
        facts: Rows by id.
        questions: Rows in order.
    """

    id: str
    language: str
    domain: str
    user: str
    sessions: tuple[tuple[Turn, ...], ...]
    facts: dict[str, dict[str, Any]]
    questions: tuple[dict[str, Any], ...]

    @property
    def turns(self) -> list[Turn]:
        """All turns in order."""
        return [turn for session in self.sessions for turn in session]


def _session(row: dict[str, Any]) -> tuple[Turn, ...]:
    time = row["time"]
    parse_time(time, field_name="sessions.time")
    return tuple(Turn(t["id"], t["speaker"], t["text"], t.get("role") or role_of(t["speaker"]),
                      t.get("time") or time, row["id"]) for t in row["turns"])


def read_scenario(path: Path) -> Scenario:
    """One file.

    Raises:
        SchemaError: It does not fit the format; names the file and the fault.
    """
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        scenario = Scenario(
            row["id"], row["lang"], row.get("domain", ""), row.get("user") or "user",
            tuple(_session(session) for session in row["sessions"]),
            {fact["id"]: fact for fact in row["facts"]}, tuple(row["questions"]))
        for question in scenario.questions:
            unknown = set(question["facts"]) - set(scenario.facts)
            if unknown or not {"id", "question", "kind", "asked_at"} <= set(question):
                raise SchemaError(f"question {question.get('id')!r}: unknown facts "
                                  f"{sorted(unknown)} or a field is missing")
    except (OSError, ValueError, KeyError, TypeError, SchemaError) as error:
        raise SchemaError(f"{path}: no scenario: {error!r}") from error
    return scenario


def read_scenarios(directory: Path) -> list[Scenario]:
    """All `*.json` of a folder, in order of name.

    Raises:
        ConfigError: There is none.
        SchemaError: One does not fit.
    """
    paths = sorted(directory.glob("*.json")) if directory.is_dir() else []
    if not paths:
        raise ConfigError(f"no scenarios (*.json) in {directory}; give a folder of some")
    return [read_scenario(path) for path in paths]


def recall_questions(scenarios: Sequence[Scenario]) -> list[Question]:
    """The questions about facts as a recall set: the turns of the story, what the fact rests on."""
    found = []
    for scenario in scenarios:
        pool = tuple(Document(t.id, t.text, t.observed_at, t.speaker) for t in scenario.turns)
        for row in scenario.questions:
            evidence = [turn for fact in row["facts"]
                        for turn in scenario.facts[fact]["evidence"]]
            if evidence:
                found.append(Question(
                    f"{scenario.id}/{row['id']}", scenario.id, row["question"], row["kind"],
                    scenario.language, tuple(dict.fromkeys(evidence)), pool, row["asked_at"]))
    return found
