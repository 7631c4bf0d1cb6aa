"""What the driver computes does not hold up its event loop, and keeps the caller's settings."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from agentrl.train.compute_thread import ComputeThread

pytestmark = pytest.mark.timeout(60)


def test_the_event_loop_goes_on_while_work_runs_and_errors_come_back() -> None:
    async def main() -> None:
        compute, went_on = ComputeThread(), threading.Event()
        asyncio.get_running_loop().call_later(0.01, went_on.set)
        assert await compute.run(went_on.wait, timeout=30), "the loop stood still"
        with pytest.raises(ZeroDivisionError):
            await compute.run(lambda: 1 // 0)
        compute.close()
        compute.close()

    asyncio.run(main())


def test_one_thread_does_all_work_with_the_callers_number_of_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)

    async def main() -> None:
        compute = ComputeThread()
        first = await compute.run(lambda: (threading.get_ident(), torch.get_num_threads()))
        # As an engine in this process does while it samples: no matter of this thread's.
        await asyncio.to_thread(torch.set_num_threads, 1)
        second = await compute.run(lambda: (threading.get_ident(), torch.get_num_threads()))
        assert first == second and first[1] == 3
        compute.close()

    try:
        asyncio.run(main())
    finally:
        torch.set_num_threads(before)


def test_a_caller_that_is_cancelled_is_held_until_the_work_has_ended() -> None:
    async def main() -> None:
        compute, go, done = ComputeThread(), threading.Event(), []

        def work() -> None:
            go.wait(30)
            done.append(True)

        running = asyncio.create_task(compute.run(work))
        await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.sleep(0.01)
        assert not running.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert done == [True]
        compute.close()

    asyncio.run(main())
