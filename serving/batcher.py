"""Gathers requests into batches under a token budget: one batch at a time, errors one by one."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class Overloaded(Exception):
    """The queue is full or closing; try again after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class _Job(Generic[Item, Result]):
    item: Item
    tokens: int
    future: asyncio.Future[Result]


class Batcher(Generic[Item, Result]):
    """Runs a function over batches of what is waiting.

    There is no waiting window: while one batch runs, the next one gathers. A caller that gives up
    (cancelled, or past its deadline) takes its item out of the queue.
    """

    def __init__(
        self, run: Callable[[Sequence[Item]], Sequence[Result]], executor: Executor, *,
        max_tokens: int, max_waiting: int, deadline_s: float,
    ) -> None:
        """Make a batcher; `start` begins the work.

        Args:
            run: Results of items, in order. Called in the executor, never twice at once.
            executor: Where `run` is called.
            max_tokens: Most tokens of a batch; an item above it goes alone.
            max_waiting: Most items in the queue.
            deadline_s: Longest time from submit to result.
        """
        self._run = run
        self._executor = executor
        self._max_tokens = max_tokens
        self._max_waiting = max_waiting
        self._deadline_s = deadline_s
        self._waiting: deque[_Job[Item, Result]] = deque()
        self._wake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._is_closing = False
        self._seconds_per_batch = 1.0

    def start(self) -> None:
        """Begin to work, in the running event loop."""
        self._worker = asyncio.get_running_loop().create_task(self._work())

    async def stop(self) -> None:
        """Finish the batch that runs; whoever still waits gets Overloaded."""
        self._is_closing = True
        self._wake.set()
        if self._worker is not None:
            await self._worker
        for job in self._waiting:
            if not job.future.done():
                job.future.set_exception(Overloaded("the service is stopping", retry_after_s=5))
        self._waiting.clear()

    async def submit(self, item: Item, *, tokens: int) -> Result:
        """The result for one item.

        Raises:
            Overloaded: The queue is full.
            TimeoutError: The deadline has passed.
            Exception: Whatever `run` raises for this item.
        """
        if self._is_closing:
            raise Overloaded("the service is stopping", retry_after_s=5)
        waiting = sum(1 for job in self._waiting if not job.future.done())
        if waiting >= self._max_waiting:
            raise Overloaded(
                f"{waiting} requests are waiting, allowed are {self._max_waiting}",
                retry_after_s=max(1, round(self._seconds_per_batch)))
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Job(item, tokens, future))
        self._wake.set()
        async with asyncio.timeout(self._deadline_s):
            return await future

    def _take(self) -> list[_Job[Item, Result]]:
        """The oldest jobs that fit together; those nobody waits for any more fall out."""
        batch: list[_Job[Item, Result]] = []
        used = 0
        while self._waiting:
            job = self._waiting[0]
            if not job.future.done():
                if batch and used + job.tokens > self._max_tokens:
                    break
                batch.append(job)
                used += job.tokens
            self._waiting.popleft()
        return batch

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_closing:
            batch = self._take()
            if not batch:
                self._wake.clear()
                await self._wake.wait()
                continue
            start = loop.time()
            outcomes = await loop.run_in_executor(
                self._executor, self._run_each, [job.item for job in batch])
            self._seconds_per_batch += 0.2 * (loop.time() - start - self._seconds_per_batch)
            for job, outcome in zip(batch, outcomes, strict=True):
                if job.future.done():
                    continue
                if isinstance(outcome, Exception):
                    job.future.set_exception(outcome)
                else:
                    job.future.set_result(outcome)

    def _run_each(self, items: list[Item]) -> list[Result | Exception]:
        """Results or errors, in order. When a batch fails, its items are run one by one, so that
        one bad item fails alone.
        """
        try:
            results = list(self._run(items))
            if len(results) != len(items):
                raise RuntimeError(f"{len(items)} items gave {len(results)} results")
            return list(results)
        except Exception as error:
            if len(items) == 1:
                return [error]
            _log.warning("a batch of %d failed (%r), running its items alone", len(items), error)
            return [outcome for item in items for outcome in self._run_each([item])]
