"""Counting what a box uses, from the process entries of its own /proc."""

from __future__ import annotations

import os

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_OOM_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


class OomKills:
    """Counts processes that the kernel killed for the memory limit of our own control group.

    Where the box has no control group of its own, it counts none.

    Args:
        watch: False where the group that could be seen is not the box's.
        events_fd: the group's file of events, where the host handed it over; else it is looked
            for where a container sees its own.
    """

    def __init__(self, *, watch: bool, events_fd: int | None = None) -> None:
        self._fd = -1 if events_fd is None else events_fd
        for path in _OOM_EVENTS if watch and events_fd is None else ():
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                break
            except OSError:
                continue
        self._seen = self._count()

    def grew(self) -> bool:
        """Whether there were any since the last call."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        if self._fd < 0:
            return 0
        for line in os.pread(self._fd, 4096, 0).splitlines():
            name, _, value = line.partition(b" ")
            if name == b"oom_kill":
                return int(value)
        return 0


def others() -> list[int]:
    """Pids of every process in this pid namespace but our own."""
    own = os.getpid()
    return [pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) != own]


def count_threads(pid: int) -> int:
    """Threads of one process; 0 if it ended. Far cheaper than reading its status."""
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    except OSError:
        return 0


def count_tasks(pids: list[int]) -> int:
    """Threads of these processes, together; one that has just ended counts 0."""
    total = 0
    for pid in pids:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        total += int(fields[17]) if len(fields) > 17 and fields[0] != b"Z" else 0
    return total


def memory_bytes(pids: list[int], limit_bytes: int) -> int:
    """Anonymous memory of these processes; pages they share are counted once.

    The exact number walks page tables, so it is taken only where the cheap upper bound (resident
    pages that no file backs) exceeds the limit.
    """
    bound = 0
    for pid in pids:
        fields = _read(f"/proc/{pid}/statm").split()
        if len(fields) > 2:
            bound += int(fields[1]) * _PAGE_BYTES
    if bound <= limit_bytes:
        return bound
    return sum(_proportional_bytes(pid) for pid in pids)


def _proportional_bytes(pid: int) -> int:
    total = 0
    rollup = _read(f"/proc/{pid}/smaps_rollup")
    for line in rollup.splitlines():
        if line.startswith((b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:")):
            total += int(line.split()[1]) * 1024
    if not rollup:  # it made itself unreadable: take what it holds in full
        fields = _read(f"/proc/{pid}/statm").split()
        total = int(fields[1]) * _PAGE_BYTES if len(fields) > 1 else 0
    return total


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(65536) or b""
    except OSError:
        return b""  # it ended meanwhile
