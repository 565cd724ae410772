"""The product's own search as an arm of recall: its shipped defaults over a store of the pool."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.pools import Document, Question
from memory_runtime import Candidate, Memory, MemoryConfig, Scope
from memory_runtime.models import Embedder, Reranker
from memory_runtime.schema import detect_language

UNKNOWN_TIME = "2020-01-01T00:00:00+00:00"
"""Observed time of documents of sets without times."""

PASSED_OVER = ""
"""Stands where the search returned fewer than its `top_k`."""


class ProductArm:
    """`Memory.search`, called as an application calls it.

    What it returns comes first; what it considered and left out follows from the place after
    `top_k` on, so that recall@5 counts only what an application would have been given.

    Args:
        embedder: The base e5; vectors are made once.
        reranker: With its artifact's calibration in `config`, or None for the fused order.
        config: Shipped defaults, over them what the artifact ships.
    """

    def __init__(
        self, embedder: Embedder, reranker: Reranker | None, config: MemoryConfig | None = None
    ) -> None:
        self._embedder, self._reranker = embedder, reranker
        self._config = config or MemoryConfig()
        self._directory = tempfile.TemporaryDirectory()
        self._memory: Memory | None = None
        self._scope = Scope(user="pool")
        self._num_pools = 0

    def prepare(self, pool: tuple[Document, ...]) -> None:
        """Fill a fresh store with the pool, every document a memory as it stands."""
        self._close_memory()
        self._num_pools += 1
        path = Path(self._directory.name) / f"pool-{self._num_pools}.sqlite"
        self._memory = Memory(path, embedder=self._embedder, reranker=self._reranker,
                              config=self._config)
        candidates = [
            Candidate(d.text, (d.id,), subject=d.speaker or "user",
                      language=detect_language(d.text)) for d in pool]
        ids = self._memory.insert(candidates, scope=self._scope,
                                  observed_at=[d.time or UNKNOWN_TIME for d in pool])
        self._document = dict(zip(ids, (d.id for d in pool), strict=True))
        self._latest = max((d.time or UNKNOWN_TIME for d in pool), default=UNKNOWN_TIME)
        # The first search of a process builds the index of the scope; that is not the question's.
        self._memory.search("?", self._scope, asked_at=self._latest, routes=("lexical",))

    def rank(self, question: Question) -> list[str]:
        assert self._memory is not None
        found = self._memory.search(question.text, self._scope,
                                    asked_at=question.time or self._latest)
        given = [self._document[memory.id] for memory in found.memories]
        rest = [self._document[hit.memory.id] for hit in found.considered]
        filler = [PASSED_OVER] * max(0, self._config.recall.top_k - len(given))
        return given + filler + [name for name in rest if name not in set(given)]

    def _close_memory(self) -> None:
        if self._memory is None:
            return
        self._memory.close()
        for path in Path(self._directory.name).glob(f"pool-{self._num_pools}.sqlite*"):
            path.unlink()
        self._memory = None

    def close(self) -> None:
        """Remove the stores."""
        self._close_memory()
        self._directory.cleanup()
