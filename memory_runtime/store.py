"""What the runtime asks of a store, and the words of its rows. No SQL of a dialect lives here.

A turn is durable, and stands in the journal, when `add_turns` returns. It leaves the journal in the
very transaction that stores what was made of it: a crash before that leaves it pending, a crash
after it leaves nothing to do, and neither loses nor doubles a memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from memory_runtime.schema import Memory, Scope, State, Turn

Key = tuple[str, str]
"""(tenant, user): first in every primary key, named by every statement."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A turn that waits for the encoder.

    Attributes:
        turn: The turn, its id unique inside the scope.
        seq: Order of arrival inside the scope.
        added_at: ISO time of the add call, UTC.
        attempts: How often the models have failed on it.
        error: The last failure, in words.
        next_try_at: ISO time before which the background thread leaves it alone; empty for none.
        agent: Label of the agent that handed it in.
    """

    turn: Turn
    seq: int
    added_at: str
    attempts: int = 0
    error: str = ""
    next_try_at: str = ""
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class StoredMemory:
    """A memory with its vector as it lies in the store.

    Attributes:
        memory: The memory.
        vector: Unit vector, [D] float32, or None when it was stored without an embedder.
        embedder: Identity of the embedder that made the vector.
        seq: Version of the scope at the last change of the row.
    """

    memory: Memory
    vector: NDArray[np.float32] | None
    embedder: str
    seq: int = 0


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """One thing that happened to a memory: added, merged, superseded, promoted …"""

    memory_id: str
    at: str
    event: str
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Version:
    """State of a scope: `version` rises with every change, `purges` when rows vanish."""

    version: int = 0
    purges: int = 0


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a purge removed."""

    memories: int = 0
    turns: int = 0
    journal: int = 0
    bytes_removed: bool = True


class Store(Protocol):
    """A partitioned store of turns, journal and memories."""

    def transaction(self) -> AbstractContextManager[None]:
        """A write transaction; rolled back when the block raises."""

    def add_turns(self, scope: Scope, turns: Sequence[tuple[Turn, str]], *, now: str) -> list[str]:
        """Store turns and enter them in the journal; a known dedupe key is skipped.

        Args:
            scope: Whose turns; the agent label goes on each row.
            turns: Pairs of turn and dedupe key, in order.
            now: ISO time.

        Returns:
            The ids under which the new ones were stored.
        """

    def pending(self, key: Key) -> list[JournalEntry]:
        """Journal of a scope, in order of arrival."""

    def pending_scopes(self) -> list[Key]:
        """Scopes with a journal; the one read that spans scopes, and only of their keys."""

    def settle(self, key: Key, turn_ids: Sequence[str]) -> bool:
        """Take turns out of the journal; False, and nothing done, when one is gone already."""

    def fail(self, key: Key, turn_ids: Sequence[str], *, error: str, next_try_at: str) -> None:
        """Note that the models failed on turns; they stay pending."""

    def turns(self, key: Key, ids: Sequence[str] | None = None) -> list[Turn]:
        """Verbatim turns of a scope in order of arrival, all or those named."""

    def turns_before(self, key: Key, turn_id: str, count: int) -> list[Turn]:
        """The turns of the same session just before a turn, in order."""

    def put(self, key: Key, rows: Sequence[StoredMemory], events: Sequence[HistoryEvent]) -> None:
        """Insert or replace memories with slots and evidence, and write history."""

    def memories(
        self, key: Key, *, ids: Sequence[str] | None = None,
        states: Sequence[State] | None = None, since: int = 0,
    ) -> list[StoredMemory]:
        """Memories of a scope in order of creation; `since` gives rows changed after a version."""

    def history(self, key: Key, memory_id: str | None = None) -> list[HistoryEvent]:
        """What happened, oldest first."""

    def version(self, key: Key) -> Version:
        """Version of a scope; other processes write too."""

    def count(self, key: Key, **amounts: int) -> None:
        """Add to named counters of a scope."""

    def counters(self, key: Key) -> dict[str, int]:
        """Counters of a scope."""

    def purge(
        self, key: Key, *, memory_ids: Sequence[str] = (), turn_ids: Sequence[str] = (),
        everything: bool = False,
    ) -> Forgotten:
        """Remove rows and their bytes, evidence and history of memories included."""

    def close(self) -> None:
        """Release the file."""


