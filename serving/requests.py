"""The bodies of requests, and what is refused of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from memory_runtime.schema import Candidate, Role, Turn, Window, parse_time
from memory_runtime.windows import WindowLimits, cut_windows, estimate_tokens
from serving.config import LimitSection


class ApiError(Exception):
    """A refusal in OpenAI's terms."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class _Body(BaseModel):
    # Clients of several APIs send fields that mean nothing here.
    model_config = ConfigDict(extra="ignore")
    model: str | None = None


class TurnBody(BaseModel):
    """One turn of a dialogue."""

    id: str | int
    speaker: str
    text: str
    role: Role = "user"
    observed_at: str | None = None
    session: str | None = None


class ExtractBody(_Body):
    """POST /v1/extract."""

    turns: list[TurnBody] = Field(min_length=1)
    session_time: str | None = None
    goal: str | None = None
    known: list[str] = []
    context: list[TurnBody] = []


class ScoreBody(ExtractBody):
    """POST /v1/score."""

    candidates: list[dict[str, Any]]


class RerankBody(_Body):
    """POST /v1/rerank and /v2/rerank; `texts` is what TEI calls the documents."""

    query: str
    documents: list[str | dict[str, Any]] | None = None
    texts: list[str] | None = None
    top_n: int | None = Field(default=None, ge=0)
    return_documents: bool | None = None
    raw_scores: bool = False


class EmbeddingsBody(_Body):
    """POST /v1/embeddings."""

    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    input_type: Literal["query", "passage", "search_query", "search_document"] = "passage"
    dimensions: int | None = None


def check_text(text: str, limits: LimitSection, param: str) -> str:
    """The text, when it is not too long.

    Raises:
        ApiError: 413.
    """
    if len(text) > limits.max_text_chars:
        raise ApiError(
            f"{param} has {len(text)} characters, allowed are {limits.max_text_chars}",
            status=413, param=param, code="too_large")
    return text


def check_count(count: int, most: int, param: str) -> None:
    """Refuse too many of something.

    Raises:
        ApiError: 413.
    """
    if count > most:
        raise ApiError(f"{param} holds {count} items, allowed are {most}; send several requests",
                       status=413, param=param, code="too_large")


def window_of(body: ExtractBody, limits: LimitSection) -> Window:
    """The dialogue of a request as one window, however long.

    Raises:
        ApiError: 413 for too much.
        SchemaError: A time or the turn ids are wrong.
    """
    check_count(len(body.turns) + len(body.context), limits.max_turns, "turns")
    check_count(len(body.known), limits.max_turns, "known")
    for n, turn in enumerate([*body.turns, *body.context]):
        check_text(turn.text, limits, f"turns.{n}.text")
        check_text(turn.speaker, limits, f"turns.{n}.speaker")
        parse_time(turn.observed_at)
    for text in [*body.known, body.goal or ""]:
        check_text(text, limits, "known")
    parse_time(body.session_time, field_name="session_time")
    return Window(
        "request", tuple(map(_turn, body.turns)), session_time=body.session_time, goal=body.goal,
        known=tuple(body.known), context=tuple(map(_turn, body.context)))


def _turn(body: TurnBody) -> Turn:
    return Turn(str(body.id), body.speaker, body.text, body.role, body.observed_at, body.session)


def cut(window: Window) -> list[Window]:
    """The window itself when the encoder can take it at once, else the windows it falls into."""
    limits = WindowLimits()
    tokens = sum(min(estimate_tokens(turn.text), limits.max_turn_tokens) for turn in window.turns)
    if len(window.turns) <= limits.max_turns and tokens <= limits.max_tokens:
        return [window]
    parts = cut_windows(window.turns, goal=window.goal, prefix="request-")
    return [replace(part, session_time=part.session_time or window.session_time,
                    known=window.known, context=part.context or window.context)
            for part in parts]


def candidates_of(body: ScoreBody, limits: LimitSection) -> list[Candidate]:
    """The candidates of a scoring request.

    Raises:
        ApiError: 413 for too many.
        SchemaError: One is no candidate.
    """
    check_count(len(body.candidates), limits.max_documents, "candidates")
    return [Candidate.from_json(item) for item in body.candidates]


def documents_of(body: RerankBody, limits: LimitSection) -> list[str]:
    """The documents of a ranking request as texts.

    Raises:
        ApiError: None given, one has no text, or too much of them.
    """
    items = body.documents if body.documents is not None else body.texts
    if items is None:
        raise ApiError("documents is missing; give a list of strings or of {\"text\": …}",
                       param="documents", code="missing")
    check_count(len(items), limits.max_documents, "documents")
    texts = []
    for n, item in enumerate(items):
        text = item if isinstance(item, str) else item.get("text")
        if not isinstance(text, str):
            raise ApiError(f"documents.{n} has no text, got {str(item)[:100]!r}; give a string or "
                           '{"text": …}', param=f"documents.{n}", code="missing")
        texts.append(check_text(text, limits, f"documents.{n}"))
    check_text(body.query, limits, "query")
    return texts


def inputs_of(body: EmbeddingsBody, limits: LimitSection) -> list[str]:
    """The texts of an embedding request.

    Raises:
        ApiError: Token ids, or too much.
    """
    items = [body.input] if isinstance(body.input, str) else body.input
    check_count(len(items), limits.max_inputs, "input")
    texts = []
    for n, item in enumerate(items):
        if not isinstance(item, str):
            raise ApiError("input holds token ids, which belong to another model's tokenizer; "
                           "send strings", param="input", code="unsupported")
        texts.append(check_text(item, limits, f"input.{n}"))
    return texts

