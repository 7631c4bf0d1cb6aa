"""The bubblewrap backend: one zygote, and a fork of it per box."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from dataclasses import asdict
from typing import Any

from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.sandbox.base import SandboxLimits, SandboxReport, SandboxStatus
from agentrl_sandboxes.local.cgroup import BoxesGroup, sweep_groups
from agentrl_sandboxes.local.launcher import ZygoteProcess, find_bwrap, find_python
from agentrl_sandboxes.supervised.box import SupervisedSandbox
from agentrl_sandboxes.supervised.channel import SocketChannel
from agentrl_sandboxes.supervised.idle import IdleBoxes
from agentrl_sandboxes.supervised.limits import check_counts, check_limits

_START_S = 20.0
_CREATE_S = 10.0
_LEAST_TOTAL_MB = 64
_MAX_TASKS = 16_384
# Beside the memory of its programs, a group counts files (twice the disk) and our own processes.
_OWN_MEMORY_MB = 32
# The kernel's limit stands above the watched one, like that per user in `inside/children`.
_TASK_FACTOR, _OWN_TASKS = 2, 8
_NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")


class LocalBackend:
    """Sandboxes in namespaces of this machine, by bubblewrap. Needs no rights of its own.

    Args:
        idle_boxes: boxes kept forked in advance for each of the sets of limits asked for last;
            each is used once, like any other.
        total_memory_mb: memory of all boxes together, enforced where a control group can be
            made; half of the machine's if None.
    """

    def __init__(self, *, idle_boxes: int = 4, total_memory_mb: int | None = None) -> None:
        check_counts(0, idle_boxes=idle_boxes)
        if total_memory_mb is not None:
            check_counts(_LEAST_TOTAL_MB, total_memory_mb=total_memory_mb)
        machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        half = machine_bytes // 2
        self._total_bytes = half if total_memory_mb is None else total_memory_mb << 20
        self._idle = IdleBoxes(self._open_ahead, idle_boxes)
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
        """Clean up after dead owners, start the zygote, read back from a box what holds there."""
        sweep_groups()
        zygote = await self._living_zygote()
        try:
            box, self._facts = await self._open(zygote, SandboxLimits(), probe=True)
        except SandboxError as error:
            await self._stop_zygote()
            raise SandboxUnavailable(
                f"the local sandbox cannot work here: {error} ({zygote.last_words()})"
            ) from None
        await box.close()

    async def create(self, limits: SandboxLimits) -> SupervisedSandbox:
        """Return a fresh box; starts another zygote if the last one died."""
        check_limits(limits)
        zygote = await self._living_zygote()
        box = self._idle.take(limits)
        if box is None:
            box, _ = await self._open(zygote, limits, probe=False)
        return box

    async def close(self) -> None:
        """Close every box, then the zygote."""
        self._closed = True
        await self._idle.close()
        await asyncio.gather(*(box.close() for box in list(self._boxes.values())))
        async with self._starting:  # one that is just being started is stopped, too
            await self._stop_zygote()

    def report(self) -> SandboxReport:
        """What the first box read back about itself, and what bounds each resource."""
        if not self._facts:
            raise SandboxError("the report is read back from a box: start the backend first")
        group = self._group.enforced() if self._group else {}
        per_box = self._group.enforced_per_box() if self._group else {}
        limits = {
            "wall": "supervisor: interrupt, then kill",
            "cpu": "RLIMIT_CPU per process",
            "memory": "summed by the supervisor; RLIMIT_AS per process; "
            f"each box: {per_box.get('memory', 'no control group')}; "
            f"all boxes: {group.get('memory', 'not bounded')}",
            "processes": "counted by the supervisor; RLIMIT_NPROC per box; "
            f"each box: {per_box.get('pids', 'no control group')}; "
            f"all boxes: {group.get('pids', 'not bounded')}",
            "disk": "tmpfs size: " + self._facts["mounts"].get("/box", ["", "not mounted"])[1],
            "output": "supervisor: truncate, then kill",
        }
        warned = []
        if "memory" not in group:
            warned.append(
                "no memory control group can be made here: the memory of a box is bounded by "
                "counting every 50 ms, and that of all boxes together is not"
            )
        elif "memory" not in per_box:
            warned.append(
                "no memory control group per box can be made here: the memory of a box is bounded "
                "by counting every 50 ms"
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
            if self._closed:
                raise SandboxError("the sandbox backend is closed")
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

    async def _open_ahead(self, limits: SandboxLimits) -> SupervisedSandbox:
        zygote = self._zygote
        if zygote is None or self._closed:
            raise SandboxError("the sandbox backend is closed")
        box, _ = await self._open(zygote, limits, probe=False)
        return box

    async def _open(
        self, zygote: ZygoteProcess, limits: SandboxLimits, *, probe: bool
    ) -> tuple[SupervisedSandbox, dict[str, Any]]:
        box_id, groups = next(self._ids), self._group
        near, far = _make_channel()
        group = None

        async def release() -> None:
            self._boxes.pop(box_id, None)
            if groups is not None and group is not None:
                groups.return_box_group(group)

        async def look_into_death() -> tuple[SandboxStatus, str]:
            if group is not None and group.oom_kills():
                reason = f"Memory limit of {limits.memory_mb} MB exceeded; the sandbox is gone."
                return SandboxStatus.OOM, reason
            return SandboxStatus.SANDBOX_DEAD, "The sandbox died during this call."

        box = SupervisedSandbox(
            SocketChannel(near),
            limits,
            kill=lambda: zygote.kill_box(box_id),
            release=release,
            has_witness=True,
            autopsy=look_into_death,
        )
        self._boxes[box_id] = box
        message = {"op": "create", "id": box_id, "limits": asdict(limits), "probe": probe}
        fds: list[int] = []
        try:
            if groups is not None:
                group = groups.make_box_group(box_id, _group_limits(limits))
                fds, events_fd = group.open_files()
                message |= {"joins": len(fds), "events": events_fd is not None}
                fds += [] if events_fd is None else [events_fd]
            await zygote.send(message, [far.fileno(), *fds], _CREATE_S)
            far.close()
            facts = await box.hello(_CREATE_S)
        except BaseException as error:
            far.close()
            await box.close()
            if isinstance(error, OSError):
                raise SandboxError(f"no control group for a sandbox: {error}") from None
            raise
        finally:
            for fd in fds:
                os.close(fd)
        return box, facts


def _make_channel() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        raise SandboxError(
            f"no channel for a sandbox: {error}; each open one takes a file descriptor here, "
            "see `ulimit -n`"
        ) from None


def _group_limits(limits: SandboxLimits) -> dict[str, int]:
    """Limits of a box's control group by controller."""
    return {
        "memory": (limits.memory_mb + 2 * limits.disk_mb + _OWN_MEMORY_MB) << 20,
        "pids": _TASK_FACTOR * limits.max_processes + _OWN_TASKS,
    }
