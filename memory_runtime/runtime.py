"""Memory: the public face. add, flush, search, answer, get, history, forget, stats.

`add` returns when the turns are durable; encoding goes on behind the caller's back, in a thread of
this object (`ingest.background`) or at `flush`. A scope names whose memory it is; its agent and
session are labels that writes put on each row. A read spans all of them unless told otherwise.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from memory_runtime.admit import importance_of
from memory_runtime.config import MemoryConfig
from memory_runtime.errors import SchemaError, StoreError
from memory_runtime.index import IndexCache
from memory_runtime.ingest import Ingested, Ingestor
from memory_runtime.models import Embedder, Encoder, Generator, Reranker
from memory_runtime.recall import (
    ROUTES,
    Explanation,
    Filters,
    Query,
    Recalled,
    explain,
    finish,
    fuse,
    search_turns,
)
from memory_runtime.reconstruct import Answer, reconstruct
from memory_runtime.schema import (
    Candidate,
    Scope,
    State,
    Turn,
    clean_text,
    detect_language,
    parse_time,
)
from memory_runtime.schema import (
    Memory as Trace,
)
from memory_runtime.sqlite import SqliteStore
from memory_runtime.store import Forgotten, HistoryEvent, Key, Store, StoredMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Added:
    """What an add call stored.

    Attributes:
        turn_ids: Ids under which the new turns lie; evidence names them.
        duplicates: Turns that were there already.
        cleaned: Code points that no store takes and that were removed.
    """

    turn_ids: tuple[str, ...]
    duplicates: int = 0
    cleaned: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """The state of a scope.

    Attributes:
        turns: Verbatim turns.
        pending: Turns that wait for the encoder.
        failing: Pending turns on which a model has failed.
        last_error: The latest failure, empty when there is none.
        memories: Number of memories by state.
        stale_vectors: Memories without a vector of the embedder in use.
        counters: Sums over the life of the scope: dropped, ungrounded, tokens …
    """

    turns: int
    pending: int
    failing: int
    last_error: str
    memories: dict[str, int]
    stale_vectors: int
    counters: dict[str, int] = field(default_factory=dict)


def _checked(scope: object) -> Scope:
    if not isinstance(scope, Scope):
        raise SchemaError(f"scope must be a Scope, got {scope!r}; every call names whose memory "
                          "it is, for example Scope(user='u1')")
    return scope


def _dedupe_key(turn: Turn, key: str | None, position: int, now: str) -> str:
    """What makes two turns the same. Without id and time, `yes` may well be said twice."""
    said = [turn.speaker, turn.role, turn.text, turn.session or ""]
    if key is not None:
        parts = ["key", key, str(position)]
    elif turn.id or turn.observed_at:
        parts = ["turn", turn.id, turn.observed_at or "", *said]
    else:
        parts = ["now", now, str(position), *said]
    return hashlib.sha256("\x00".join(parts).encode()).hexdigest()


class Memory:
    """Selective memory of any number of users in one file.

    Args:
        path: SQLite file, made when missing; or a Store.
        encoder: Windows to candidates. Without one, turns wait in the journal.
        embedder: Texts to vectors. Without one, recall goes by words alone.
        reranker: Judges what the routes found. Without one, the fused order stands.
        generator: Retells memories for a question. Without one, answers are quotations.
        config: Settings.
        clock: The time, with an offset.

    Raises:
        StoreError: The file is not ours or is damaged.
    """

    def __init__(
        self, path: str | Path | Store, *, encoder: Encoder | None = None,
        embedder: Embedder | None = None, reranker: Reranker | None = None,
        generator: Generator | None = None, config: MemoryConfig | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.config = config or MemoryConfig()
        self._store: Store = SqliteStore(
            path, busy_timeout_ms=self.config.store.busy_timeout_ms,
        ) if isinstance(path, str | Path) else path
        self._embedder, self._reranker, self._generator = embedder, reranker, generator
        self._clock = clock
        self._indexes = IndexCache(self._store, embedder=self.config.store.embedder,
                                   size=self.config.store.cached_scopes)
        # Guards the indexes; models that take long run outside it.
        self._lock = threading.RLock()
        self._working = threading.Lock()
        self._ingestor = Ingestor(
            self._store, self._indexes, encoder=encoder, embedder=embedder, config=self.config,
            clock=clock, lock=self._lock) if encoder is not None else None
        self._wake = threading.Condition()
        self._mine: set[Key] = set(self._store.pending_scopes())
        self._closed = False
        self._worker: threading.Thread | None = None
        if self._ingestor is not None and self.config.ingest.background:
            self._worker = threading.Thread(target=self._work, name="memory", daemon=True)
            self._worker.start()

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- writing ---

    def add(
        self, turns: Sequence[Turn], *, scope: Scope, key: str | None = None
    ) -> Added:
        """Take in turns; they are durable when this returns.

        The same turns again (same session, id, speaker, text and time) change nothing, so a call
        may be repeated after a time-out; turns with neither id nor time need a `key` for that.

        Args:
            turns: In order. `observed_at` may be missing where the turn is being said now.
            scope: Whose turns; its session stands in for a turn without one.
            key: Idempotency key of the call, instead of the content of the turns.

        Raises:
            SchemaError: The scope is missing, or a time is no ISO time.
        """
        scope, now = _checked(scope), self._clock().isoformat()
        rows, cleaned = [], 0
        for position, turn in enumerate(turns):
            tidy, removed = self._tidy(turn, scope)
            cleaned += removed
            if tidy.text.strip():
                dedupe = _dedupe_key(tidy, key, position, now)
                rows.append((replace(tidy, observed_at=tidy.observed_at or now), dedupe))
        ids = self._store.add_turns(scope, rows, now=now)
        if cleaned:
            self._store.count(scope.key, cleaned=cleaned)
        if ids:
            self._notify(scope.key)
        return Added(tuple(ids), len(rows) - len(ids), cleaned)

    def _tidy(self, turn: Turn, scope: Scope) -> tuple[Turn, int]:
        text, removed = clean_text(turn.text)
        parse_time(turn.observed_at)
        return replace(turn, id=clean_text(str(turn.id))[0], text=text,
                       speaker=clean_text(turn.speaker)[0],
                       session=turn.session or scope.session), removed

    def _notify(self, key: Key) -> None:
        if self._worker is None:
            if self._ingestor is not None:
                with self._working:
                    self._ingestor.run(key)
            return
        with self._wake:
            self._mine.add(key)
            self._wake.notify()

    def flush(self, scope: Scope | None = None) -> Ingested:
        """Encode and store everything that waits, open windows included.

        Args:
            scope: One scope; None for all that this store holds.

        Returns:
            What was done; `pending` is above zero when a model failed or there is no encoder.
        """
        keys = [_checked(scope).key] if scope is not None else self._store.pending_scopes()
        total = Ingested()
        for key in keys:
            done = self._flush_one(key)
            total = Ingested(total.windows + done.windows, total.memories + done.memories,
                             total.pending + done.pending, total.errors + done.errors)
        return total

    def _flush_one(self, key: Key) -> Ingested:
        total = Ingested(pending=len(self._store.pending(key)))
        if self._ingestor is None:
            return total
        with self._working:
            for _ in range(self.config.ingest.attempts):
                done = self._ingestor.run(key, everything=True)
                total = Ingested(total.windows + done.windows, total.memories + done.memories,
                                 done.pending, total.errors + done.errors)
                if not done.pending:
                    break
        return total

    def insert(
        self, candidates: Sequence[Candidate], *, scope: Scope,
        observed_at: str | Sequence[str] | None = None,
    ) -> list[str]:
        """Store memories as they are, past encoder and admission: imports, tests, tools.

        Args:
            candidates: What to store, active at once.
            scope: Whose memories.
            observed_at: ISO time of all of them or of each; now when None.

        Returns:
            Their ids.
        """
        scope, now = _checked(scope), self._clock().isoformat()
        times = ([observed_at or now] * len(candidates) if observed_at is None
                 or isinstance(observed_at, str) else list(observed_at))
        vectors = self._embed([c.text for c in candidates])
        rows, events = [], []
        for n, (candidate, time) in enumerate(zip(candidates, times, strict=True)):
            parse_time(time)
            text = clean_text(candidate.text)[0]
            candidate = replace(candidate, text=text, language=detect_language(text))
            memory_id = f"m-{hashlib.sha256(f'{now}/{n}/{text}'.encode()).hexdigest()[:20]}"
            rows.append(StoredMemory(Trace(
                id=memory_id, candidate=candidate, observed_at=time, created_at=now,
                importance=importance_of(candidate, 1.0, self.config), agent=scope.agent,
                session=scope.session), vectors[n], self.config.store.embedder))
            events.append(HistoryEvent(memory_id, now, "inserted", {}))
        with self._lock:
            self._store.put(scope.key, rows, events)
        return [row.memory.id for row in rows]

    def _embed(self, texts: Sequence[str]) -> list[NDArray[np.float32] | None]:
        if self._embedder is None or not texts:
            return [None] * len(texts)
        vectors: list[NDArray[np.float32] | None] = []
        for start in range(0, len(texts), 64):
            vectors += list(self._embedder.embed(texts[start : start + 64], kind="passage"))
        return vectors

    # --- reading ---

    def _query(
        self, text: str, asked_at: str | None, routes: tuple[str, ...], filters: Filters
    ) -> Query:
        unknown = set(routes) - set(ROUTES)
        if unknown:
            raise SchemaError(f"unknown routes {sorted(unknown)}; allowed: {list(ROUTES)}")
        text = clean_text(text)[0]
        vector = None
        if self._embedder is not None and "vector" in routes and text.strip():
            vector = self._embedder.embed([text], kind="query")[0]
        asked_at = asked_at or self._clock().isoformat()
        parse_time(asked_at, field_name="asked_at")
        return Query(text, vector, asked_at, routes, filters)

    def search(
        self, query: str, scope: Scope, top_k: int | None = None, *, asked_at: str | None = None,
        agent: str | None = None, session: str | None = None, after: str | None = None,
        before: str | None = None, include_superseded: bool = False, include_turns: bool = False,
        routes: tuple[str, ...] = ROUTES,
    ) -> Recalled:
        """The memories of a scope that bear on a query, best first.

        Args:
            query: Any text.
            scope: Whose memories; its agent and session do not limit the search.
            top_k: How many at most; the configured number when None.
            asked_at: ISO time of asking, with the asker's offset; `yesterday` counts from it.
            agent: Only memories with this label.
            session: Only memories with this label.
            after: ISO time; only memories observed then or later.
            before: ISO time; only memories observed then or earlier.
            include_superseded: Also outdated values, flagged.
            include_turns: Also verbatim turns, so that what was not kept can be audited.
            routes: Which of vector, lexical and time to use.

        Raises:
            SchemaError: The scope is missing or a route is unknown.
        """
        scope = _checked(scope)
        states: tuple[State, ...] = (State.ACTIVE, State.SHORT_TERM)
        if include_superseded:
            states = (*states, State.SUPERSEDED)
        filters = Filters(states, agent, session, after, before)
        prepared = self._query(query, asked_at, routes, filters)
        with self._lock:
            fused = fuse(
                prepared, self._indexes.get(scope.key), self.config.recall, top_k=top_k)
        found = finish(prepared, fused, self.config.recall, reranker=self._reranker, top_k=top_k)
        if include_turns:
            count = self.config.recall.top_k if top_k is None else top_k
            found = replace(found, turns=search_turns(
                prepared.text, self._store.turns(scope.key), count))
        return found

    def answer(self, question: str, scope: Scope, *, asked_at: str | None = None) -> Answer:
        """Answer a question from memory, checked, or say that nothing is recorded."""
        found = self.search(question, scope, asked_at=asked_at)
        return reconstruct(question, found, self.config.answer, generator=self._generator)

    def explain(
        self, query: str, memory_id: str, scope: Scope, *, asked_at: str | None = None
    ) -> Explanation:
        """Every term of a memory's score for a query, or the reason why it was not returned."""
        prepared = self._query(query, asked_at, ROUTES, Filters())
        with self._lock:
            return explain(prepared, memory_id, self._indexes.get(_checked(scope).key),
                           self.config.recall, reranker=self._reranker)

    def get(self, memory_id: str, scope: Scope) -> Trace | None:
        """One memory of a scope, in any state, or None."""
        rows = self._store.memories(_checked(scope).key, ids=[memory_id])
        return rows[0].memory if rows else None

    def get_all(
        self, scope: Scope, *, states: Sequence[State] = (State.ACTIVE,)
    ) -> list[Trace]:
        """The memories of a scope in order of creation."""
        return [row.memory for row in self._store.memories(_checked(scope).key, states=states)]

    def history(self, memory_id: str, scope: Scope) -> list[HistoryEvent]:
        """What happened to a memory, oldest first."""
        return self._store.history(_checked(scope).key, memory_id)

    def turns(self, scope: Scope, ids: Sequence[str] | None = None) -> list[Turn]:
        """Verbatim turns: the evidence that memories name."""
        return self._store.turns(_checked(scope).key, ids)

    def stats(self, scope: Scope) -> Stats:
        """What a scope holds and what waits."""
        key = _checked(scope).key
        pending = self._store.pending(key)
        rows = self._store.memories(key)
        states: dict[str, int] = {}
        for row in rows:
            states[row.memory.state.value] = states.get(row.memory.state.value, 0) + 1
        stale = sum(row.vector is None or row.embedder != self.config.store.embedder
                    for row in rows)
        errors = [entry.error for entry in pending if entry.error]
        return Stats(len(self._store.turns(key)), len(pending), len(errors),
                     errors[-1] if errors else "", states, stale, self._store.counters(key))

    # --- forgetting ---

    def forget(
        self, scope: Scope, *, memory_id: str | None = None,
        turn_ids: Sequence[str] | None = None, session: str | None = None,
        everything: bool = False,
    ) -> Forgotten:
        """Remove for good: rows, vectors, words, journal, history, and the bytes in the file.

        A memory goes with the text of the turns it rests on and with the older values that it
        replaced. Turns go with every memory that rests on them alone; a memory with other
        evidence stays without theirs.

        Args:
            scope: Whose data. Exactly one of the following says what:
            memory_id: A memory.
            turn_ids: Turns.
            session: All turns of a session.
            everything: The whole scope.

        Raises:
            SchemaError: None or several of them are given.
        """
        key = _checked(scope).key
        given = [memory_id is not None, turn_ids is not None, session is not None, everything]
        if sum(given) != 1:
            raise SchemaError("name exactly one of memory_id, turn_ids, session and "
                              f"everything=True, got {sum(given)}")
        with self._lock:
            if everything:
                done = self._store.purge(key, everything=True)
            elif memory_id is not None:
                done = self._forget_memory(key, memory_id)
            else:
                done = self._forget_turns(key, [
                    turn.id for turn in self._store.turns(key)
                    if (turn.session == session if session is not None
                        else turn.id in set(turn_ids or ()))])
            self._indexes.drop(key)
        return done

    def _forget_memory(self, key: Key, memory_id: str) -> Forgotten:
        rows = {row.memory.id: row.memory for row in self._store.memories(key)}
        if memory_id not in rows:
            return Forgotten()
        doomed = {memory_id}
        while found := {m.id for m in rows.values() if m.superseded_by in doomed} - doomed:
            doomed |= found
        sources = {turn_id for name in doomed for turn_id in rows[name].candidate.evidence}
        return self._purge(key, sorted(doomed), sorted(sources))

    def _forget_turns(self, key: Key, turn_ids: Sequence[str]) -> Forgotten:
        gone = set(turn_ids)
        doomed = [row.memory.id for row in self._store.memories(key)
                  if row.memory.candidate.evidence and set(row.memory.candidate.evidence) <= gone]
        return self._purge(key, doomed, list(turn_ids))

    def _purge(self, key: Key, memory_ids: list[str], turn_ids: list[str]) -> Forgotten:
        """Purge, and take purged turns out of the memories that stay."""
        gone = set(turn_ids)
        with self._store.transaction():
            stay = [row for row in self._store.memories(key)
                    if row.memory.id not in set(memory_ids)
                    and gone & set(row.memory.candidate.evidence)]
            for row in stay:
                held = row.memory.candidate
                kept = tuple(turn_id for turn_id in held.evidence if turn_id not in gone)
                candidate = replace(
                    held, evidence=kept or held.evidence,
                    slots=tuple(slot for slot in held.slots if slot.turn not in gone))
                memory = replace(row.memory, candidate=candidate)
                self._store.put(key, [replace(row, memory=memory)], [])
        return self._store.purge(key, memory_ids=memory_ids, turn_ids=turn_ids)

    # --- the thread, and the end ---

    def _work(self) -> None:
        """Encode what is due of the scopes that this object has written to."""
        pause = min(1.0, max(0.05, self.config.ingest.idle_s / 4))
        while True:
            with self._wake:
                if not self._closed:
                    self._wake.wait(timeout=pause)
                if self._closed:
                    return
                keys = list(self._mine)
            for key in keys:
                if self._closed:
                    return
                self._work_on(key)

    def _work_on(self, key: Key) -> None:
        assert self._ingestor is not None
        try:
            with self._working:
                if self._closed:
                    return
                done = self._ingestor.run(key, respect_pause=True)
        except StoreError as error:
            logger.warning("background work on a scope failed, it is tried again: %s", error)
            return
        with self._wake:
            if not done.pending and not self._store.pending(key):
                self._mine.discard(key)

    def close(self) -> None:
        """Stop the thread and release the file; what waits in the journal stays there."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._wake.notify_all()
        if self._worker is not None:
            self._worker.join()
        self._store.close()
