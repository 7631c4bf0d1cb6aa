"""The shared sandbox: opened once, as wide as any tool asks, with what the environment puts in."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from agentrl.errors import EnvError, SandboxError, ToolError
from agentrl.sandbox.base import ExecResult, SandboxLimits, SandboxReport, SandboxStatus
from agentrl.sandbox.pool import SandboxPool
from agentrl.testing import FakeSandboxes
from agentrl.testing.sandboxes import FakeSandbox
from agentrl.tool.base import ToolContext
from agentrl.tool.workspace import Workspace, widest


def test_of_each_limit_the_largest_is_taken_whatever_the_order():
    small_but_long = SandboxLimits(memory_mb=64, wall_s=60.0)
    large = SandboxLimits(memory_mb=512, wall_s=1.0, max_processes=99)
    both = SandboxLimits(memory_mb=512, wall_s=60.0, max_processes=99)
    assert widest([small_but_long, large]) == widest([large, small_but_long]) == both
    assert widest([]) == SandboxLimits()


def test_every_tool_gets_the_same_sandbox_also_when_all_ask_at_once():
    sandboxes = FakeSandboxes()
    limits = SandboxLimits(memory_mb=99)

    async def main() -> None:
        workspace = Workspace(sandboxes, limits=limits)
        boxes = await asyncio.gather(*(workspace.open() for _ in range(8)))
        assert all(box is boxes[0] for box in boxes)
        assert not sandboxes.opened[0].closed
        await workspace.close()
        await workspace.close()

    asyncio.run(main())
    (sandbox,) = sandboxes.opened
    assert sandbox.closed
    assert sandbox.limits == limits


def test_unused_nothing_is_opened_and_closed_nothing_opens_again():
    sandboxes = FakeSandboxes()

    async def main() -> None:
        workspace = Workspace(sandboxes, limits=SandboxLimits())
        await workspace.close()
        with pytest.raises(SandboxError, match="closed"):
            await workspace.open()

    asyncio.run(main())
    assert sandboxes.opened == []


def test_a_first_try_that_is_cancelled_leaves_the_second_a_whole_workspace():
    sandboxes = FakeSandboxes()
    written: list[str] = []
    asked = 0

    async def state() -> Mapping[str, Any]:
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.sleep(60)
        written.append("asked again")
        return {"files": {"a.txt": "a"}}

    async def main() -> None:
        workspace = Workspace(sandboxes, limits=SandboxLimits(), load_state=state)
        first = asyncio.ensure_future(workspace.open())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        await workspace.open()
        await workspace.close()

    asyncio.run(main())
    assert written == ["asked again"]
    assert [box.closed for box in sandboxes.opened] == [True]


@pytest.mark.parametrize(
    ("files", "told"),
    [(["a"], "mapping"), ({"a": 1}, "text or bytes"), ({1: "a"}, "text or bytes")],
)
def test_files_that_are_none_are_the_environments_mistake(files: Any, told: str):
    async def state() -> Mapping[str, Any]:
        return {"files": files}

    async def main() -> None:
        workspace = Workspace(FakeSandboxes(), limits=SandboxLimits(), load_state=state)
        with pytest.raises(EnvError, match=told):
            await workspace.open()

    asyncio.run(main())


def test_a_file_that_cannot_be_written_is_the_environments_mistake(monkeypatch):
    sandboxes = FakeSandboxes()

    async def state() -> Mapping[str, Any]:
        return {"files": {"../up": "a"}}

    async def main() -> None:
        box = await sandboxes.acquire()

        async def refuse(path: str, data: bytes) -> None:
            raise ToolError(f"{path!r}: it leads out of the work directory")

        async def acquire(limits: SandboxLimits | None = None):
            return box

        monkeypatch.setattr(box, "write", refuse)
        monkeypatch.setattr(sandboxes, "acquire", acquire)
        workspace = Workspace(sandboxes, limits=SandboxLimits(), load_state=state)
        with pytest.raises(EnvError, match="leads out"):
            await workspace.open()
        await workspace.close()
        assert box.closed

    asyncio.run(main())


def test_a_context_without_one_says_who_must_give_it():
    async def main() -> None:
        context = ToolContext(trajectory_id="t", seed=0, sandboxes=FakeSandboxes())
        with pytest.raises(SandboxError, match="workspace="):
            await context.workspace()

    asyncio.run(main())


def test_a_closing_that_is_cancelled_is_waited_for_by_the_next():
    class Slow(FakeSandbox):
        async def close(self) -> None:
            closing.set()
            await may_close.wait()
            await super().close()

    class Backend:
        async def start(self) -> None: ...

        async def create(self, limits: SandboxLimits) -> FakeSandbox:
            made.append(Slow(lambda code: ExecResult(status=SandboxStatus.OK), limits))
            return made[0]

        async def close(self) -> None: ...

        def report(self) -> SandboxReport:
            return SandboxReport(backend="slow")

    made: list[FakeSandbox] = []

    async def main() -> bool:
        workspace = Workspace(SandboxPool(Backend()), limits=SandboxLimits())
        await workspace.open()
        first = asyncio.ensure_future(workspace.close())
        await closing.wait()
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.ensure_future(workspace.close())
        await asyncio.sleep(0)
        may_close.set()
        await second
        return made[0].closed

    closing, may_close = asyncio.Event(), asyncio.Event()
    assert asyncio.run(asyncio.wait_for(main(), 30))
