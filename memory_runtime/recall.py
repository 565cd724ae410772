"""Query -> routes -> fusion -> reranker -> at most a few memories inside a token budget.

Routes are vectors, words (bigram BM25) and, where the question names a time, the time of the event.
Filters act inside each route. User text never reaches a query language: it is only embedded, split
into terms and read for dates.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date

import numpy as np
from numpy.typing import NDArray

from memory_runtime.config import RecallConfig
from memory_runtime.dates import find_dates
from memory_runtime.days import interval, local_day, seconds_of
from memory_runtime.index import Allowed, ScopeIndex
from memory_runtime.lexical import Bm25, content_terms, reciprocal_rank
from memory_runtime.models import Reranker
from memory_runtime.numerals import fold
from memory_runtime.schema import Memory, State, Turn
from memory_runtime.store import StoredMemory
from memory_runtime.windows import estimate_tokens

logger = logging.getLogger(__name__)

ROUTES = ("vector", "lexical", "time")
DEPTH = 100
"""Results that each route hands to the fusion."""

WEIGHTS = {"time": 0.1}
"""Weights of routes in the fusion; 1 for those that are not named.

A question may name a day in passing: beside words of weight 1 the time route lowered MRR on MemSim
at both weights that were tried, least at this one (training/LOG.md).
"""

_VAGUE = content_terms("do done doing did happen happened go went say said tell told "
                       "做了什么 做 干了 发生 事 事情 说了 去了 哪些 哪里 干 说 去")


@dataclass(frozen=True, slots=True)
class Filters:
    """What may be returned. None means no limit.

    Attributes:
        states: Allowed states.
        agent, session: Labels.
        after, before: ISO bounds of the time at which it was observed.
    """

    states: tuple[State, ...] = (State.ACTIVE, State.SHORT_TERM)
    agent: str | None = None
    session: str | None = None
    after: str | None = None
    before: str | None = None

    def rejects(self, row: StoredMemory) -> str | None:
        """Why a memory may not be returned, or None."""
        memory = row.memory
        if memory.state not in self.states:
            return f"its state is {memory.state.value}"
        if self.agent is not None and memory.agent != self.agent:
            return f"agent is {memory.agent!r}, not {self.agent!r}"
        if self.session is not None and memory.session != self.session:
            return f"session is {memory.session!r}, not {self.session!r}"
        if self.after is not None and seconds_of(memory.observed_at) < seconds_of(self.after):
            return f"observed at {memory.observed_at}, before {self.after}"
        if self.before is not None and seconds_of(memory.observed_at) > seconds_of(self.before):
            return f"observed at {memory.observed_at}, after {self.before}"
        return None


@dataclass(frozen=True, slots=True)
class Hit:
    """A recalled memory and every term of its score.

    Attributes:
        memory: The memory.
        score: What it was ranked by.
        relevance: Calibrated probability of the reranker; without one, the share of the question's
            words that the memory holds.
        fused: Reciprocal rank sum over the routes.
        ranks: Rank in each route that found it, from 1.
        cosine, bm25: Raw scores of the two routes; None where it was not found there.
    """

    memory: Memory
    score: float
    relevance: float
    fused: float
    ranks: dict[str, int] = field(default_factory=dict)
    cosine: float | None = None
    bm25: float | None = None

    @property
    def is_superseded(self) -> bool:
        return self.memory.state is State.SUPERSEDED


@dataclass(frozen=True, slots=True)
class TurnHit:
    """A verbatim turn that shares words with the query."""

    turn: Turn
    score: float


@dataclass(frozen=True, slots=True)
class Recalled:
    """What a search found.

    Attributes:
        hits: At most top_k memories inside the token budget, best first.
        considered: All that reached the reranker, best first.
        reranked: Whether `relevance` is a calibrated probability.
        degraded: The reranker failed; the order is that of the fusion.
        turns: Verbatim turns, where they were asked for.
    """

    hits: tuple[Hit, ...] = ()
    considered: tuple[Hit, ...] = ()
    reranked: bool = False
    degraded: bool = False
    turns: tuple[TurnHit, ...] = ()

    @property
    def memories(self) -> list[Memory]:
        return [hit.memory for hit in self.hits]


# --- time ---


def query_interval(query: str, asked_at: str | None) -> tuple[date, date] | None:
    """The days that a question speaks of, on the asker's own calendar."""
    for item in find_dates(fold(query), local_day(asked_at)):
        if "date" in item.value:
            return interval(str(item.value["date"]))
    return None


def _days_of(memory: Memory) -> tuple[date, date]:
    if memory.candidate.event_time:
        return interval(memory.candidate.event_time.partition("T")[0])
    day = local_day(memory.observed_at)
    assert day is not None
    return day, day


