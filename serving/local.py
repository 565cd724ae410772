"""The CPU profile: encoder, reranker and embedder in the caller's own process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memory_runtime.corpus import read_examples
from memory_runtime.models import Extraction
from memory_runtime.schema import Candidate, Window
from serving.artifact import open_artifact
from serving.config import EncoderSection, ServingConfig, load_config
from serving.engine.embedder import TextEmbedder, load_embedder
from serving.engine.extractor import Extractor, Limits
from serving.engine.loading import load_causal_lm
from serving.engine.scorer import PairScorer, load_scorer


@dataclass(slots=True)
class LocalEncoder:
    """An Extractor that several threads may call; they take turns."""

    extractor: Extractor
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def extract(self, windows: Sequence[Window]) -> list[Extraction]:
        """One extraction per window, in order."""
        with self._lock:
            return self.extractor.extract(windows)

    def score_candidates(
        self, window: Window, candidates: Sequence[Candidate]
    ) -> list[Candidate]:
        """Candidates of any extractor with this encoder's `keep` and scores."""
        with self._lock:
            return self.extractor.score_candidates(window, candidates)

    def generate(
        self, messages: Sequence[dict[str, str]], *, max_tokens: int = 200,
        schema: dict[str, Any] | None = None,
    ) -> str:
        """The assistant's reply, as free text or under a JSON Schema."""
        with self._lock:
            return self.extractor.generate(messages, max_tokens=max_tokens, schema=schema)


@dataclass(slots=True)
class LocalReranker:
    """A PairScorer that several threads may call; they take turns."""

    scorer: PairScorer
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Calibrated probabilities, in order."""
        with self._lock:
            return self.scorer.score(query, documents)


@dataclass(slots=True)
class LocalEmbedder:
    """A TextEmbedder that several threads may call; they take turns."""

    embedder: TextEmbedder
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def embed(
        self, texts: Sequence[str], *, kind: Literal["query", "passage"]
    ) -> NDArray[np.float32]:
        """Unit vectors, [N, D] float32."""
        with self._lock:
            return self.embedder.embed(texts, kind=kind)


def load_extractor(section: EncoderSection, *, device: str, dtype: str) -> Extractor:
    """The encoder of a configuration.

    Raises:
        ArtifactError: The base or the artifact is missing, damaged or does not fit.
    """
    is_tuned = section.mode == "tuned" and section.artifact is not None
    artifact = open_artifact(section.artifact or "", base=section.base) if is_tuned else None
    lm = load_causal_lm(section.base, artifact=artifact, dtype=dtype, device=device)
    few_shot = read_examples(section.few_shot) if section.few_shot else []
    limits = Limits(
        max_new_tokens=section.max_new_tokens, max_rows=section.max_rows,
        max_batch_tokens=section.max_batch_tokens, max_prompt_tokens=section.max_prompt_tokens)
    mode: Any = section.mode
    return Extractor(lm, mode, artifact, few_shot, limits)


def load_reranker(config: ServingConfig) -> PairScorer | None:
    """The reranker of a configuration, None where it names none.

    Raises:
        ArtifactError: As `load_extractor`.
    """
    section = config.reranker
    if section is None:
        return None
    artifact = open_artifact(section.artifact, base=section.base)
    return load_scorer(section.base, artifact, dtype=config.dtype, device=config.device,
                       max_batch_tokens=section.max_batch_tokens)


def local_models(
    config: ServingConfig | str | Path,
) -> tuple[LocalEncoder | None, LocalReranker | None, LocalEmbedder | None]:
    """Load the models that a serving configuration names.

    Args:
        config: A configuration or the path of one.

    Returns:
        Encoder, reranker and embedder; None for a section that is null.

    Raises:
        ArtifactError: A base or an artifact is missing, damaged or does not fit.
        ConfigError: The configuration is wrong.
    """
    if not isinstance(config, ServingConfig):
        config = load_config(config)
    encoder = reranker = embedder = None
    if config.encoder is not None:
        encoder = LocalEncoder(
            load_extractor(config.encoder, device=config.device, dtype=config.dtype))
    scorer = load_reranker(config)
    if scorer is not None:
        reranker = LocalReranker(scorer)
    if config.embedder is not None:
        embedder = LocalEmbedder(load_embedder(
            config.embedder.base, dtype=config.dtype, device=config.device,
            max_batch_tokens=config.embedder.max_batch_tokens))
    return encoder, reranker, embedder
