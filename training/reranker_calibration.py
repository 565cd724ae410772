"""Fits the reranker's probability map and its blend with the fused rank, and compares arms."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memory_runtime.lexical import Bm25, reciprocal_rank
from memory_runtime.models import Embedder
from training.calibrate import Floats, Map, apply_map, calibration_error, fit_logit_map, sigmoid
from training.reranker_rows import Group

CANDIDATES = 20
"""Documents that a recall hands to the reranker."""

FOLDS = 5
WEIGHTS = tuple(round(0.05 * n, 2) for n in range(21))


@dataclass(frozen=True)
class Ranked:
    """A query with its documents as every arm scores them.

    Attributes:
        relevant: 1 where the document answers, [N].
        bm25, dense, fused, logits: What each arm says, [N]; fused is in [0, 1].
    """

    group: Group
    relevant: Floats
    bm25: Floats
    dense: Floats
    fused: Floats
    logits: Floats

    @property
    def stratum(self) -> str:
        """Language of the query, apart from queries over documents of the other language."""
        crosses = self.group.source == "parallel" or self.group.source.endswith("_other")
        return "cross" if crosses else self.group.language


def choose_groups(groups: Sequence[Group], limit: int, *, seed: int) -> list[Group]:
    """At most `limit` groups, those of each language drawn alike."""
    by_language: dict[str, list[Group]] = {}
    for group in groups:
        by_language.setdefault(group.language, []).append(group)
    chosen: list[Group] = []
    for language, members in sorted(by_language.items()):
        count = min(len(members), limit // len(by_language))
        chosen += random.Random(f"{seed}/{language}").sample(members, count)
    return chosen


def documents_of(group: Group, *, seed: int) -> tuple[list[str], Floats]:
    """At most twenty documents in a shuffled order, and which of them answer."""
    positives = list(group.positives)[: CANDIDATES - 1]
    texts = positives + list(group.negatives)[: CANDIDATES - len(positives)]
    order = random.Random(f"{seed}/{group.id}").sample(range(len(texts)), len(texts))
    relevant = np.array([1.0 if n < len(positives) else 0.0 for n in order])
    return [texts[n] for n in order], relevant


def fuse(bm25: Floats, dense: Floats) -> Floats:
    """Reciprocal rank fusion of two arms, stretched to [0, 1] within these documents.

    A document that shares no word with the query has no lexical rank.
    """
    lexical = [str(n) for n in np.argsort(-bm25, kind="stable") if bm25[n] > 0]
    semantic = [str(n) for n in np.argsort(-dense, kind="stable")]
    score = reciprocal_rank([lexical, semantic])
    fused = np.array([score[str(n)] for n in range(len(dense))])
    span = fused.max() - fused.min()
    return (fused - fused.min()) / span if span else np.zeros_like(fused)


def rank_groups(
    groups: Sequence[Group], documents: Sequence[tuple[list[str], Floats]],
    logits: Sequence[Floats], embedder: Embedder,
) -> list[Ranked]:
    """Score every document of every group by all arms."""
    texts = sorted({text for found, _ in documents for text in found})
    place = {text: n for n, text in enumerate(texts)}
    vectors = embedder.embed(texts, kind="passage")
    queries = embedder.embed([group.query for group in groups], kind="query")
    ranked = []
    for n, (group, (found, relevant)) in enumerate(zip(groups, documents, strict=True)):
        scores = Bm25(found).scores(group.query)
        bm25 = np.array([scores.get(i, 0.0) for i in range(len(found))])
        dense = (vectors[[place[text] for text in found]] @ queries[n]).astype(np.float64)
        ranked.append(Ranked(group, relevant, bm25, dense, fuse(bm25, dense), logits[n]))
    return ranked


def reciprocal_of_first(scores: Floats, relevant: Floats) -> float:
    """1 / rank of the best answer; equal scores share the worse rank."""
    best = scores[relevant > 0].max()
    return 1.0 / (1 + int(((scores >= best) & (relevant == 0)).sum()))


def mean_reciprocal(
    ranked: Sequence[Ranked], scores: Sequence[Floats]
) -> dict[str, float]:
    """MRR by stratum and their mean (`all`), over the queries that have an answer."""
    by: dict[str, list[float]] = {}
    for item, score in zip(ranked, scores, strict=True):
        if item.relevant.any():
            by.setdefault(item.stratum, []).append(reciprocal_of_first(score, item.relevant))
    means = {name: float(np.mean(values)) for name, values in sorted(by.items())}
    return {**means, "all": float(np.mean(list(means.values()))) if means else 0.0}


def blended(item: Ranked, relevance: Map, weight: float) -> Floats:
    """weight · probability + (1 - weight) · fused rank."""
    return weight * apply_map(relevance, item.logits, logits=True) + (1 - weight) * item.fused


def fit_blend(ranked: Sequence[Ranked], relevance: Map) -> float:
    """Weight with the best MRR, the languages counting alike; ties lean on the reranker."""
    def quality(weight: float) -> tuple[float, float]:
        scores = [blended(item, relevance, weight) for item in ranked]
        return round(mean_reciprocal(ranked, scores)["all"], 6), weight
    return max(WEIGHTS, key=quality)


def _joined(ranked: Sequence[Ranked]) -> tuple[Floats, Floats]:
    return (np.concatenate([r.logits for r in ranked]),
            np.concatenate([r.relevant for r in ranked]))


def cross_fitted(ranked: Sequence[Ranked]) -> tuple[list[Floats], list[Floats]]:
    """Probabilities and blended scores of each query by a fit that has not seen it."""
    probabilities: list[NDArray[np.float64]] = [np.zeros(0)] * len(ranked)
    blends: list[NDArray[np.float64]] = [np.zeros(0)] * len(ranked)
    for fold in range(FOLDS):
        seen = [r for n, r in enumerate(ranked) if n % FOLDS != fold]
        relevance = fit_logit_map(*_joined(seen))
        weight = fit_blend(seen, relevance)
        for n in range(fold, len(ranked), FOLDS):
            probabilities[n] = apply_map(relevance, ranked[n].logits, logits=True)
            blends[n] = blended(ranked[n], relevance, weight)
    return probabilities, blends


def fit_reranker(ranked: Sequence[Ranked]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fit the map and the weight on all queries, and report them cross-fitted.

    Returns:
        calibration.json and the figures: MRR of every arm, calibration error before and after.
    """
    logits, relevant = _joined(ranked)
    relevance = fit_logit_map(logits, relevant)
    weight = fit_blend(ranked, relevance)
    probabilities, blends = cross_fitted(ranked)
    arms = {"bm25": [r.bm25 for r in ranked], "dense": [r.dense for r in ranked],
            "rrf": [r.fused for r in ranked], "ours": [r.logits for r in ranked],
            "blend": blends}
    figures = {
        "queries": len(ranked), "pairs": len(logits), "positives": int(relevant.sum()),
        "mrr": {name: mean_reciprocal(ranked, scores) for name, scores in arms.items()},
        "ece_before": calibration_error(sigmoid(logits), relevant),
        "ece_after": calibration_error(np.concatenate(probabilities), relevant),
    }
    return {"relevance": relevance, "blend": {"weight": weight}}, figures