def is_only_about_time(query: str) -> bool:
    """`What did I do yesterday?`: nothing is left of the question but the time."""
    folded = fold(query)
    rest = list(folded)
    for item in find_dates(folded, None):
        rest[item.start : item.end] = " " * (item.end - item.start)
    return content_terms("".join(rest)) <= _VAGUE


def _by_time(
    index: ScopeIndex, days: tuple[date, date], allowed: Allowed
) -> list[tuple[int, float]]:
    """Rows whose event falls into the days asked for, latest first."""
    found = []
    for number in np.flatnonzero(allowed).tolist():
        first, last = _days_of(index.rows[number].memory)
        if first <= days[1] and days[0] <= last:
            found.append((number, 1.0))
    return sorted(found, key=lambda item: -item[0])


def _in_order_of(
    timed: list[tuple[int, float]], others: Sequence[list[tuple[int, float]]], config: RecallConfig
) -> list[tuple[int, float]]:
    """What happened on the days asked for, in the order in which the other routes found it.

    A day narrows, it does not rank: in the order of time alone the route put whatever else
    happened then beside the answer.
    """
    ranks = reciprocal_rank([[str(n) for n, _ in found] for found in others], k=config.rrf_k)
    return sorted(timed, key=lambda item: -ranks.get(str(item[0]), 0.0))[:DEPTH]


# --- fusion and reranking ---


@dataclass(frozen=True, slots=True)
class Query:
    """A question with what is needed to search for it."""

    text: str
    vector: NDArray[np.float32] | None = None
    asked_at: str | None = None
    routes: tuple[str, ...] = ROUTES
    filters: Filters = field(default_factory=Filters)


def _routes(
    query: Query, index: ScopeIndex, config: RecallConfig
) -> dict[str, list[tuple[int, float]]]:
    allowed = index.allowed(lambda row: query.filters.rejects(row) is None)
    days = query_interval(query.text, query.asked_at) if "time" in query.routes else None
    timed: list[tuple[int, float]] = []
    found: dict[str, list[tuple[int, float]]] = {}
    if days is not None:
        timed = _by_time(index, days, allowed)
        if timed and is_only_about_time(query.text):
            allowed = np.zeros(len(index), dtype=np.bool_)
            allowed[[number for number, _ in timed]] = True
    if "lexical" in query.routes:
        found["lexical"] = index.by_words(query.text, DEPTH, allowed)
    if "vector" in query.routes and query.vector is not None:
        found["vector"] = index.by_vector(query.vector, DEPTH, allowed)
    if days is not None:
        found["time"] = _in_order_of(timed, list(found.values()), config)
    return found


def pool_size(config: RecallConfig, top_k: int | None) -> int:
    """How many memories of the fused order are looked at more closely."""
    return max(config.pool, config.top_k if top_k is None else top_k)


def fuse(
    query: Query, index: ScopeIndex, config: RecallConfig, *, top_k: int | None = None
) -> list[Hit]:
    """Every memory that a route found, in fused order.

    Only the pool's hits carry their share of the question's words: reading the words of all of
    them took three fifths of a search.
    """
    routes = _routes(query, index, config)
    ids = {name: [index.rows[n].memory.id for n, _ in found] for name, found in routes.items()}
    fused = reciprocal_rank(list(ids.values()), k=config.rrf_k,
                            weights=[WEIGHTS.get(name, 1.0) for name in ids])
    raw = {name: {index.rows[n].memory.id: s for n, s in found}
           for name, found in routes.items()}
    hits = []
    for memory_id, total in fused.items():
        memory = index.rows[index.number[memory_id]].memory
        ranks = {name: listed.index(memory_id) + 1 for name, listed in ids.items()
                 if memory_id in listed}
        hits.append(Hit(
            memory=memory, score=total, relevance=0.0, fused=total, ranks=ranks,
            cosine=raw.get("vector", {}).get(memory_id),
            bm25=raw.get("lexical", {}).get(memory_id)))
    # Equal scores: the newer observation first.
    hits.sort(key=lambda hit: (-hit.fused, -seconds_of(hit.memory.observed_at)))
    size = pool_size(config, top_k)
    pool = [replace(hit, relevance=index.bm25.coverage(query.text, hit.memory.candidate.text))
            for hit in hits[:size]]
    return pool + hits[size:]


def blend(probability: float, fused: float, weight: float) -> float:
    """Score of a reranked memory; its weight is fitted in training on the same form.

    Args:
        probability: Calibrated relevance, in [0, 1].
        fused: Reciprocal rank sum, stretched to [0, 1] over the pool.
        weight: Share of the probability.
    """
    return weight * probability + (1 - weight) * fused


