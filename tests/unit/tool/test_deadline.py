"""Deadlines that hold whatever the called code does."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agentrl.tool.deadline import (
    Abandoned,
    DeadlinePassed,
    OffLoop,
    contained,
    contained_call,
    within,
)


def test_a_result_and_an_error_pass_through():
    async def good() -> int:
        return 5

    async def bad() -> int:
        raise KeyError("x")

    assert asyncio.run(within(good(), 1)) == 5
    with pytest.raises(KeyError):
        asyncio.run(within(bad(), 1))


def test_a_late_coroutine_is_cancelled():
    ended: list[str] = []

    async def late() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cleaned up")

    with pytest.raises(DeadlinePassed):
        asyncio.run(within(late(), 0.05))
    assert ended == ["cleaned up"]


def test_a_coroutine_that_ignores_cancellation_is_left_behind_and_counted():
    async def stubborn() -> None:
        for _ in range(1000):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if release.is_set():
                    raise

    async def main() -> int:
        before = Abandoned.num_tasks
        with pytest.raises(DeadlinePassed):
            await within(stubborn(), 0.05)
        release.set()
        return Abandoned.num_tasks - before

    release = threading.Event()
    assert asyncio.run(main()) == 1


def test_a_timeout_of_the_called_code_is_told_apart_from_the_deadline():
    async def own() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError) as caught:
        asyncio.run(within(own(), 1))
    assert not isinstance(caught.value, DeadlinePassed)


def test_functions_run_on_other_threads_which_are_used_again():
    async def main() -> set[int]:
        off_loop = OffLoop()
        return {await off_loop.run(threading.get_ident, 5) for _ in range(10)}

    idents = asyncio.run(main())
    assert len(idents) == 1 and threading.get_ident() not in idents


def test_functions_run_at_the_same_time():
    async def main() -> list[int]:
        off_loop = OffLoop()
        barrier = threading.Barrier(4)  # passed only by four at once
        return await asyncio.gather(*(off_loop.run(lambda: barrier.wait(10), 10) for _ in "abcd"))

    assert sorted(asyncio.run(main())) == [0, 1, 2, 3]


def test_a_hung_thread_is_abandoned_counted_and_replaced():
    release = threading.Event()

    async def main() -> tuple[int, str]:
        off_loop = OffLoop()
        before = Abandoned.num_threads
        with pytest.raises(DeadlinePassed):
            await off_loop.run(lambda: release.wait(60), 0.05)
        return Abandoned.num_threads - before, await off_loop.run(lambda: "next", 5)

    assert asyncio.run(main()) == (1, "next")
    release.set()


@pytest.mark.parametrize("error", [KeyError("k"), StopIteration("s"), SystemExit(3)])
def test_whatever_a_function_raises_arrives(error: BaseException):
    def job() -> None:
        raise error

    async def main() -> BaseException:
        try:
            await OffLoop().run(job, 5)
        except BaseException as caught:
            return caught
        raise AssertionError("nothing was raised")

    caught = asyncio.run(main())
    assert isinstance(caught, RuntimeError if isinstance(error, StopIteration) else type(error))


def test_a_caller_who_is_cancelled_as_the_answer_comes_leaves_a_thread_that_answers():
    async def main() -> tuple[int, str]:
        off_loop = OffLoop()
        before = Abandoned.num_threads
        first = asyncio.ensure_future(off_loop.run(lambda: "first", 20))
        while not off_loop._idle:  # the answer is there, and its caller has not seen it yet
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        return Abandoned.num_threads - before, await off_loop.run(lambda: "second", 5)

    assert asyncio.run(main()) == (0, "second")


@pytest.mark.parametrize("ending", [SystemExit(3), asyncio.CancelledError()])
def test_what_would_end_more_than_what_is_called_is_an_error(ending: BaseException):
    def function() -> None:
        raise ending

    async def coroutine() -> None:
        raise ending

    with pytest.raises(RuntimeError, match=f"raised {type(ending).__name__}"):
        contained_call(function)
    with pytest.raises(RuntimeError, match=f"raised {type(ending).__name__}"):
        asyncio.run(within(contained(coroutine()), 20))


def test_a_cancel_that_was_asked_for_is_one():
    async def main() -> bool:
        work = asyncio.ensure_future(within(contained(asyncio.sleep(60)), 60))
        await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait([work])
        return work.cancelled()

    assert asyncio.run(main())