MIGRATIONS: list[list[str]] = [
    [
        """CREATE TABLE scopes (
            tenant TEXT NOT NULL, "user" TEXT NOT NULL, version INTEGER NOT NULL,
            purges INTEGER NOT NULL, PRIMARY KEY (tenant, "user"))""",
        """CREATE TABLE turns (
            tenant TEXT NOT NULL, "user" TEXT NOT NULL, id TEXT NOT NULL, seq INTEGER NOT NULL,
            session TEXT, speaker TEXT NOT NULL, role TEXT NOT NULL, text TEXT NOT NULL,
            observed_at TEXT, agent TEXT, dedupe TEXT NOT NULL, added_at TEXT NOT NULL,
            PRIMARY KEY (tenant, "user", id))""",
        """CREATE UNIQUE INDEX turns_dedupe ON turns (tenant, "user", dedupe)""",
        """CREATE INDEX turns_order ON turns (tenant, "user", seq)""",
        """CREATE TABLE journal (
            tenant TEXT NOT NULL, "user" TEXT NOT NULL, turn_id TEXT NOT NULL,
            attempts INTEGER NOT NULL, error TEXT NOT NULL, next_try_at TEXT NOT NULL,
            PRIMARY KEY (tenant, "user", turn_id),
            FOREIGN KEY (tenant, "user", turn_id) REFERENCES turns (tenant, "user", id)
                ON DELETE CASCADE)""",
        """CREATE TABLE memories (
            tenant TEXT NOT NULL, "user" TEXT NOT NULL, id TEXT NOT NULL, seq INTEGER NOT NULL,
            born INTEGER NOT NULL, state TEXT NOT NULL, text TEXT NOT NULL,
            candidate TEXT NOT NULL, observed_at TEXT NOT NULL, created_at TEXT NOT NULL,
            importance REAL NOT NULL, novelty REAL NOT NULL, superseded_by TEXT, valid_to TEXT,
            agent TEXT, session TEXT, vector BLOB, embedder TEXT NOT NULL,
            PRIMARY KEY (tenant, "user", id))""",
        """CREATE INDEX memories_seq ON memories (tenant, "user", seq)""",
        """CREATE TABLE slots (
            tenant TEXT NOT NULL, "user" TEXT NOT NULL, memory_id TEXT NOT NULL,
            n INTEGER NOT NULL, type TEXT NOT NULL, raw TEXT NOT NULL, value TEXT NOT NULL,
            turn_id TEXT NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
            PRIMARY KEY (tenant, "user", memory_id, n),
            FOREIGN KEY (tenant, "user", memory_id) REFERENCES memories (tenant, "user", id)
                ON DELETE CASCADE)""",
        """CREATE TABLE evidence (
            tenant TEXT NOT NULL, "user" TEXT NOT NULL, memory_id TEXT NOT NULL,
            turn_id TEXT NOT NULL, n INTEGER NOT NULL,
            PRIMARY KEY (tenant, "user", memory_id, turn_id),
            FOREIGN KEY (tenant, "user", memory_id) REFERENCES memories (tenant, "user", id)
                ON DELETE CASCADE)""",
        """CREATE INDEX evidence_turn ON evidence (tenant, "user", turn_id)""",
        """CREATE TABLE history (
            tenant TEXT NOT NULL, "user" TEXT NOT NULL, n INTEGER NOT NULL,
            memory_id TEXT NOT NULL, at TEXT NOT NULL, event TEXT NOT NULL, detail TEXT NOT NULL,
            PRIMARY KEY (tenant, "user", n))""",
        """CREATE INDEX history_memory ON history (tenant, "user", memory_id)""",
        """CREATE TABLE counters (
            tenant TEXT NOT NULL, "user" TEXT NOT NULL, name TEXT NOT NULL,
            value INTEGER NOT NULL, PRIMARY KEY (tenant, "user", name))""",
    ],
]
"""Statements of each schema version, oldest first; released ones are never edited."""