def _stretched(hits: Sequence[Hit]) -> list[float]:
    """The fused scores of the pool on [0, 1]."""
    values = [hit.fused for hit in hits]
    low, span = min(values), max(values) - min(values)
    return [(value - low) / span if span else 0.0 for value in values]


def _rerank(
    query: str, hits: Sequence[Hit], reranker: Reranker, config: RecallConfig
) -> list[Hit] | None:
    """The hits in blended order, or None where the reranker failed."""
    try:
        scores = reranker.score(query, [hit.memory.candidate.text for hit in hits])
        if len(scores) != len(hits):
            raise ValueError(f"{len(scores)} scores for {len(hits)} documents")
        probabilities = [min(1.0, max(0.0, float(score))) for score in scores]
    # A reranker may fail in any way; recall still answers.
    except Exception as error:
        logger.warning("reranker failed, recall is in fused order: %r", error)
        return None
    ranked = [
        replace(hit, relevance=p, score=blend(p, fused, config.blend_weight))
        for hit, p, fused in zip(hits, probabilities, _stretched(hits), strict=True)]
    return sorted(ranked, key=lambda hit: -hit.score)


def _within_budget(hits: Sequence[Hit], top_k: int, budget: int) -> tuple[Hit, ...]:
    """The best hits; one that does not fit is passed over, the first is always taken."""
    chosen: list[Hit] = []
    used = 0
    for hit in hits:
        tokens = estimate_tokens(hit.memory.candidate.text)
        if len(chosen) < top_k and (not chosen or used + tokens <= budget):
            chosen.append(hit)
            used += tokens
    return tuple(chosen)


def finish(
    query: Query, fused: Sequence[Hit], config: RecallConfig, *, reranker: Reranker | None = None,
    top_k: int | None = None,
) -> Recalled:
    """Rerank the head of the fused order and choose; needs the index no more.

    Args:
        query: The question.
        fused: What `fuse` gave.
        config: Depths and weights.
        reranker: Without one the fused order stands.
        top_k: How many at most; the configured number when None. The token budget grows with it.
    """
    top_k = config.top_k if top_k is None else top_k
    head = list(fused[: pool_size(config, top_k)])
    ranked = _rerank(query.text, head, reranker, config) if reranker and head else None
    budget = config.token_budget * max(1, -(-top_k // config.top_k))
    return Recalled(
        hits=_within_budget(ranked or head, top_k, budget), considered=tuple(ranked or head),
        reranked=ranked is not None, degraded=reranker is not None and bool(head) and not ranked)


def recall(
    query: Query, index: ScopeIndex, config: RecallConfig, *, reranker: Reranker | None = None,
    top_k: int | None = None,
) -> Recalled:
    """Search one scope: `fuse`, then `finish`."""
    fused = fuse(query, index, config, top_k=top_k)
    return finish(query, fused, config, reranker=reranker, top_k=top_k)


def search_turns(query: str, turns: Sequence[Turn], k: int) -> tuple[TurnHit, ...]:
    """Verbatim turns by words: the source of what was and was not made a memory."""
    bm25 = Bm25((turn.text for turn in turns), skip_stop_words=True)
    return tuple(TurnHit(turns[n], score) for n, score in bm25.search(query, k))


# --- why, and why not ---


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a memory was or was not returned for a query.

    Attributes:
        returned: Whether it is among the hits.
        reason: In words.
        rank: Place in the final order, from 1; None when no route found it.
        hit: Terms of its score; None when no route found it.
    """

    returned: bool
    reason: str
    rank: int | None = None
    hit: Hit | None = None


def explain(
    query: Query, memory_id: str, index: ScopeIndex, config: RecallConfig, *,
    reranker: Reranker | None = None,
) -> Explanation:
    """Run the search and say what became of one memory."""
    if memory_id not in index.number:
        return Explanation(False, "no such memory in this scope")
    reason = query.filters.rejects(index.rows[index.number[memory_id]])
    if reason is not None:
        return Explanation(False, reason)
    found = recall(query, index, config, reranker=reranker)
    for rank, hit in enumerate(found.considered, start=1):
        if hit.memory.id == memory_id:
            if memory_id in {other.memory.id for other in found.hits}:
                return Explanation(True, "returned", rank, hit)
            return Explanation(
                False, f"rank {rank} is beyond top_k {config.top_k} or the token budget "
                f"{config.token_budget}", rank, hit)
    for rank, hit in enumerate(fuse(query, index, config), start=1):
        if hit.memory.id == memory_id:
            return Explanation(
                False, f"rank {rank} of the fused order is beyond the pool {config.pool}",
                rank, hit)
    return Explanation(False, "shares no words with the query and is not among the nearest vectors")
