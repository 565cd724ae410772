"""Journal -> windows -> encoder -> grounding -> admission, exactly once.

Models run outside any transaction; what they found is stored in the transaction that takes the
turns out of the journal. When another process was faster, the turns are gone from the journal and
the work is thrown away.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from memory_runtime.admit import Arrival, decide
from memory_runtime.config import MemoryConfig
from memory_runtime.days import seconds_of
from memory_runtime.ground import ground, has_directive
from memory_runtime.index import IndexCache
from memory_runtime.lexical import content_terms
from memory_runtime.models import Embedder, Encoder, Extraction
from memory_runtime.schema import MAX_TEXT_CHARS, Candidate, Kind, Layer, Turn, Window
from memory_runtime.store import JournalEntry, Key, Store
from memory_runtime.windows import WindowLimits, cut_windows

logger = logging.getLogger(__name__)

BATCH = 8
"""Windows handed to the encoder at once."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """What one run over the journal of a scope did.

    Attributes:
        windows: Windows that were encoded and stored.
        memories: Memories added, merged or superseded by them.
        pending: Turns that are still in the journal.
        errors: Failures of the models, in words.
    """

    windows: int = 0
    memories: int = 0
    pending: int = 0
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Work:
    window: Window
    agent: str | None
    session: str | None

    @property
    def ids(self) -> list[str]:
        return self.window.turn_ids


def _sessions(entries: Sequence[JournalEntry]) -> list[list[JournalEntry]]:
    groups: dict[tuple[str | None, str | None], list[JournalEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.turn.session, entry.agent), []).append(entry)
    return list(groups.values())


def due_windows(
    entries: Sequence[JournalEntry], *, now: datetime, idle_s: float, everything: bool,
    limits: WindowLimits,
) -> list[tuple[Window, str | None]]:
    """Windows that are closed, with the agent label of their turns.

    The last window of a session stays open until the session has been idle, unless `everything`
    is due: what follows may belong to it.
    """
    due: list[tuple[Window, str | None]] = []
    for group in _sessions(entries):
        windows = cut_windows([entry.turn for entry in group], limits=limits)
        idle = now.timestamp() - seconds_of(group[-1].added_at)
        if not everything and idle < idle_s:
            windows = windows[:-1]
        due += [(window, group[0].agent) for window in windows]
    return due


# --- directives that the encoder missed ---

_ONLY_DIRECTIVE = 3
"""A turn with fewer words of content than this says `remember` about something said elsewhere."""


def _uncovered(window: Window, kept: Sequence[Candidate]) -> list[Turn]:
    """User turns with a directive that no kept candidate cites."""
    cited = {turn_id for candidate in kept for turn_id in candidate.evidence}
    return [turn for turn in window.turns
            if turn.role == "user" and turn.id not in cited and has_directive(turn.text)
            and len(content_terms(turn.text)) >= _ONLY_DIRECTIVE]


def with_directives(window: Window, extraction: Extraction) -> list[Candidate]:
    """The kept candidates, and one for every directive that the encoder left out.

    A dropped candidate that cites the turn is taken back; where there is none, the turn itself is
    the memory, in the speaker's words: the accident to avoid is losing it.
    """
    kept = list(extraction.candidates)
    for turn in _uncovered(window, kept):
        dropped = [c for c in extraction.dropped if turn.id in c.evidence]
        kept += dropped or [Candidate(
            text=turn.text[:MAX_TEXT_CHARS], evidence=(turn.id,), layer=Layer.CORE,
            kind=Kind.FACT)]
    return kept


# --- one window ---


def _arrivals(
    work: _Work, candidates: Sequence[Candidate], embedder: Embedder | None, now: str
) -> tuple[list[Arrival], dict[str, int]]:
    """Ground and embed the candidates of a window."""
    grounded = [ground(candidate, work.window) for candidate in candidates]
    kept = [item.candidate for item in grounded if item.candidate is not None]
    counts = {"ungrounded": len(grounded) - len(kept),
              "repaired": sum(item.repaired for item in grounded)}
    vectors: list[NDArray[np.float32] | None] = [None] * len(kept)
    if embedder is not None and kept:
        vectors = list(embedder.embed([c.text for c in kept], kind="passage"))
    turns = {turn.id: turn for turn in work.window.turns}
    arrivals = []
    for candidate, vector in zip(kept, vectors, strict=True):
        said = [turns[turn_id] for turn_id in candidate.evidence if turn_id in turns]
        times = [turn.observed_at for turn in said if turn.observed_at]
        arrivals.append(Arrival(
            candidate, vector, observed_at=max(times, key=seconds_of) if times else now,
            source_text="\n".join(turn.text for turn in said),
            agent=work.agent, session=work.session))
    return arrivals, counts


class Ingestor:
    """Works through journals. One at a time per process; see `runtime.Memory`.

    Args:
        store: Where turns wait and memories go.
        indexes: Indexes of the scopes.
        encoder: Windows to candidates.
        embedder: Texts to vectors, or None to store without.
        config: Everything else.
        clock: The time, with an offset.
        lock: Guards the indexes; held while a window is stored, never while a model runs.
    """

    def __init__(
        self, store: Store, indexes: IndexCache, *, encoder: Encoder, embedder: Embedder | None,
        config: MemoryConfig, clock: Callable[[], datetime], lock: threading.RLock,
    ) -> None:
        self._store, self._indexes = store, indexes
        self._encoder, self._embedder = encoder, embedder
        self._config, self._clock, self._lock = config, clock, lock
        self._limits = WindowLimits()

    def run(self, key: Key, *, everything: bool = False, respect_pause: bool = False) -> Ingested:
        """Encode and store what is due in a scope.

        Args:
            key: The scope.
            everything: Also windows that are still open.
            respect_pause: Leave turns alone whose models failed a moment ago.
        """
        entries = self._store.pending(key)
        now = self._clock()
        if respect_pause:
            waiting = {e.turn.session for e in entries if seconds_of(e.next_try_at or None) >
                       now.timestamp()}
            entries = [e for e in entries if e.turn.session not in waiting]
        due = due_windows(entries, now=now, idle_s=self._config.ingest.idle_s,
                          everything=everything, limits=self._limits)
        work = [_Work(self._with_context(key, window), agent, window.turns[0].session)
                for window, agent in due]
        windows = memories = 0
        errors: list[str] = []
        for start in range(0, len(work), BATCH):
            done, stored, error = self._batch(key, work[start : start + BATCH])
            windows, memories = windows + done, memories + stored
            if error:
                errors.append(error)
        return Ingested(windows, memories, len(self._store.pending(key)), tuple(errors))

    def _with_context(self, key: Key, window: Window) -> Window:
        """The first window of a session goes on from turns that were encoded before."""
        if window.context:
            return window
        first = window.turns[0]
        earlier = self._store.turns_before(key, first.id, self._limits.overlap)
        gap = self._limits.gap_s
        near = [turn for turn in earlier if turn.observed_at is None or first.observed_at is None
                or seconds_of(first.observed_at) - seconds_of(turn.observed_at) <= gap]
        return replace(window, context=tuple(near))

    def _batch(self, key: Key, work: Sequence[_Work]) -> tuple[int, int, str]:
        """Encode some windows and store each in a transaction of its own."""
        try:
            extractions = self._encoder.extract([item.window for item in work])
            if len(extractions) != len(work):
                raise ValueError(f"{len(extractions)} extractions for {len(work)} windows")
            arrivals = [
                _arrivals(item, with_directives(item.window, found), self._embedder,
                          self._clock().isoformat())
                for item, found in zip(work, extractions, strict=True)]
        # A model may fail in any way; its turns stay in the journal.
        except Exception as error:
            self._note_failure(key, work, error)
            return 0, 0, repr(error)
        done = stored = 0
        for item, found, (arrived, counts) in zip(work, extractions, arrivals, strict=True):
            counts |= {"invalid": found.invalid, "truncated": int(found.truncated),
                       "below_floor": len(found.dropped),
                       "prompt_tokens": found.prompt_tokens,
                       "completion_tokens": found.completion_tokens}
            number = self._store_window(key, item, arrived, counts)
            done += number is not None
            stored += number or 0
        return done, stored, ""

    def _note_failure(self, key: Key, work: Sequence[_Work], error: Exception) -> None:
        ids = [turn_id for item in work for turn_id in item.ids]
        attempts = max((e.attempts for e in self._store.pending(key) if e.turn.id in set(ids)),
                       default=0)
        pause = min(600.0, self._config.ingest.retry_s * 2**min(attempts, 10))
        next_try = self._clock() + timedelta(seconds=pause)
        logger.warning("a model failed on %d turns, they stay pending: %r", len(ids), error)
        self._store.fail(key, ids, error=repr(error), next_try_at=next_try.isoformat())

    def _store_window(
        self, key: Key, work: _Work, arrivals: Sequence[Arrival], counts: dict[str, int]
    ) -> int | None:
        """Admit what a window gave; None when its turns were settled by someone else."""
        stored = 0
        try:
            with self._lock, self._store.transaction():
                if not self._store.settle(key, work.ids):
                    return None
                for arrival in arrivals:
                    decision = decide(arrival, self._indexes.get(key), self._config,
                                      now=self._clock().isoformat())
                    if decision.rows:
                        self._store.put(key, decision.rows, decision.events)
                    stored += decision.memory_id is not None
                    counts[decision.action] = counts.get(decision.action, 0) + 1
                self._store.count(key, windows=1, **counts)
        except BaseException:
            # The index may have seen rows of the transaction that was rolled back.
            with self._lock:
                self._indexes.drop(key)
            raise
        return stored
