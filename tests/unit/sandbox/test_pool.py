"""Bounds, deadlines and counts of the sandbox pool."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from agentrl.errors import SandboxError
from agentrl.sandbox.base import ExecResult, SandboxLimits, SandboxReport, SandboxStatus
from agentrl.sandbox.pool import SandboxPool
from agentrl.testing.sandboxes import FakeSandbox


@dataclass
class FakeBox:
    hang: bool = False
    closed: int = 0

    async def close(self) -> None:
        if self.hang:
            await asyncio.Event().wait()
        self.closed += 1


@dataclass
class FakeBackend:
    hang_create: bool = False
    fail_create: bool = False
    hang_close: bool = False
    creating: int = 0
    most_creating: int = 0
    boxes: list[FakeBox] = field(default_factory=list)
    closed: bool = False

    async def start(self) -> None: ...

    async def create(self, limits: SandboxLimits) -> FakeBox:
        if self.fail_create:
            raise SandboxError("no")
        if self.hang_create:
            await asyncio.Event().wait()
        self.creating += 1
        self.most_creating = max(self.most_creating, self.creating)
        await asyncio.sleep(0)
        self.creating -= 1
        self.boxes.append(FakeBox(self.hang_close))
        return self.boxes[-1]

    async def close(self) -> None:
        self.closed = True

    def report(self) -> SandboxReport:
        return SandboxReport(backend="fake")


def make_pool(backend: FakeBackend, **options: float) -> SandboxPool:
    return SandboxPool(backend, **options)  # type: ignore[arg-type]


def test_never_more_open_or_creating_than_allowed():
    async def main():
        backend = FakeBackend()
        pool = make_pool(backend, max_open=5, max_creating=2)
        most_open = 0

        async def use() -> None:
            nonlocal most_open
            async with pool.box(SandboxLimits()):
                most_open = max(most_open, pool.open)
                for _ in range(20):
                    await asyncio.sleep(0)

        async with pool:
            await asyncio.gather(*(use() for _ in range(40)))
        return backend, pool, most_open

    backend, pool, most_open = asyncio.run(main())
    assert most_open == 5 and backend.most_creating <= 2
    assert (pool.counts.created, pool.counts.closed, pool.open) == (40, 40, 0)
    assert all(box.closed == 1 for box in backend.boxes) and backend.closed


@pytest.mark.parametrize("backend", [FakeBackend(hang_create=True), FakeBackend(fail_create=True)])
def test_a_failed_creation_is_counted_and_gives_its_place_back(backend):
    async def main():
        pool = make_pool(backend, max_open=1, create_timeout_s=0.02)
        for _ in range(3):
            with pytest.raises(SandboxError):
                async with pool.box(SandboxLimits()):
                    raise AssertionError("never entered")
        backend.hang_create = backend.fail_create = False
        async with pool.box(SandboxLimits()):
            pass
        return pool.counts

    counts = asyncio.run(main())
    assert (counts.infra_errors, counts.created, counts.closed) == (3, 1, 1)


def test_waiting_for_a_place_has_a_deadline_that_names_the_setting():
    async def main():
        pool = make_pool(FakeBackend(), max_open=1, create_timeout_s=0.02)
        async with pool.box(SandboxLimits()):
            with pytest.raises(SandboxError, match=r"1 are open.*sandbox.max_open"):
                async with pool.box(SandboxLimits()):
                    pass

    asyncio.run(main())


def test_a_box_that_will_not_close_is_leaked_not_waited_for():
    async def main():
        pool = make_pool(FakeBackend(hang_close=True), max_open=1, close_timeout_s=0.02)
        async with pool.box(SandboxLimits()):
            pass
        return pool.counts, pool.open

    counts, still_open = asyncio.run(main())
    assert (counts.closed, counts.leaked, still_open) == (0, 1, 0)


def test_a_cancelled_user_still_closes_its_box():
    async def main():
        backend = FakeBackend()
        pool = make_pool(backend)

        async def use() -> None:
            async with pool.box(SandboxLimits()):
                await asyncio.Event().wait()

        task = asyncio.create_task(use())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return backend.boxes, pool.counts

    boxes, counts = asyncio.run(main())
    assert [box.closed for box in boxes] == [1] and counts.closed == 1


def test_a_closing_whose_caller_is_cancelled_goes_on():
    class Slow(FakeSandbox):
        async def close(self) -> None:
            closing.set()
            await may_close.wait()
            await super().close()

    class Backend(FakeBackend):
        async def create(self, limits: SandboxLimits) -> Slow:  # type: ignore[override]
            return Slow(lambda code: ExecResult(status=SandboxStatus.OK), limits)

    async def main():
        pool = make_pool(Backend(), max_open=1)
        box = await pool.acquire()
        caller = asyncio.ensure_future(box.close())
        await closing.wait()
        caller.cancel()
        await asyncio.wait([caller])
        may_close.set()
        await box.close()
        return pool.counts

    closing, may_close = asyncio.Event(), asyncio.Event()
    counts = asyncio.run(asyncio.wait_for(main(), 30))
    assert (counts.closed, counts.leaked) == (1, 0)
