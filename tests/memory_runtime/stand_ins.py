"""Deterministic stand-ins for the models: what cases/README.md prescribes where no model is wanted.

They are honest about being none: the encoder takes every user turn as it stands, and the embedder
hashes words and bigrams, so that only texts with common words are near.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import numpy as np

from memory_runtime.config import MemoryConfig, from_mapping
from memory_runtime.lexical import terms
from memory_runtime.models import Extraction
from memory_runtime.schema import Candidate, Layer, Scores, Turn, Window

SEVEN = 7 / 9
_OTHERS = re.compile(
    r"^(?:My |我)?(mother|father|flatmate|sister|brother|妈妈|爸爸|妈|爸|姐姐|哥哥)")


def subject_of(text: str) -> str:
    match = _OTHERS.match(text)
    return match[1] if match else "user"


class TurnEncoder:
    """One candidate per user turn, its text verbatim, every digit 7.

    Args:
        edit: Changes a turn's candidate before it is returned; None drops it.
        failures: How many calls raise first.
    """

    def __init__(
        self, edit: Callable[[Candidate, Turn], Candidate | None] | None = None, failures: int = 0
    ) -> None:
        self.edit, self.failures, self.windows = edit, failures, []

    def extract(self, windows: Sequence[Window]) -> list[Extraction]:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the encoder is down")
        self.windows += windows
        return [Extraction(self._candidates(window), prompt_tokens=10) for window in windows]

    def _candidates(self, window: Window) -> list[Candidate]:
        scores = Scores(SEVEN, SEVEN, SEVEN, SEVEN, SEVEN)
        found = []
        for turn in window.turns:
            if turn.role != "user":
                continue
            candidate = Candidate(turn.text, (turn.id,), subject=subject_of(turn.text),
                                  layer=Layer.CORE, keep=SEVEN, scores=scores)
            candidate = self.edit(candidate, turn) if self.edit else candidate
            if candidate is not None:
                found.append(candidate)
        return found


class HashEmbedder:
    """Unit vectors of hashed terms, [N, 512].

    Args:
        fail_on: Number of the call that raises, from 1.
    """

    def __init__(self, fail_on: int = 0) -> None:
        self.fail_on, self.calls = fail_on, 0

    def embed(self, texts: Sequence[str], *, kind: str) -> np.ndarray:
        self.calls += 1
        if self.calls == self.fail_on:
            raise RuntimeError("the embedder is down")
        rows = np.zeros((len(texts), 512), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            for term in terms(text):
                row[zlib.crc32(term.encode()) % 512] += 1
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


class WordReranker:
    """Share of the query's terms that a document holds, unless told to fail."""

    def __init__(self, failing: bool = False, fixed: dict[str, float] | None = None) -> None:
        self.failing, self.fixed = failing, fixed or {}

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        if self.failing:
            raise RuntimeError("the reranker is down")
        wanted = set(terms(query))
        return [self.fixed.get(d, len(wanted & set(terms(d))) / max(1, len(wanted)))
                for d in documents]


@dataclass
class Clock:
    """A clock that stands still until it is moved on."""

    now: datetime = field(default_factory=lambda: datetime(2026, 3, 1, 9, tzinfo=UTC))

    def __call__(self) -> datetime:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def settings(**sections: dict[str, object]) -> MemoryConfig:
    """Settings for stand-ins: no thread, and a cosine scale that starts at zero."""
    plain = {"ingest": {"background": False}, "admit": {"unrelated_cosine": 0.0}}
    return from_mapping({
        name: {**plain.get(name, {}), **sections.get(name, {})}
        for name in {*plain, *sections}})


def said(*texts: str, at: str = "2026-03-01T09:00:00+08:00", session: str = "s1",
         role: str = "user") -> list[Turn]:
    """Turns of one speaker, a minute apart."""
    start = datetime.fromisoformat(at)
    return [Turn(f"{session}-{start.timestamp():.0f}-{n}", role, text, role,
                 (start + timedelta(minutes=n)).isoformat(), session)
            for n, text in enumerate(texts)]
