"""Sessions shared by the tools of a trajectory, or kept for a process."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.tool.runners.sharing import SharedSessions


class Fake:
    def __init__(self) -> None:
        self.is_lost = False
        self.num_closed = 0

    async def close(self) -> None:
        self.num_closed += 1


class Factory:
    def __init__(self, failures: int = 0) -> None:
        self.made: list[Fake] = []
        self.failures = failures

    async def __call__(self) -> Fake:
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no")
        self.made.append(Fake())
        return self.made[-1]


def test_a_session_is_opened_once_for_a_key_and_closed_after_its_last_holder():
    async def run() -> None:
        factory = Factory()
        shared = SharedSessions(factory)
        first, second, other = await asyncio.gather(*map(shared.acquire, ("a", "a", "b")))
        assert first is second and first is not other and len(factory.made) == 2
        await shared.release("a")
        assert first.num_closed == 0
        await shared.release("a")
        assert (first.num_closed, other.num_closed) == (1, 0)
        assert await shared.acquire("a") is not first

    asyncio.run(run())


def test_a_failed_opening_leaves_nothing_behind():
    async def run() -> None:
        factory = Factory(failures=1)
        shared = SharedSessions(factory)
        results = await asyncio.gather(
            shared.acquire("a"), shared.acquire("a"), return_exceptions=True
        )
        assert isinstance(results[0], ConnectionError) and isinstance(results[1], Fake)
        await shared.release("a")
        assert results[1].num_closed == 1

    asyncio.run(run())


@pytest.mark.parametrize("keep", [True, False])
def test_a_lost_session_is_replaced_only_where_it_is_kept_for_all(keep: bool):
    """Within a trajectory its state is gone, so that going on would be something else."""

    async def run() -> None:
        factory = Factory()
        shared = SharedSessions(factory, keep=keep)
        first = await shared.acquire("a")
        first.is_lost = True
        second = await shared.acquire("a")
        assert (second is first) != keep
        await shared.release("a")
        await shared.release("a")
        assert [fake.num_closed for fake in factory.made] == ([1, 0] if keep else [1])

    asyncio.run(run())


def test_a_cancelled_caller_holds_nothing():
    async def run() -> None:
        factory = Factory()
        shared = SharedSessions(factory)
        task = asyncio.ensure_future(shared.acquire("a"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held = await shared.acquire("a")
        await shared.release("a")
        assert held.num_closed == 1

    asyncio.run(run())
