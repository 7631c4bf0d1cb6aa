"""The bubblewrap backend: one zygote, and a fork of it per box."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections import deque
from dataclasses import asdict
from typing import Any

from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.sandbox.base import SandboxLimits, SandboxReport
from agentrl_sandboxes.local.cgroup import BoxesGroup
from agentrl_sandboxes.local.launcher import ZygoteProcess, find_bwrap, find_python
from agentrl_sandboxes.supervised.box import SupervisedSandbox
from agentrl_sandboxes.supervised.channel import SocketChannel
from agentrl_sandboxes.supervised.limits import check_limits

_START_S = 20.0
_CREATE_S = 10.0
_MAX_TASKS = 16_384
_NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")


class LocalBackend:
    """Sandboxes in namespaces of this machine, by bubblewrap. Needs no rights of its own.

    Args:
        idle_boxes: boxes kept forked in advance; each is used once, like any other.
        total_memory_mb: memory of all boxes together, enforced where a control group can be
            made; half of the machine's if None.
    """

    def __init__(self, *, idle_boxes: int = 4, total_memory_mb: int | None = None) -> None:
        machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._total_bytes = (total_memory_mb << 20) if total_memory_mb else machine_bytes // 2
        self._idle_target = idle_boxes
        self._idle: deque[SupervisedSandbox] = deque()
        self._idle_limits: SandboxLimits | None = None
        self._refill: asyncio.Task[None] | None = None
        self._zygote: ZygoteProcess | None = None
        self._group: BoxesGroup | None = None
        self._starting = asyncio.Lock()
        self._ids = itertools.count(1)
        self._boxes: dict[int, SupervisedSandbox] = {}
        self._facts: dict[str, Any] = {}
        self._closed = False
        self.zygote_restarts = 0
        """How often the zygote died and was replaced."""

    async def start(self) -> None:
        """Start the zygote and read back, from a first box, what holds in there."""
        zygote = await self._living_zygote()
        try:
            box, self._facts = await self._open(zygote, SandboxLimits(), probe=True)
        except SandboxError as error:
            await self.close()
            raise SandboxUnavailable(
                f"the local sandbox cannot work here: {error} ({zygote.last_words()})"
            ) from None
        await box.close()

    async def create(self, limits: SandboxLimits) -> SupervisedSandbox:
        """Return a fresh box; starts another zygote if the last one died."""
        check_limits(limits)
        if self._closed:
            raise SandboxError("the sandbox backend is closed")
        zygote = await self._living_zygote()
        box = await self._take_idle(limits)
        if box is None:
            box, _ = await self._open(zygote, limits, probe=False)
        if self._idle_target and (self._refill is None or self._refill.done()):
            self._refill = asyncio.create_task(self._fill_idle())
        return box

    async def close(self) -> None:
        """Close every box, then the zygote."""
        self._closed = True
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.gather(self._refill, return_exceptions=True)
        await asyncio.gather(*(box.close() for box in list(self._boxes.values())))
        await self._stop_zygote()

    def report(self) -> SandboxReport:
        """What the first box read back about itself, and what bounds each resource."""
        if not self._facts:
            raise SandboxError("the report is read back from a box: start the backend first")
        group = self._group.enforced() if self._group else {}
        per_box = "summed by the supervisor; RLIMIT_AS per process"
        limits = {
            "wall": "supervisor: interrupt, then kill",
            "cpu": "RLIMIT_CPU per process",
            "memory": f"{per_box}; all boxes: {group.get('memory', 'not bounded')}",
            "processes": "counted by the supervisor; RLIMIT_NPROC per box; all boxes: "
            + group.get("pids", "not bounded"),
            "disk": "tmpfs size: " + self._facts["mounts"].get("/box", ["", "not mounted"])[1],
            "output": "supervisor: truncate, then kill",
        }
        warned = []
        if "memory" not in group:
            warned.append(
                "no memory control group can be made here: the memory of a box is bounded by "
                "counting every 50 ms, and that of all boxes together is not"
            )
        return SandboxReport(
            backend="local", isolation=self._isolation(), limits=limits, warnings=tuple(warned)
        )

    def _isolation(self) -> tuple[str, ...]:
        """Only what was observed: a namespace counts if it is another one than ours."""
        facts = self._facts
        held = [
            f"{name} namespace"
            for name in _NAMESPACES
            if facts["namespaces"].get(name) not in (None, os.readlink(f"/proc/self/ns/{name}"))
        ]
        if facts["seccomp"] == "2":
            held.append("seccomp filter")
        if facts["no_new_privs"] == "1":
            held.append("no new privileges")
        if int(facts["capabilities"], 16) == 0 and int(facts["bounding"], 16) == 0:
            held.append("no capabilities")
        return tuple(held)

    async def _living_zygote(self) -> ZygoteProcess:
        async with self._starting:
            if self._zygote is not None and self._zygote.alive:
                return self._zygote
            if self._zygote is not None:
                self.zygote_restarts += 1
                await self._stop_zygote()
            group = BoxesGroup(memory_bytes=self._total_bytes, max_tasks=_MAX_TASKS)
            zygote = ZygoteProcess(find_bwrap(), find_python())
            try:
                await zygote.start(_START_S)
                group.add(zygote.inner_pid)
            except BaseException:
                await zygote.stop()
                group.remove()
                raise
            self._zygote, self._group = zygote, group
            return zygote

    async def _stop_zygote(self) -> None:
        if self._zygote is not None:
            await self._zygote.stop()
            self._zygote = None
        if self._group is not None:
            self._group.remove()
            self._group = None

    async def _take_idle(self, limits: SandboxLimits) -> SupervisedSandbox | None:
        if self._idle_limits != limits:
            stale, self._idle = self._idle, deque()
            self._idle_limits = limits
            await asyncio.gather(*(box.close() for box in stale))
        while self._idle:
            box = self._idle.popleft()
            if not box.ended:
                return box
            await box.close()
        return None

    async def _fill_idle(self) -> None:
        """Fork boxes ahead of need; a failure here shows again where a box is asked for."""
        while not self._closed and len(self._idle) < self._idle_target:
            limits, zygote = self._idle_limits, self._zygote
            if limits is None or zygote is None:
                return
            try:
                box, _ = await self._open(zygote, limits, probe=False)
            except SandboxError:
                return
            if limits == self._idle_limits and not self._closed:
                self._idle.append(box)
            else:
                await box.close()

    async def _open(
        self, zygote: ZygoteProcess, limits: SandboxLimits, *, probe: bool
    ) -> tuple[SupervisedSandbox, dict[str, Any]]:
        box_id = next(self._ids)
        try:
            near, far = socket.socketpair()
        except OSError as error:
            raise SandboxError(
                f"no channel for a sandbox: {error}; each open one takes a file descriptor here, "
                "see `ulimit -n`"
            ) from None

        async def release() -> None:
            self._boxes.pop(box_id, None)

        box = SupervisedSandbox(
            SocketChannel(near),
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
