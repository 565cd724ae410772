"""The models of the service behind their queues. Knows no HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memory_runtime.models import Extraction
from memory_runtime.schema import Candidate, Window
from memory_runtime.windows import estimate_tokens
from serving.artifact import apply_map
from serving.batcher import Batcher
from serving.config import ServingConfig
from serving.engine.embedder import TextEmbedder, load_embedder
from serving.engine.extractor import Extractor
from serving.engine.scorer import PairScorer
from serving.local import load_extractor, load_reranker

_log = logging.getLogger(__name__)

Kind = Literal["query", "passage"]


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Candidates to be scored; extraction and scoring share the encoder's queue."""

    window: Window
    candidates: tuple[Candidate, ...]


EncoderJob = Window | ScoreJob
EncoderResult = Extraction | list[Candidate]


class EnginePool:
    """Loads the models and runs each behind a queue of its own, one batch at a time."""

    def __init__(self, config: ServingConfig) -> None:
        self._config = config
        # One thread per model: a long extraction does not hold up a search, and no model is
        # entered twice. Endpoints are async and never compute.
        self._executor = ThreadPoolExecutor(max_workers=3, thread_name_prefix="engine")
        self.extractor: Extractor | None = None
        self.scorer: PairScorer | None = None
        self.embedder: TextEmbedder | None = None
        self._encode: Batcher[EncoderJob, EncoderResult] | None = None
        self._rank: Batcher[tuple[str, list[str]], NDArray[np.float32]] | None = None
        self._embed: Batcher[tuple[Kind, list[str]], NDArray[np.float32]] | None = None
        self.is_ready = False

    async def start(self) -> None:
        """Load the models and open the queues.

        Raises:
            ArtifactError: A base or an artifact is missing, damaged or does not fit.
        """
        await asyncio.get_running_loop().run_in_executor(self._executor, self._load)
        if self.extractor is not None:
            self._encode = self._batcher(self._run_encoder, self.extractor.limits.max_batch_tokens)
        if self.scorer is not None:
            self._rank = self._batcher(self._run_scorer, 4 * self.scorer.max_batch_tokens)
        if self.embedder is not None:
            self._embed = self._batcher(self._run_embedder, 4 * self.embedder.max_batch_tokens)
        self.is_ready = True
        _log.info("ready")

    async def stop(self) -> None:
        """Finish what runs, refuse what waits."""
        self.is_ready = False
        open_queues = [queue for queue in (self._encode, self._rank, self._embed) if queue]
        await asyncio.gather(*(queue.stop() for queue in open_queues))
        self._executor.shutdown(wait=True)

    def _load(self) -> None:
        config = self._config
        if config.encoder is not None:
            self.extractor = load_extractor(
                config.encoder, device=config.device, dtype=config.dtype)
        self.scorer = load_reranker(config)
        if config.embedder is not None:
            self.embedder = load_embedder(
                config.embedder.base, dtype=config.dtype, device=config.device,
                max_batch_tokens=config.embedder.max_batch_tokens)

    def _batcher(self, run, max_tokens: int) -> Batcher:  # noqa: ANN001
        queue = self._config.queue
        batcher: Batcher = Batcher(
            run, self._executor, max_tokens=max_tokens, max_waiting=queue.max_waiting,
            deadline_s=queue.deadline_s)
        batcher.start()
        return batcher

    # --- what the routes call ---

    async def extract(self, windows: list[Window]) -> list[Extraction]:
        """One extraction per window; they may share batches with other requests."""
        assert self._encode is not None and self.extractor is not None
        room = self.extractor.limits.max_new_tokens
        return list(await asyncio.gather(*(
            self._encode.submit(w, tokens=_window_tokens(w) + room) for w in windows)))

    async def score(self, window: Window, candidates: list[Candidate]) -> list[Candidate]:
        """Candidates with this encoder's scores."""
        assert self._encode is not None
        tokens = _window_tokens(window) + sum(estimate_tokens(c.text) + 30 for c in candidates)
        return await self._encode.submit(ScoreJob(window, tuple(candidates)), tokens=tokens)

    async def rank(self, query: str, documents: list[str], *, raw: bool) -> list[float]:
        """Relevance of each document, in order; logits when `raw`."""
        assert self._rank is not None and self.scorer is not None
        each = estimate_tokens(query)
        tokens = sum(each + estimate_tokens(document) for document in documents)
        logits = await self._rank.submit((query, documents), tokens=tokens)
        if raw:
            return [float(value) for value in logits]
        mapping = self.scorer.artifact.calibration["relevance"]
        return [float(value) for value in apply_map(mapping, logits, logits=True)]

    async def embed(self, texts: list[str], *, kind: Kind) -> NDArray[np.float32]:
        """Unit vectors, [N, D] float32."""
        assert self._embed is not None
        return await self._embed.submit((kind, texts), tokens=sum(map(estimate_tokens, texts)))

    # --- what the executor runs ---

    def _run_encoder(self, jobs: Sequence[EncoderJob]) -> list[EncoderResult]:
        assert self.extractor is not None
        windows = [job for job in jobs if isinstance(job, Window)]
        pairs = [(job.window, job.candidates) for job in jobs if isinstance(job, ScoreJob)]
        extractions = iter(self.extractor.extract(windows) if windows else [])
        scored = iter(self.extractor.score_many(pairs) if pairs else [])
        return [next(extractions) if isinstance(job, Window) else next(scored) for job in jobs]

    def _run_scorer(
        self, jobs: Sequence[tuple[str, list[str]]]
    ) -> list[NDArray[np.float32]]:
        assert self.scorer is not None
        pairs = [(query, document) for query, documents in jobs for document in documents]
        return _split(self.scorer.logits(pairs), [len(documents) for _, documents in jobs])

    def _run_embedder(
        self, jobs: Sequence[tuple[Kind, list[str]]]
    ) -> list[NDArray[np.float32]]:
        assert self.embedder is not None
        texts = [f"{kind}: {text}" for kind, items in jobs for text in items]
        return _split(self.embedder.embed_prefixed(texts), [len(items) for _, items in jobs])


def _window_tokens(window: Window) -> int:
    return sum(estimate_tokens(turn.text) + 6 for turn in (*window.context, *window.turns))


def _split(values: NDArray[np.float32], counts: list[int]) -> list[NDArray[np.float32]]:
    return np.split(values, np.cumsum(counts)[:-1])
