"""What the runtime asks of models. Anything with these methods will do: ours, yours, a stub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from memory_runtime.schema import Candidate, Window


@dataclass(frozen=True, slots=True)
class Extraction:
    """What an encoder made of one window.

    Attributes:
        candidates: Kept candidates, `keep` and scores calibrated where the encoder is.
        dropped: Candidates under the keep floor, for audits and benchmarks.
        prompt_tokens, completion_tokens: Cost of the window.
        invalid: Lines of the model that were no candidate.
        truncated: The model ran into the token limit.
        raw: The completion as written.
        empty_log_odds: How much likelier the model found it that there is nothing, before any bias.
    """

    candidates: list[Candidate]
    dropped: list[Candidate] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    invalid: int = 0
    truncated: bool = False
    raw: str = ""
    empty_log_odds: float | None = None


class Encoder(Protocol):
    """Windows to scored, layered candidates."""

    def extract(self, windows: Sequence[Window]) -> list[Extraction]:
        """One extraction per window, in order."""


class Reranker(Protocol):
    """How much a document helps with a query."""

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Calibrated probabilities in [0, 1], one per document, in order."""


class Embedder(Protocol):
    """Texts to vectors."""

    def embed(
        self, texts: Sequence[str], *, kind: Literal["query", "passage"]
    ) -> NDArray[np.float32]:
        """Unit vectors, [N, D] float32."""


class Generator(Protocol):
    """A chat model, for reconstruction."""

    def generate(self, messages: Sequence[dict[str, str]], *, max_tokens: int = 200) -> str:
        """The assistant's reply."""
