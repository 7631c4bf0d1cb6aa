"""The bubblewrap backend: one zygote, and a fork of it per box."""

from __future__ import annotations

import asyncio
import itertools
import socket
from dataclasses import asdict
from typing import Any

from agentrl.errors import SandboxError
from agentrl.sandbox.base import SandboxLimits, SandboxReport
from agentrl_sandboxes.local.box import LocalSandbox
from agentrl_sandboxes.local.launcher import ZygoteProcess, find_bwrap, find_python

_START_S = 20.0
_CREATE_S = 10.0


class LocalBackend:
    """Sandboxes in namespaces of this machine, by bubblewrap. Needs no rights of its own."""

    def __init__(self) -> None:
        self._zygote: ZygoteProcess | None = None
        self._starting = asyncio.Lock()
        self._ids = itertools.count(1)
        self._boxes: dict[int, LocalSandbox] = {}
        self._facts: dict[str, Any] = {}
        self._closed = False
        self.zygote_restarts = 0

    async def start(self) -> None:
        """Start the zygote and read back, from a first box, what holds in there."""
        zygote = await self._living_zygote()
        box, self._facts = await self._open(zygote, SandboxLimits(), probe=True)
        await box.close()

    async def create(self, limits: SandboxLimits) -> LocalSandbox:
        """Return a fresh box; starts another zygote if the last one died."""
        if self._closed:
            raise SandboxError("the sandbox backend is closed")
        zygote = await self._living_zygote()
        box, _ = await self._open(zygote, limits, probe=False)
        return box

    async def close(self) -> None:
        """Close every box, then the zygote."""
        self._closed = True
        await asyncio.gather(*(box.close() for box in list(self._boxes.values())))
        if self._zygote is not None:
            await self._zygote.stop()
            self._zygote = None

    def report(self) -> SandboxReport:
        return SandboxReport(backend="local")

    async def _living_zygote(self) -> ZygoteProcess:
        async with self._starting:
            if self._zygote is not None and self._zygote.alive:
                return self._zygote
            if self._zygote is not None:
                self.zygote_restarts += 1
                await self._zygote.stop()
            zygote = ZygoteProcess(find_bwrap(), find_python())
            await zygote.start(_START_S)
            self._zygote = zygote
            return zygote

    async def _open(
        self, zygote: ZygoteProcess, limits: SandboxLimits, *, probe: bool
    ) -> tuple[LocalSandbox, dict[str, Any]]:
        box_id = next(self._ids)
        near, far = socket.socketpair()
        near.setblocking(False)

        async def release() -> None:
            self._boxes.pop(box_id, None)

        box = LocalSandbox(
            near,
            limits,
            kill=lambda: zygote.kill_box(box_id),
            release=release,
            has_witness=True,
        )
        self._boxes[box_id] = box
        message = {"op": "create", "id": box_id, "limits": asdict(limits), "probe": probe}
        try:
            await zygote.send(message, far.fileno(), _CREATE_S)
            far.close()
            facts = await box.hello(_CREATE_S)
        except BaseException:
            far.close()
            await box.close()
            raise
        return box, facts
