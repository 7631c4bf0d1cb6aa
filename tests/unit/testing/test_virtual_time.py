"""Virtual time: it jumps, in one order, and refuses what it cannot know."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from agentrl.testing.virtual_time import VirtualTimeError, VirtualTimeLoop, run_virtual, sleep


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_timers_fire_in_order_at_their_times() -> None:
    async def main() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, now_s()))

        await asyncio.gather(wait("year", 3e6), wait("hour", 3600.0), wait("moment", 1e-3))
        return seen

    found = run_virtual(main())
    assert [name for name, _ in found] == ["moment", "hour", "year"]
    assert [at for _, at in found] == pytest.approx([1e-3, 3600.0, 3e6])


def test_deadlines_pass_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(500.0):
                await asyncio.Event().wait()
        return now_s()

    assert run_virtual(main()) == pytest.approx(500.0)


def test_what_can_never_happen_is_an_error_that_names_who_waits() -> None:
    async def main() -> None:
        await asyncio.create_task(asyncio.Event().wait(), name="the waiter")

    with pytest.raises(VirtualTimeError, match="the waiter"):
        run_virtual(main())


def test_a_run_without_end_is_given_up_at_the_limit() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(1.0)

    with pytest.raises(VirtualTimeError, match="100 virtual seconds"):
        run_virtual(main(), limit_s=100.0)


def test_sleep_on_the_loop_holds_everything_up() -> None:
    async def main() -> tuple[float, float]:
        beside = asyncio.create_task(asyncio.sleep(1.0, None))
        await asyncio.sleep(0)
        sleep(10.0)
        blocked = now_s()
        await beside
        return blocked, now_s()

    assert run_virtual(main()) == (10.0, 10.0)


def test_work_in_threads_sleeps_beside_the_loop_in_one_order() -> None:
    def run() -> list[tuple[str, float]]:
        async def main() -> list[tuple[str, float]]:
            seen: list[tuple[str, float]] = []
            loop = asyncio.get_running_loop()

            def work(name: str, seconds: float) -> str:
                for _ in range(3):
                    sleep(seconds)
                    seen.append((name, loop.time()))
                return name

            async def beside() -> None:
                for _ in range(4):
                    await asyncio.sleep(1.5)
                    seen.append(("loop", loop.time()))

            got = await asyncio.gather(
                asyncio.to_thread(work, "a", 2.0), asyncio.to_thread(work, "b", 2.0), beside()
            )
            assert got[:2] == ["a", "b"]
            return seen

        return run_virtual(main())

    first = run()
    assert [at for _, at in first] == [1.5, 2, 2, 3, 4, 4, 4.5, 6, 6, 6]
    assert all(run() == first for _ in range(5))


def test_errors_in_threads_reach_the_caller() -> None:
    async def main() -> None:
        def work() -> None:
            sleep(1.0)
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await asyncio.to_thread(work)

    run_virtual(main())


def test_threads_that_sleep_when_the_loop_closes_end() -> None:
    ended = threading.Event()

    async def main() -> None:
        def work() -> None:
            try:
                sleep(100.0)
            finally:
                ended.set()

        asyncio.get_running_loop().run_in_executor(None, work)

    run_virtual(main())
    assert ended.wait(10.0)


def test_foreign_threads_and_io_are_refused() -> None:
    async def foreign() -> None:
        loop = asyncio.get_running_loop()
        errors: list[BaseException] = []

        def call() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except VirtualTimeError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join(10.0)
        assert "AsyncEnv" in str(errors[0])

    async def pipe() -> None:
        read, write = os.pipe()
        try:
            with pytest.raises(VirtualTimeError, match="pipe"):
                asyncio.get_running_loop().add_reader(read, print)
        finally:
            os.close(read)
            os.close(write)

    run_virtual(foreign())
    run_virtual(pipe())


def test_sleep_needs_a_virtual_clock() -> None:
    with pytest.raises(VirtualTimeError, match="run_virtual"):
        sleep(1.0)


def test_turns_are_counted() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        before = loop.num_turns
        for _ in range(10):
            await asyncio.sleep(1.0)
        return loop.num_turns - before

    assert 10 <= run_virtual(main()) <= 20
