"""Counting what a box uses, from the process entries of its own /proc."""

from __future__ import annotations

import os

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def others() -> list[int]:
    """Pids of every process in this pid namespace but our own."""
    own = os.getpid()
    return [pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) != own]


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
