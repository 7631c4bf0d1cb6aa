"""Concurrent requests to one model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from agentrl.errors import RewardServiceError
from agentrl.reward.batching import Batcher


def test_what_is_asked_together_is_computed_together_and_answers_stay_in_order():
    sizes: list[int] = []

    def double(items: Sequence[int]) -> list[int]:
        sizes.append(len(items))
        return [2 * item for item in items]

    async def main() -> list[int]:
        batcher = Batcher(double, max_items=4, window_s=5.0)
        answers = await asyncio.gather(*(batcher.ask(i, timeout_s=30) for i in range(8)))
        await batcher.close()
        return answers

    assert asyncio.run(asyncio.wait_for(main(), 30)) == [2 * i for i in range(8)]
    assert sizes == [4, 4]  # a full batch does not wait for its window


def test_a_lone_request_is_answered_after_the_window():
    async def main() -> int:
        batcher = Batcher(lambda items: [len(items)], max_items=100, window_s=0.01)
        first = await batcher.ask(0, timeout_s=30)
        second = await batcher.ask(0, timeout_s=30)
        await batcher.close()
        return first + second

    assert asyncio.run(asyncio.wait_for(main(), 30)) == 2


def test_an_error_reaches_everyone_in_the_batch_and_the_next_one_is_computed():
    def fails_on_zero(items: Sequence[int]) -> Sequence[int]:
        if 0 in items:
            raise ValueError("out of memory")
        return items

    async def main() -> None:
        batcher = Batcher(fails_on_zero, max_items=2, window_s=0.01)
        failed = await asyncio.gather(
            batcher.ask(0, timeout_s=9), batcher.ask(1, timeout_s=9), return_exceptions=True
        )
        assert [str(error) for error in failed] == ["out of memory"] * 2
        assert await batcher.ask(2, timeout_s=9) == 2
        await batcher.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_model_that_hangs_is_infrastructure():
    release = threading.Event()

    def hangs(items: Sequence[int]) -> Sequence[int]:
        release.wait(60)
        return items

    async def main() -> None:
        batcher = Batcher(hangs, max_items=1, window_s=0.0)
        with pytest.raises(RewardServiceError, match=r"batch of 1 within 0\.1 s"):
            await batcher.ask(0, timeout_s=0.1)
        await batcher.close()

    try:
        asyncio.run(asyncio.wait_for(main(), 30))
    finally:
        release.set()


def test_closing_cancels_what_waits():
    async def main() -> None:
        batcher = Batcher(lambda items: items, max_items=9, window_s=60.0)
        waiting = asyncio.create_task(batcher.ask(0, timeout_s=9))
        await asyncio.sleep(0)
        await batcher.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(asyncio.wait_for(main(), 30))


def test_closing_cancels_what_is_being_computed():
    begun, release = threading.Event(), threading.Event()

    def hangs(items: Sequence[int]) -> Sequence[int]:
        begun.set()
        release.wait(60)
        return items

    async def main() -> None:
        batcher = Batcher(hangs, max_items=1, window_s=0.0)
        computed = asyncio.create_task(batcher.ask(0, timeout_s=60))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        await batcher.close()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(computed, 30)

    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        release.set()


def test_batches_that_do_not_fill_leave_nothing_behind():
    async def main() -> int:
        batcher = Batcher(lambda items: items, max_items=9, window_s=0.0)
        for item in range(20):
            await batcher.ask(item, timeout_s=30)
        left = len(asyncio.all_tasks())
        await batcher.close()
        return left

    assert asyncio.run(asyncio.wait_for(main(), 30)) <= 3  # this one, its caller, the worker
