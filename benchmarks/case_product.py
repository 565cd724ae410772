"""The product as the cases see it: neutral verbs over one store file, with stand-ins for models.

The only place that knows which call of `Memory` a verb means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.case_checks import Shown, Unsupported
from benchmarks.stand_ins import BigramEmbedder, VerbatimEncoder, verbatim_candidate
from memory_runtime import Memory, Scope, State, Turn
from memory_runtime.models import Embedder, Encoder
from memory_runtime.recall import ROUTES
from memory_runtime.schema import Memory as Trace
from memory_runtime.sqlite import SqliteStore

LONE_SURROGATE = "\ud83d"

Row = dict[str, Any]


def turns_of(rows: Sequence[Row]) -> list[Turn]:
    """Turns of a case; {LONE_SURROGATE} becomes half of an emoji."""
    return [
        Turn(row.get("id", ""), row.get("speaker") or row.get("role", "user"),
             row["text"].replace("{LONE_SURROGATE}", LONE_SURROGATE), row.get("role", "user"),
             row.get("at"))
        for row in rows
    ]


def shown(memories: Sequence[Trace]) -> list[Shown]:
    """Memories as the checks look at them."""
    return [Shown(m.candidate.text, m.candidate.subject, m.candidate.event_time)
            for m in memories]


@dataclass(slots=True)
class Product:
    """One store with the models that a case runs on.

    Attributes:
        path: The SQLite file.
        encoder: The verbatim stand-in, or a trained encoder.
        embedder: The bigram stand-in, or the base e5.
    """

    path: Path
    encoder: Encoder = field(default_factory=VerbatimEncoder)
    embedder: Embedder = field(default_factory=BigramEmbedder)
    _memory: Memory | None = field(default=None, init=False, repr=False)

    @property
    def memory(self) -> Memory:
        """The open store; opened at the first use."""
        if self._memory is None:
            self._memory = Memory(self.path, encoder=self.encoder, embedder=self.embedder)
        return self._memory

    def close(self) -> None:
        """Release the file."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def say(self, user: str, session: str | None, rows: Sequence[Row]) -> None:
        """Hand turns over; they are durable when this returns."""
        self.memory.add(turns_of(rows), scope=Scope(user=user, session=session))

    def settle(self, user: str | None = None) -> None:
        """Wait until nothing is left to do; retries what failed."""
        self.memory.flush(Scope(user=user) if user is not None else None)

    def list(self, user: str, *, include_superseded: bool = False) -> list[Shown]:
        """Active memories, with the history when asked for."""
        states = (State.ACTIVE, State.SUPERSEDED) if include_superseded else (State.ACTIVE,)
        return shown(self.memory.get_all(Scope(user=user), states=states))

    def recall(
        self, user: str | None, query: str, *, k: int | None = None, now: str | None = None,
        only: str | None = None, after: str | None = None,
    ) -> list[Shown]:
        """Ranked memories. A user that is not named is not named to the product either."""
        if only is not None and only not in ROUTES:
            raise Unsupported(f"recall only={only}: the product's routes are {list(ROUTES)}")
        # A missing user is what the case wants to see refused, so it goes through as it is.
        scope: Any = Scope(user=user) if user is not None else None
        found = self.memory.search(query, scope, k, asked_at=now, after=after,
                                   routes=(only,) if only is not None else ROUTES)
        return shown(found.memories)

    def recall_every_way(
        self, user: str, query: str, *, k: int | None = None, now: str | None = None
    ) -> list[Shown]:
        """What any route alone, all of them together, or the answer gives of a user's memories."""
        found: dict[str, Shown] = {}
        for only in (None, *ROUTES):
            for memory in self.recall(user, query, k=k, now=now, only=only):
                found.setdefault(memory.text, memory)
        for memory in shown(self.memory.answer(query, Scope(user=user), asked_at=now).memories):
            found.setdefault(memory.text, memory)
        return list(found.values())

    def answer(self, user: str, question: str, *, now: str | None = None) -> str:
        """The reply to a question."""
        return self.memory.answer(question, Scope(user=user), asked_at=now).text

    def forget(self, user: str, ids: Sequence[str]) -> int:
        """Forget memories by id; returns how many went."""
        return sum(self.memory.forget(Scope(user=user), memory_id=name).memories for name in ids)

    def history(self, user: str, memory_id: str) -> list[str]:
        """Names of what happened to a memory."""
        return [event.event for event in self.memory.history(memory_id, Scope(user=user))]

    def seed(self, user: str, texts: Sequence[str], times: Sequence[str]) -> None:
        """Put memories in directly."""
        candidates = [verbatim_candidate(Turn(f"seed-{n}", "user", text))
                      for n, text in enumerate(texts)]
        self.memory.insert(candidates, scope=Scope(user=user), observed_at=times)

    def integrity(self) -> str:
        """The store's own check: `ok`, or what is wrong."""
        store = SqliteStore(self.path)
        try:
            return store.check()
        finally:
            store.close()
