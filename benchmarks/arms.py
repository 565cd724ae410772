"""The rankings that recall is compared over, from plain BM25 to an untuned cross-encoder.

An arm builds its index of a pool untimed and then ranks one question at a time. Vectors are made
once per text and shared by all arms; what embedding a query alone costs is measured apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.plain_bm25 import PlainBm25
from benchmarks.pools import Document, Question
from benchmarks.result import progress_bar
from memory_runtime.models import Embedder
from serving.artifact import Artifact
from serving.engine.loading import pick_device, pick_dtype
from serving.engine.scorer import PairScorer

DEPTH = 20
"""Results that are looked at, and candidates that a cross-encoder may put into order."""

RRF_K = 60
NUM_TIMED = 25
EMBED_BATCH = 256

Kind = Literal["query", "passage"]


class Arm(Protocol):
    """One way to rank a pool."""

    def prepare(self, pool: tuple[Document, ...]) -> None:
        """Index a pool; the next rankings are over it. Not timed."""

    def rank(self, question: Question) -> list[str]:
        """Ids of the pool, best first, at least `DEPTH` where there are as many."""


class CachedEmbedder:
    """An embedder that makes every vector once, in batches of texts of like length.

    Attributes:
        query_ms: Median time of one query alone, measured on a sample; a search that finds its
            query here is charged this much.
    """

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._vectors: dict[tuple[str, str], NDArray[np.float32]] = {}
        # The product embeds from worker threads; the model takes one call at a time.
        self._lock = threading.Lock()
        self.query_ms = 0.0

    def warm(self, texts: Iterable[str], *, kind: Kind, label: str) -> None:
        """Embed texts not seen before, with a progress bar."""
        new = sorted({text for text in texts if (kind, text) not in self._vectors}, key=len)
        with progress_bar() as bar:
            task = bar.add_task(f"embedding {label}", total=len(new))
            for start in range(0, len(new), EMBED_BATCH):
                batch = new[start : start + EMBED_BATCH]
                self._keep(batch, kind)
                bar.advance(task, len(batch))

    def time_queries(self, queries: Sequence[str]) -> None:
        """Measure `query_ms` on up to 25 queries, one at a time."""
        step = max(1, len(queries) // NUM_TIMED)
        times = []
        for query in queries[::step][:NUM_TIMED]:
            start = time.perf_counter()
            self._embedder.embed([query], kind="query")
            times.append(1000 * (time.perf_counter() - start))
        self.query_ms = float(np.median(times)) if times else 0.0

    def _keep(self, texts: Sequence[str], kind: Kind) -> None:
        vectors = self._embedder.embed(texts, kind=kind)
        self._vectors.update(((kind, text), v) for text, v in zip(texts, vectors, strict=True))

    def embed(self, texts: Sequence[str], *, kind: Kind) -> NDArray[np.float32]:
        """Unit vectors, [N, D] float32, in order."""
        with self._lock:
            new = list(dict.fromkeys(t for t in texts if (kind, t) not in self._vectors))
            if not texts:
                return self._embedder.embed(texts, kind=kind)
            if new:
                self._keep(new, kind)
            return np.stack([self._vectors[kind, text] for text in texts])


class Bm25Arm:
    """Plain BM25."""

    def prepare(self, pool: tuple[Document, ...]) -> None:
        self._ids = [document.id for document in pool]
        self._index = PlainBm25([document.text for document in pool])

    def rank(self, question: Question) -> list[str]:
        return [self._ids[n] for n in self._index.ranking(question.text)]


class DenseArm:
    """Cosine under the untuned e5."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    def prepare(self, pool: tuple[Document, ...]) -> None:
        self._ids = [document.id for document in pool]
        self._matrix = self._embedder.embed([d.text for d in pool], kind="passage")

    def rank(self, question: Question) -> list[str]:
        query = self._embedder.embed([question.text], kind="query")[0]
        order = np.argsort(-(self._matrix @ query), kind="stable")
        return [self._ids[n] for n in order]


def fuse(rankings: Sequence[Sequence[str]]) -> list[str]:
    """Reciprocal rank fusion with k = 60; ties in order of first appearance."""
    scores: dict[str, float] = {}
    for ranking in rankings:
        for place, name in enumerate(ranking, start=1):
            scores[name] = scores.get(name, 0.0) + 1 / (RRF_K + place)
    return sorted(scores, key=lambda name: -scores[name])


class RrfArm:
    """Fusion of BM25 and dense."""

    def __init__(self, embedder: Embedder) -> None:
        self._arms = (Bm25Arm(), DenseArm(embedder))

    def prepare(self, pool: tuple[Document, ...]) -> None:
        for arm in self._arms:
            arm.prepare(pool)

    def rank(self, question: Question) -> list[str]:
        return fuse([arm.rank(question) for arm in self._arms])


class RerankedArm:
    """The first twenty of the fusion, put into order by a cross-encoder."""

    def __init__(self, embedder: Embedder, scorer: PairScorer) -> None:
        self._first = RrfArm(embedder)
        self._scorer = scorer

    def prepare(self, pool: tuple[Document, ...]) -> None:
        self._first.prepare(pool)
        self._texts = {document.id: document.text for document in pool}

    def rank(self, question: Question) -> list[str]:
        ranking = self._first.rank(question)
        head = ranking[:DEPTH]
        logits = self._scorer.logits([(question.text, self._texts[name]) for name in head])
        order = np.argsort(-logits, kind="stable")
        return [head[n] for n in order] + ranking[DEPTH:]


def untuned_scorer(base: Path, *, seed: int = 0) -> PairScorer:
    """The base as a cross-encoder before any training of ours.

    A base without a ranking head (e5) gets one from the seed: its order of the twenty is then
    arbitrary, which is what "untuned" means for such a base.
    """
    where = pick_device("auto")
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, dtype=pick_dtype("auto", where), attn_implementation="sdpa",
        local_files_only=True)
    artifact = Artifact(base, "reranker", {"files": {}}, {"relevance": {"kind": "identity"}}, {})
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    return PairScorer(model.to(where).eval().requires_grad_(False), tokenizer, artifact)
