"""What a sandbox may leave behind on its host, as a listing that can be compared."""

from __future__ import annotations

import asyncio
import collections
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox_arms import StartedBackend

_SAME_FOR = 20
_BOX_USERS = (1000, 65534)
_PLAIN_FOLDER = re.compile(r"agentrl-unsafe-(\d+)-")
# Of container engines, also of those of other tests; a container that is left shows as such.
_ENGINE_MOUNT = re.compile(r"overlay|nsfs|docker|containerd|/run/ag")


@dataclass(slots=True, kw_only=True)
class HostState:
    """Everything around this process in which something of a box could remain."""

    descriptors: dict[str, int]
    """How many of each kind this process has open."""
    processes: int
    """Below this process, without those that have ended."""
    mounts: list[str]
    groups: dict[str, int]
    """Control groups of backends, and how many below them hold a process."""
    scratch: list[str]
    """Entries of the temporary folder that are ours or a box's."""
    containers: int
    """Of this process, without those that its backend holds in reserve."""

    def differences(self, other: HostState) -> dict[str, tuple[object, object]]:
        """What is not the same, by field."""
        names = (f.name for f in fields(self))
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def list_host(arm: StartedBackend) -> HostState:
    """List the host as it is now, for a backend that runs."""
    state = list_local()
    state.containers = _containers(arm)
    return state


def list_local() -> HostState:
    """List the host as it is now, without containers."""
    processes = descendants()
    ours = {os.getpid(), *(pid for pid, _ in processes)}
    scratch = Path(tempfile.gettempdir())
    return HostState(
        descriptors=_descriptors(),
        processes=len(processes),
        mounts=list_mounts(),
        groups=_groups(ours),
        scratch=sorted(entry.name for entry in os.scandir(scratch) if _is_left(entry, ours)),
        containers=0,
    )


def list_mounts() -> list[str]:
    """The mounts of this process's namespace but those of container engines."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return sorted(line for line in lines if not _ENGINE_MOUNT.search(line))


async def settled(list_now: Callable[[], HostState], deadline_s: float = 60.0) -> HostState:
    """Return the listing once it no longer changes: boxes held in reserve are made meanwhile."""
    async with asyncio.timeout(deadline_s):
        last, same = list_now(), 0
        while same < _SAME_FOR:
            await asyncio.sleep(0.1)
            now = list_now()
            last, same = now, same + 1 if now == last else 0
        return last


async def restored(
    list_now: Callable[[], HostState], before: HostState, deadline_s: float = 20.0
) -> dict[str, tuple[object, object]]:
    """Wait until the host is as before; return what still differs at the deadline."""
    end = asyncio.get_running_loop().time() + deadline_s
    while True:
        found = before.differences(list_now())
        if not found or asyncio.get_running_loop().time() > end:
            return found
        await asyncio.sleep(0.05)


def descendants() -> set[tuple[int, str]]:
    """(pid, start time) of every living process below this one."""
    parent_of: dict[int, int] = {}
    start_of: dict[int, str] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) and stat[0] not in ("Z", "X"):
            parent_of[int(name)], start_of[int(name)] = int(stat[1]), stat[19]
    found: set[int] = {os.getpid()}
    grew = True
    while grew:
        more = {pid for pid, parent in parent_of.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return {(pid, start_of[pid]) for pid in found if pid != os.getpid()}


def alive(processes: set[tuple[int, str]]) -> set[int]:
    """Which of these processes still run."""
    return {
        pid
        for pid, start in processes
        if (stat := _stat(pid)) and stat[19] == start and stat[0] not in ("Z", "X")
    }


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _descriptors() -> dict[str, int]:
    kinds: collections.Counter[str] = collections.Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if not target.startswith("/proc/"):
            kinds[target.split(":")[0]] += 1
    return dict(kinds)


def _groups(owners: set[int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for folder in Path("/sys/fs/cgroup").glob("*/agentrl-boxes-*"):
        owner = folder.name.removeprefix("agentrl-boxes-").partition("-")[0]
        if owner.isdigit() and int(owner) in owners:
            busy = [inner for inner in folder.glob("box-*") if _has_members(inner)]
            found[str(folder)] = len(busy)
    return found


def _has_members(folder: Path) -> bool:
    try:
        return bool((folder / "cgroup.procs").read_text())
    except OSError:
        return False


def _is_left(entry: os.DirEntry[str], owners: set[int]) -> bool:
    """Whether an entry is a box's user's, or the folder of a box that one of the owners made.

    Folders of other owners come and go with the tests that run beside these.
    """
    try:
        user = entry.stat(follow_symlinks=False).st_uid
    except OSError:
        return False
    made_by = _PLAIN_FOLDER.match(entry.name)
    return user in _BOX_USERS or (made_by is not None and int(made_by[1]) in owners)


def _containers(arm: StartedBackend) -> int:
    if arm.name != "docker":
        return 0
    backend: Any = arm.backend
    found = backend._fleet.engine._client.containers(
        all=True, filters={"label": f"agentrl.owner.pid={os.getpid()}"}
    )
    # The reserve is filled when the engine gets to it, which says nothing of what is left behind.
    reserve = {id(box) for kind in backend._idle._kinds.values() for box in kind.boxes}
    ready = {
        f"/{entry.name}"
        for entry in backend._fleet._containers.values()
        if entry.box is None or id(entry.box) in reserve
    }
    return sum(not ready & set(container["Names"]) for container in found)
