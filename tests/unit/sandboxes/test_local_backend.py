"""The local backend around its zygote, which is a stand-in here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agentrl_sandboxes.local import LocalBackend, backend

from agentrl.errors import SandboxError
from agentrl.sandbox.base import SandboxLimits


class Zygote:
    """Starts when it is let; serves nothing."""

    inner_pid = 1

    def __init__(self, *_: Any) -> None:
        self.alive = True
        self.starting, self.may_start = asyncio.Event(), asyncio.Event()
        made.append(self)

    async def start(self, timeout_s: float) -> None:
        self.starting.set()
        await self.may_start.wait()

    async def send(self, *_: Any) -> None:
        raise SandboxError("the sandbox process is gone")

    def kill_box(self, box_id: int) -> None: ...

    async def stop(self) -> None:
        self.alive = False


class NoGroups:
    def __init__(self, **_: Any) -> None: ...

    def add(self, pid: int) -> None: ...

    def make_box_group(self, *_: Any) -> Any:
        raise OSError("none here")

    def remove(self) -> None: ...


made: list[Zygote] = []


def test_a_zygote_that_starts_as_the_backend_is_closed_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made.clear()
    monkeypatch.setattr(backend, "ZygoteProcess", Zygote)
    monkeypatch.setattr(backend, "BoxesGroup", NoGroups)
    monkeypatch.setattr(backend, "find_bwrap", lambda: "bwrap")

    async def main() -> None:
        local = LocalBackend()
        creating = asyncio.ensure_future(local.create(SandboxLimits()))
        await asyncio.sleep(0)
        await made[0].starting.wait()
        closing = asyncio.ensure_future(local.close())
        await asyncio.sleep(0)
        made[0].may_start.set()
        await asyncio.wait([creating, closing])
        assert isinstance(creating.exception(), SandboxError)
        closing.result()
        with pytest.raises(SandboxError, match="closed"):
            await local.create(SandboxLimits())

    asyncio.run(asyncio.wait_for(main(), 30))
    assert [zygote.alive for zygote in made] == [False]
