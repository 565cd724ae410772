"""The words of the project as types: turn, scope, window, candidate, memory.

Everything that crosses a boundary (wire, HTTP, store, training rows) is one of these. This module
holds no logic beyond validation and the JSON forms.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from memory_runtime.errors import SchemaError

SCHEMA_VERSION = 1

SCORE_NAMES = ("reuse", "goal", "emphasis", "emotion", "commitment")
"""Scores that the encoder emits after `keep`, in wire order."""

MAX_TEXT_CHARS = 600
"""Longest text of one candidate; the grammar and the parser share the bound."""

MAX_LABEL_CHARS = 80
"""Longest subject or attribute."""

Polarity = Literal["affirmed", "negated"]
Role = Literal["user", "assistant", "tool"]
ROLES = ("user", "assistant", "tool")
POLARITIES = ("affirmed", "negated")


class Layer(StrEnum):
    """How freely a memory may be retold: never (core), condensed (episodic), retold (semantic)."""

    CORE = "core"
    EPISODIC = "episodic"
    SEMANTIC = "semantic"


class Kind(StrEnum):
    """What sort of thing a memory is."""

    FACT = "fact"
    PREFERENCE = "preference"
    CONSTRAINT = "constraint"
    DECISION = "decision"
    EVENT = "event"
    PLAN = "plan"
    RELATIONSHIP = "relationship"
    PROCEDURE = "procedure"
    INFERENCE = "inference"


def clean_text(text: str) -> tuple[str, int]:
    """Strip NUL and lone surrogates, which no store and no JSON reader takes.

    Returns:
        The clean text and the number of code points that were removed.
    """
    kept = "".join(c for c in text if c != "\x00" and not "\ud800" <= c <= "\udfff")
    return kept, len(text) - len(kept)


def parse_time(value: str | None, *, field_name: str = "observed_at") -> datetime | None:
    """Read an ISO time; a bare date is allowed and stays naive.

    Raises:
        SchemaError: The text is no ISO date or time.
    """
    if value is None:
        return None
    try:
        return datetime.fromisoformat(value)
    except ValueError as error:
        raise SchemaError(
            f"{field_name} is not an ISO 8601 time: got {value!r}; "
            "write it like 2026-03-14T19:20:00+08:00"
        ) from error


@dataclass(frozen=True, slots=True)
class Scope:
    """Who a memory belongs to. (tenant, user) is the key; agent and session are labels."""

    user: str
    tenant: str = "default"
    agent: str | None = None
    session: str | None = None

    def __post_init__(self) -> None:
        for name in ("tenant", "user"):
            value = object.__getattribute__(self, name)
            if not isinstance(value, str) or not value.strip() or "\x00" in value:
                raise SchemaError(
                    f"scope.{name} must be a non-empty string without NUL, got {value!r}; "
                    "every read and write names whose memory it is"
                )

    @property
    def key(self) -> tuple[str, str]:
        """The partition key."""
        return (self.tenant, self.user)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a dialogue. `observed_at` is ISO 8601 with an offset where it is known."""

    id: str
    speaker: str
    text: str
    role: Role = "user"
    observed_at: str | None = None
    session: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not isinstance(self.speaker, str):
            raise SchemaError(
                f"turn {self.id!r}: speaker and text must be strings, got "
                f"{type(self.speaker).__name__} and {type(self.text).__name__}"
            )
        if self.role not in ROLES:
            raise SchemaError(f"turn {self.id!r}: role {self.role!r} is not one of {list(ROLES)}")


@dataclass(frozen=True, slots=True)
class Window:
    """What the encoder sees at once.

    `context` holds turns of the window before, read-only: evidence never points at them.
    """

    id: str
    turns: tuple[Turn, ...]
    session_time: str | None = None
    goal: str | None = None
    known: tuple[str, ...] = ()
    context: tuple[Turn, ...] = ()

    def __post_init__(self) -> None:
        if not self.turns:
            raise SchemaError(f"window {self.id!r} has no turns; give at least one")
        ids = [turn.id for turn in self.turns]
        if len(set(ids)) != len(ids):
            raise SchemaError(f"window {self.id!r}: turn ids must differ, got {ids}")

    @property
    def turn_ids(self) -> list[str]:
        """Ids in order; evidence number n means `turn_ids[n - 1]`."""
        return [turn.id for turn in self.turns]


@dataclass(frozen=True, slots=True)
class Scores:
    """What the encoder thinks of a candidate, each in [0, 1]."""

    reuse: float = 0.0
    goal: float = 0.0
    emphasis: float = 0.0
    emotion: float = 0.0
    commitment: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0.0 <= value <= 1.0:
                raise SchemaError(f"score {name} must lie in [0, 1], got {value!r}")


