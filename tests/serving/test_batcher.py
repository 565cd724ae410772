"""The queue in front of each model. Time is driven by events, never by sleeping."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from serving.batcher import Batcher, Overloaded


class Gate:
    """A run function that waits for permission and remembers its batches."""

    def __init__(self, is_open=True):
        self.batches = []
        self.entered = threading.Event()
        self.may_go = threading.Event()
        if is_open:
            self.may_go.set()

    def __call__(self, items):
        self.batches.append(list(items))
        self.entered.set()
        assert self.may_go.wait(20)
        if "poison" in items:
            raise ValueError("poison")
        return [f"{item}!" for item in items]


def scenario(gate, steps, **settings):
    """Run `steps(batcher)` with a started batcher."""

    async def main():
        with ThreadPoolExecutor(1) as executor:
            options = {"max_tokens": 10, "max_waiting": 8, "deadline_s": 20.0} | settings
            batcher = Batcher(gate, executor, **options)
            batcher.start()
            try:
                return await steps(batcher)
            finally:
                gate.may_go.set()
                await batcher.stop()

    return asyncio.run(main())


async def entered(gate):
    await asyncio.get_running_loop().run_in_executor(None, gate.entered.wait, 20)


async def waiting(batcher, count):
    """Let the tasks run until so many items wait."""
    while len(batcher._waiting) < count:
        await asyncio.sleep(0)


def test_results_come_back_in_order_and_batches_keep_the_budget():
    gate = Gate(is_open=False)

    async def steps(batcher):
        first = asyncio.create_task(batcher.submit("a", tokens=1))
        await entered(gate)
        rest = [asyncio.create_task(batcher.submit(name, tokens=4)) for name in "bcdef"]
        await waiting(batcher, 5)
        gate.may_go.set()
        return await asyncio.gather(first, *rest)

    assert scenario(gate, steps) == ["a!", "b!", "c!", "d!", "e!", "f!"]
    assert gate.batches == [["a"], ["b", "c"], ["d", "e"], ["f"]]


def test_an_item_above_the_budget_goes_alone():
    gate = Gate()

    async def steps(batcher):
        return await batcher.submit("big", tokens=1000)

    assert scenario(gate, steps) == "big!"


def test_one_bad_item_fails_alone():
    gate = Gate(is_open=False)

    async def steps(batcher):
        first = asyncio.create_task(batcher.submit("a", tokens=1))
        await entered(gate)
        rest = [asyncio.create_task(batcher.submit(name, tokens=1))
                for name in ("b", "poison", "c")]
        await waiting(batcher, 3)
        gate.may_go.set()
        return await asyncio.gather(first, *rest, return_exceptions=True)

    a, b, bad, c = scenario(gate, steps)
    assert (a, b, c) == ("a!", "b!", "c!")
    assert isinstance(bad, ValueError)


def test_a_short_answer_is_an_error_not_somebody_s_result():
    async def steps(batcher):
        with pytest.raises(RuntimeError, match="1 items gave 0 results"):
            await batcher.submit("a", tokens=1)

    scenario(ShortAnswer(), steps)


class ShortAnswer(Gate):
    def __call__(self, items):
        return []


def test_full_queue_is_overloaded_with_a_time_to_retry():
    gate = Gate(is_open=False)

    async def steps(batcher):
        running = asyncio.create_task(batcher.submit("a", tokens=1))
        await entered(gate)
        queued = [asyncio.create_task(batcher.submit(n, tokens=1)) for n in range(2)]
        await waiting(batcher, 2)
        with pytest.raises(Overloaded, match="2 requests are waiting, allowed are 2") as refusal:
            await batcher.submit("late", tokens=1)
        assert refusal.value.retry_after_s >= 1
        gate.may_go.set()
        await asyncio.gather(running, *queued)

    scenario(gate, steps, max_waiting=2)


def test_cancelled_items_are_never_run():
    gate = Gate(is_open=False)

    async def steps(batcher):
        running = asyncio.create_task(batcher.submit("a", tokens=1))
        await entered(gate)
        gone = asyncio.create_task(batcher.submit("gone", tokens=1))
        kept = asyncio.create_task(batcher.submit("kept", tokens=1))
        await waiting(batcher, 2)
        gone.cancel()
        gate.may_go.set()
        await asyncio.gather(running, kept)
        assert gone.cancelled() or (await asyncio.gather(gone, return_exceptions=True))

    scenario(gate, steps)
    assert [item for batch in gate.batches for item in batch] == ["a", "kept"]


def test_deadline_frees_the_caller_while_the_model_is_stuck():
    gate = Gate(is_open=False)

    async def steps(batcher):
        with pytest.raises(TimeoutError):
            await batcher.submit("a", tokens=1)

    scenario(gate, steps, deadline_s=0.01)


def test_stopping_finishes_what_runs_and_refuses_what_waits():
    gate = Gate(is_open=False)

    async def steps(batcher):
        running = asyncio.create_task(batcher.submit("a", tokens=1))
        await entered(gate)
        queued = asyncio.create_task(batcher.submit("b", tokens=1))
        await waiting(batcher, 1)
        stopping = asyncio.create_task(batcher.stop())
        await asyncio.sleep(0)
        gate.may_go.set()
        await stopping
        assert await running == "a!"
        with pytest.raises(Overloaded):
            await queued
        with pytest.raises(Overloaded):
            await batcher.submit("c", tokens=1)

    scenario(gate, steps)
