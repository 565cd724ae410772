"""The default store: one SQLite file in WAL mode, safe for several processes at once.

Vectors are float16 blobs; they and the words of a scope are searched in memory by `index.py`.
FTS5 is not used: its bm25() takes document frequencies over all scopes, which ranks one user's
memories by the words of the others; exact frequencies per scope are also the same on every backend.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from memory_runtime.errors import StoreError
from memory_runtime.schema import Candidate, Memory, Role, Scope, State, Turn
from memory_runtime.store import (
    MIGRATIONS,
    Forgotten,
    HistoryEvent,
    JournalEntry,
    Key,
    StoredMemory,
    Version,
)

_OWN = 'tenant = ? AND "user" = ?'
_TURN = "id, speaker, text, role, observed_at, session"
_MEMORY = ("id, seq, state, candidate, observed_at, created_at, importance, novelty, "
           "superseded_by, valid_to, agent, session, vector, embedder")


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _turn(row: Sequence[Any]) -> Turn:
    role: Role = row[3] if row[3] in get_args(Role) else "user"
    return Turn(row[0], row[1], row[2], role, row[4], row[5])


def _vector(blob: bytes | None) -> NDArray[np.float32] | None:
    return None if blob is None else np.frombuffer(blob, dtype="<f2").astype(np.float32)


def _memory(row: Sequence[Any]) -> StoredMemory:
    memory = Memory(
        id=row[0], state=State(row[2]), candidate=Candidate.from_json(json.loads(row[3])),
        observed_at=row[4], created_at=row[5], importance=row[6], novelty=row[7],
        superseded_by=row[8], valid_to=row[9], agent=row[10], session=row[11])
    return StoredMemory(memory, _vector(row[12]), row[13], row[1])


class SqliteStore:
    """See `store.Store`. One connection under one lock; other processes have their own.

    Args:
        path: File, made when missing; `:memory:` for a store that lives with the object.
        busy_timeout_ms: How long a write waits for another process.

    Raises:
        StoreError: The file is no database of ours, or of a newer version.
    """

    def __init__(self, path: str | Path, *, busy_timeout_ms: int = 15000) -> None:
        self.path = str(path)
        self._lock = threading.RLock()
        self._depth = 0
        try:
            self._db = sqlite3.connect(
                self.path, timeout=busy_timeout_ms / 1000, isolation_level=None,
                check_same_thread=False)
            self._prepare(busy_timeout_ms)
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"cannot open {self.path} as a memory store: {error}; "
                "give a path to a new file or to one that this library made") from error

    # --- opening ---

    def _prepare(self, busy_timeout_ms: int) -> None:
        self._db.execute(f"PRAGMA busy_timeout = {int(busy_timeout_ms)}")
        self._db.execute("PRAGMA foreign_keys = ON")
        # Freed pages are zeroed, so that what was forgotten cannot be read from the file.
        self._db.execute("PRAGMA secure_delete = ON")
        self._db.execute("PRAGMA synchronous = FULL")
        self._use_wal(time.monotonic() + busy_timeout_ms / 1000)
        with self.transaction():
            self._migrate()

    def _use_wal(self, deadline: float) -> None:
        """Switching to WAL ignores the busy timeout when several processes open a new file."""
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def _migrate(self) -> None:
        self._db.execute("CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT)")
        row = self._db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        version = int(row[0]) if row else 0
        if version > len(MIGRATIONS):
            raise StoreError(
                f"{self.path} has schema {version}, this library knows up to {len(MIGRATIONS)}; "
                "upgrade the library")
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                self._db.execute(statement)
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('schema', ?)",
                         (str(len(MIGRATIONS)),))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A write transaction; nested ones join the outer one."""
        with self._lock:
            if self._depth:
                yield
                return
            try:
                self._db.execute("BEGIN IMMEDIATE")
                self._depth = 1
                yield
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise StoreError(f"{self.path}: {error}") from error
            finally:
                self._depth = 0
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def _all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            with self._lock:
                return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"{self.path}: {error}") from error

    # --- turns and journal ---

    def _free_id(self, key: Key, turn: Turn, dedupe: str) -> str:
        """The turn's own id, or one made from its session when the scope has that id already."""
        base = turn.id or f"t-{dedupe[:12]}"
        for name in (base, f"{turn.session or '-'}:{base}", f"{base}:{dedupe[:12]}"):
            if not self._all(f"SELECT 1 FROM turns WHERE {_OWN} AND id = ?", (*key, name)):
                return name
        raise StoreError(f"turn id {base!r} cannot be made unique; give turns ids of their own")

    def add_turns(self, scope: Scope, turns: Sequence[tuple[Turn, str]], *, now: str) -> list[str]:
        key, added = scope.key, []
        with self.transaction():
            seq = self._all(f"SELECT COALESCE(MAX(seq), 0) FROM turns WHERE {_OWN}", key)[0][0]
            for turn, dedupe in turns:
                if self._all(f"SELECT 1 FROM turns WHERE {_OWN} AND dedupe = ?", (*key, dedupe)):
                    continue
                seq += 1
                name = self._free_id(key, turn, dedupe)
                self._db.execute(
                    f"INSERT INTO turns VALUES ({_marks([0] * 12)})",
                    (*key, name, seq, turn.session, turn.speaker, turn.role, turn.text,
                     turn.observed_at, scope.agent, dedupe, now))
                self._db.execute("INSERT INTO journal VALUES (?, ?, ?, 0, '', '')", (*key, name))
                added.append(name)
        return added

    def pending(self, key: Key) -> list[JournalEntry]:
        columns = ", ".join(f"t.{name}" for name in _TURN.split(", "))
        rows = self._all(
            f"SELECT {columns}, t.seq, t.added_at, j.attempts, j.error, j.next_try_at, t.agent "
            'FROM journal j JOIN turns t ON t.tenant = j.tenant AND t."user" = j."user" '
            'AND t.id = j.turn_id WHERE j.tenant = ? AND j."user" = ? ORDER BY t.seq', key)
        return [JournalEntry(_turn(row), *row[6:]) for row in rows]

    def pending_scopes(self) -> list[Key]:
        rows = self._all('SELECT DISTINCT tenant, "user" FROM journal')
        return [(row[0], row[1]) for row in rows]

    def settle(self, key: Key, turn_ids: Sequence[str]) -> bool:
        where = f"{_OWN} AND turn_id IN ({_marks(turn_ids)})"
        with self.transaction():
            found = self._all(f"SELECT COUNT(*) FROM journal WHERE {where}", (*key, *turn_ids))
            if found[0][0] != len(turn_ids):
                return False
            self._db.execute(f"DELETE FROM journal WHERE {where}", (*key, *turn_ids))
        return True

    def fail(self, key: Key, turn_ids: Sequence[str], *, error: str, next_try_at: str) -> None:
        with self.transaction():
            self._db.execute(
                "UPDATE journal SET attempts = attempts + 1, error = ?, next_try_at = ? "
                f"WHERE {_OWN} AND turn_id IN ({_marks(turn_ids)})",
                (error[:500], next_try_at, *key, *turn_ids))

    def turns(self, key: Key, ids: Sequence[str] | None = None) -> list[Turn]:
        where, values = _OWN, list(key)
        if ids is not None:
            where += f" AND id IN ({_marks(ids)})"
            values += ids
        return [_turn(r) for r in self._all(
            f"SELECT {_TURN} FROM turns WHERE {where} ORDER BY seq", values)]

    def turns_before(self, key: Key, turn_id: str, count: int) -> list[Turn]:
        rows = self._all(
            f"SELECT seq, session FROM turns WHERE {_OWN} AND id = ?", (*key, turn_id))
        if not rows:
            return []
        seq, session = rows[0]
        earlier = self._all(
            f"SELECT {_TURN} FROM turns WHERE {_OWN} AND seq < ? AND session IS ? "
            "AND text <> '' ORDER BY seq DESC LIMIT ?", (*key, seq, session, count))
        return [_turn(row) for row in reversed(earlier)]

    # --- memories ---

    def _bump(self, key: Key, *, purge: bool = False) -> int:
        self._db.execute("INSERT OR IGNORE INTO scopes VALUES (?, ?, 0, 0)", key)
        self._db.execute(
            f"UPDATE scopes SET version = version + 1, purges = purges + ? WHERE {_OWN}",
            (int(purge), *key))
        return self.version(key).version

    def put(self, key: Key, rows: Sequence[StoredMemory], events: Sequence[HistoryEvent]) -> None:
        with self.transaction():
            seq = self._bump(key)
            born = self._all(f"SELECT COALESCE(MAX(born), 0) FROM memories WHERE {_OWN}", key)
            for n, row in enumerate(rows, start=born[0][0] + 1):
                self._put_one(key, row, seq, n)
            first = self._all(f"SELECT COALESCE(MAX(n), 0) FROM history WHERE {_OWN}", key)[0][0]
            self._db.executemany(
                "INSERT INTO history VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(*key, n, event.memory_id, event.at, event.event,
                  json.dumps(event.detail, ensure_ascii=False))
                 for n, event in enumerate(events, start=first + 1)])

    def _put_one(self, key: Key, row: StoredMemory, seq: int, born: int) -> None:
        memory = row.memory
        blob = None if row.vector is None else row.vector.astype("<f2").tobytes()
        self._db.execute(
            f"INSERT INTO memories VALUES ({_marks([0] * 18)}) "
            'ON CONFLICT (tenant, "user", id) DO UPDATE SET seq = excluded.seq, '
            "state = excluded.state, text = excluded.text, candidate = excluded.candidate, "
            "observed_at = excluded.observed_at, importance = excluded.importance, "
            "novelty = excluded.novelty, superseded_by = excluded.superseded_by, "
            "valid_to = excluded.valid_to, vector = excluded.vector, embedder = excluded.embedder",
            (*key, memory.id, seq, born, memory.state.value, memory.candidate.text,
             json.dumps(memory.candidate.to_json(), ensure_ascii=False), memory.observed_at,
             memory.created_at, memory.importance, memory.novelty, memory.superseded_by,
             memory.valid_to, memory.agent, memory.session, blob, row.embedder))
        for table in ("slots", "evidence"):
            self._db.execute(f"DELETE FROM {table} WHERE {_OWN} AND memory_id = ?",
                             (*key, memory.id))
        self._db.executemany(
            f"INSERT INTO slots VALUES ({_marks([0] * 10)})",
            [(*key, memory.id, n, slot.type, slot.raw, json.dumps(slot.value), slot.turn,
              *slot.span) for n, slot in enumerate(memory.candidate.slots)])
        self._db.executemany(
            "INSERT OR IGNORE INTO evidence VALUES (?, ?, ?, ?, ?)",
            [(*key, memory.id, turn_id, n)
             for n, turn_id in enumerate(memory.candidate.evidence)])

    def memories(
        self, key: Key, *, ids: Sequence[str] | None = None,
        states: Sequence[State] | None = None, since: int = 0,
    ) -> list[StoredMemory]:
        where, values = f"{_OWN} AND seq > ?", [*key, since]
        if ids is not None:
            where += f" AND id IN ({_marks(ids)})"
            values += ids
        if states is not None:
            where += f" AND state IN ({_marks(states)})"
            values += [state.value for state in states]
        rows = self._all(f"SELECT {_MEMORY} FROM memories WHERE {where} ORDER BY born", values)
        return [_memory(row) for row in rows]

    def history(self, key: Key, memory_id: str | None = None) -> list[HistoryEvent]:
        where, values = _OWN, list(key)
        if memory_id is not None:
            where += " AND memory_id = ?"
            values.append(memory_id)
        rows = self._all(
            f"SELECT memory_id, at, event, detail FROM history WHERE {where} ORDER BY n", values)
        return [HistoryEvent(row[0], row[1], row[2], json.loads(row[3])) for row in rows]

    def version(self, key: Key) -> Version:
        rows = self._all(f"SELECT version, purges FROM scopes WHERE {_OWN}", key)
        return Version(*rows[0]) if rows else Version()

    def count(self, key: Key, **amounts: int) -> None:
        with self.transaction():
            self._db.executemany(
                "INSERT INTO counters VALUES (?, ?, ?, ?) "
                'ON CONFLICT (tenant, "user", name) DO UPDATE SET value = value + excluded.value',
                [(*key, name, value) for name, value in amounts.items() if value])

    def counters(self, key: Key) -> dict[str, int]:
        return dict(self._all(f"SELECT name, value FROM counters WHERE {_OWN}", key))

    # --- forgetting ---

    def purge(
        self, key: Key, *, memory_ids: Sequence[str] = (), turn_ids: Sequence[str] = (),
        everything: bool = False,
    ) -> Forgotten:
        with self.transaction():
            if everything:
                done = self._purge_scope(key)
            else:
                done = self._purge_rows(key, memory_ids, turn_ids)
            self._bump(key, purge=True)
        return replace(done, bytes_removed=self._scrub())

    def _purge_scope(self, key: Key) -> Forgotten:
        counts = [self._all(f"SELECT COUNT(*) FROM {table} WHERE {_OWN}", key)[0][0]
                  for table in ("memories", "turns", "journal")]
        for table in ("journal", "slots", "evidence", "history", "memories", "turns", "counters"):
            self._db.execute(f"DELETE FROM {table} WHERE {_OWN}", key)
        return Forgotten(memories=counts[0], turns=counts[1], journal=counts[2])

    def _purge_rows(
        self, key: Key, memory_ids: Sequence[str], turn_ids: Sequence[str]
    ) -> Forgotten:
        """Memories vanish; a turn keeps its place and its key, so that a retry cannot revive it."""
        counts = [0, 0, 0]
        for memory_id in memory_ids:
            cursor = self._db.execute(
                f"DELETE FROM memories WHERE {_OWN} AND id = ?", (*key, memory_id))
            counts[0] += cursor.rowcount
            self._db.execute(f"DELETE FROM history WHERE {_OWN} AND memory_id = ?",
                             (*key, memory_id))
        for turn_id in turn_ids:
            counts[1] += self._db.execute(
                f"UPDATE turns SET text = '' WHERE {_OWN} AND id = ?", (*key, turn_id)).rowcount
            counts[2] += self._db.execute(
                f"DELETE FROM journal WHERE {_OWN} AND turn_id = ?", (*key, turn_id)).rowcount
            self._db.execute(f"DELETE FROM slots WHERE {_OWN} AND turn_id = ?", (*key, turn_id))
        return Forgotten(memories=counts[0], turns=counts[1], journal=counts[2])

    def _scrub(self) -> bool:
        """Write the log back and cut it off; False when another reader holds it open."""
        with self._lock:
            busy = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        return not busy

    def check(self) -> str:
        """SQLite's own integrity check: `ok`, or what is wrong."""
        return str(self._all("PRAGMA integrity_check")[0][0])

    def close(self) -> None:
        with self._lock:
            self._db.close()