@dataclass(frozen=True, slots=True)
class Slot:
    """A literal that must survive: found in the evidence by code, never by a model."""

    type: str
    raw: str
    value: dict[str, Any]
    turn: str
    span: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the encoder emits, not yet stored. Fields below the line are set by code only."""

    text: str
    evidence: tuple[str, ...]
    subject: str = "user"
    attribute: str = ""
    layer: Layer = Layer.EPISODIC
    kind: Kind = Kind.FACT
    polarity: Polarity = "affirmed"
    keep: float = 1.0
    scores: Scores = field(default_factory=Scores)
    # --- set by code only ---
    slots: tuple[Slot, ...] = ()
    event_time: str | None = None
    explicit: bool = False
    language: str = ""

    def to_json(self) -> dict[str, Any]:
        """The API form of formats.md."""
        return {
            "text": self.text,
            "subject": self.subject,
            "attribute": self.attribute,
            "layer": self.layer.value,
            "kind": self.kind.value,
            "polarity": self.polarity,
            "evidence": list(self.evidence),
            "keep": self.keep,
            "scores": asdict(self.scores),
            "slots": [{**asdict(slot), "span": list(slot.span)} for slot in self.slots],
            "event_time": self.event_time,
            "explicit": self.explicit,
            "language": self.language,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Candidate:
        """Read the API form back.

        Raises:
            SchemaError: A field is missing or out of range.
        """
        try:
            slots = tuple(
                Slot(s["type"], s["raw"], s["value"], s["turn"], (s["span"][0], s["span"][1]))
                for s in data.get("slots", ())
            )
            return cls(
                text=data["text"], evidence=tuple(data["evidence"]),
                subject=data.get("subject", "user"), attribute=data.get("attribute", ""),
                layer=Layer(data["layer"]), kind=Kind(data["kind"]),
                polarity=data.get("polarity", "affirmed"), keep=float(data.get("keep", 1.0)),
                scores=Scores(**data.get("scores", {})), slots=slots,
                event_time=data.get("event_time"), explicit=bool(data.get("explicit", False)),
                language=data.get("language", ""),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise SchemaError(f"not a candidate: {error!r} in {str(data)[:200]}") from error


class State(StrEnum):
    """The life of a memory."""

    ACTIVE = "active"
    SUPERSEDED = "superseded"
    WITHDRAWN = "withdrawn"
    SHORT_TERM = "short_term"
    COLD = "cold"
    FORGOTTEN = "forgotten"


@dataclass(frozen=True, slots=True)
class Memory:
    """A stored candidate with its state and history pointers."""

    id: str
    candidate: Candidate
    observed_at: str
    created_at: str
    importance: float = 0.0
    novelty: float = 1.0
    state: State = State.ACTIVE
    superseded_by: str | None = None
    valid_to: str | None = None
    agent: str | None = None
    session: str | None = None

    def with_state(self, state: State, **changes: Any) -> Memory:  # noqa: ANN401
        """A copy in another state."""
        return replace(self, state=state, **changes)


def detect_language(text: str) -> str:
    """`zh` when at least a fifth of the letters are CJK ideographs, else `en`."""
    letters = [c for c in text if c.isalpha()]
    cjk = sum(1 for c in letters if "\u4e00" <= c <= "\u9fff" or "\u3400" <= c <= "\u4dbf")
    return "zh" if letters and cjk / len(letters) >= 0.2 else "en"


def candidate_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of one candidate as the API returns it."""
    unit = {"type": "number", "minimum": 0, "maximum": 1}
    text = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT_CHARS}
    label = {"type": "string", "maxLength": MAX_LABEL_CHARS}
    slot = {
        "type": "object",
        "required": ["type", "raw", "value", "turn", "span"],
        "properties": {
            "type": {"type": "string"}, "raw": {"type": "string"}, "value": {"type": "object"},
            "turn": {"type": "string"},
            "span": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        },
    }
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["text", "subject", "attribute", "layer", "kind", "polarity", "evidence",
                     "keep", "scores"],
        "properties": {
            "text": text, "subject": label, "attribute": label,
            "layer": {"enum": [layer.value for layer in Layer]},
            "kind": {"enum": [kind.value for kind in Kind]},
            "polarity": {"enum": list(POLARITIES)},
            "evidence": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "keep": unit,
            "scores": {
                "type": "object", "additionalProperties": False, "required": list(SCORE_NAMES),
                "properties": {name: unit for name in SCORE_NAMES},
            },
            "slots": {"type": "array", "items": slot},
            "event_time": {"type": ["string", "null"]},
            "explicit": {"type": "boolean"},
            "language": {"type": "string"},
        },
    }
