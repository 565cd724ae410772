"""The memories of one scope as they are searched: a matrix of vectors and an exact BM25.

Kept per scope, brought up to date by the version row of the scope before each use, since other
processes write too: changed rows are read, and only vanished ones force a fresh start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from memory_runtime.lexical import Bm25, top_cosine
from memory_runtime.store import Key, Store, StoredMemory, Version

Allowed = NDArray[np.bool_]


class ScopeIndex:
    """See the module. Rows are in order of creation; a row's number never changes.

    Args:
        embedder: Identity of the embedder in use; vectors of another one count as missing.
    """

    def __init__(self, embedder: str) -> None:
        self.embedder = embedder
        self.version = Version(-1, -1)
        self._clear()

    def _clear(self) -> None:
        self.rows: list[StoredMemory] = []
        self.number: dict[str, int] = {}
        self.bm25 = Bm25(skip_stop_words=True)
        self._matrix: NDArray[np.float32] = np.zeros((0, 0), dtype=np.float32)
        self._has_vector: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def matrix(self) -> NDArray[np.float32]:
        """Unit rows, [N, D] float32; zero where a memory has no vector of this embedder."""
        return self._matrix[: len(self)]

    @property
    def has_vector(self) -> NDArray[np.bool_]:
        """Which rows take part in vector search, [N]."""
        return self._has_vector[: len(self)]

    def sync(self, store: Store, key: Key) -> None:
        """Bring the index up to date with the store."""
        version = store.version(key)
        if version == self.version:
            return
        if version.purges != self.version.purges:
            self._clear()
            changed = store.memories(key)
        else:
            changed = store.memories(key, since=self.version.version)
        for row in changed:
            self._apply(row)
        self.version = version

    def _apply(self, row: StoredMemory) -> None:
        at = self.number.get(row.memory.id)
        if at is None:
            at = len(self.rows)
            self.number[row.memory.id] = at
            self.rows.append(row)
            self.bm25.add(row.memory.candidate.text)
        else:
            if self.rows[at].memory.candidate.text != row.memory.candidate.text:
                self.bm25.replace(at, row.memory.candidate.text)
            self.rows[at] = row
        self._set_vector(at, row)

    def _set_vector(self, at: int, row: StoredMemory) -> None:
        usable = row.vector is not None and row.embedder == self.embedder
        width = len(row.vector) if usable and row.vector is not None else self._matrix.shape[1]
        if at >= len(self._matrix) or width != self._matrix.shape[1]:
            self._grow(max(at + 1, 2 * len(self._matrix), 64), width)
        self._has_vector[at] = usable
        self._matrix[at] = row.vector if usable else 0.0

    def _grow(self, rows: int, width: int) -> None:
        """Double the space, so that adding one memory does not copy all the others."""
        matrix = np.zeros((rows, width), dtype=np.float32)
        present = np.zeros(rows, dtype=np.bool_)
        if width == self._matrix.shape[1]:
            matrix[: len(self._matrix)] = self._matrix
            present[: len(self._has_vector)] = self._has_vector
        self._matrix, self._has_vector = matrix, present

    # --- search ---

    def allowed(self, test: Callable[[StoredMemory], bool]) -> Allowed:
        """Rows that pass a test, [N]; used inside the search, not after it."""
        return np.fromiter((test(row) for row in self.rows), dtype=np.bool_, count=len(self))

    def by_vector(
        self, query: NDArray[np.float32], k: int, allowed: Allowed
    ) -> list[tuple[int, float]]:
        """Rows nearest to a query vector, [D], with their cosines."""
        if not len(self) or self.matrix.shape[1] != len(query):
            return []
        return top_cosine(self.matrix, query, k, allowed & self.has_vector)

    def by_words(self, query: str, k: int, allowed: Allowed) -> list[tuple[int, float]]:
        """Rows that share words with a query, with their BM25 scores."""
        return self.bm25.search(query, k, allowed=set(np.flatnonzero(allowed).tolist()))


class IndexCache:
    """The indexes of the scopes used last.

    Args:
        store: Where they are read from.
        embedder: Identity of the embedder in use.
        size: How many scopes at most.
    """

    def __init__(self, store: Store, *, embedder: str, size: int = 64) -> None:
        self._store, self._embedder, self._size = store, embedder, size
        self._held: OrderedDict[Key, ScopeIndex] = OrderedDict()

    def get(self, key: Key) -> ScopeIndex:
        """The index of a scope, up to date."""
        index = self._held.pop(key, None)
        if index is None:
            index = ScopeIndex(self._embedder)
        index.sync(self._store, key)
        self._held[key] = index
        while len(self._held) > self._size:
            self._held.popitem(last=False)
        return index

    def drop(self, key: Key) -> None:
        """Forget what is held of a scope."""
        self._held.pop(key, None)
