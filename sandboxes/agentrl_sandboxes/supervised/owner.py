"""Labels that say which process owns a thing of the system, so that another can clean up."""

from __future__ import annotations

import os
from pathlib import Path


def owner_label() -> str:
    """This process as `PID-START-NAMESPACE`.

    The start time tells it from a later process of the same id, and the pid namespace from one of
    another container that shares this place.
    """
    return f"{os.getpid()}-{start_time(os.getpid())}-{_pid_namespace()}"


def owner_lives(label: str) -> bool:
    """Whether the process that a label (and whatever follows it) names is, or may be, there."""
    parts = label.split("-")[:3]
    if len(parts) < 3 or not all(part.isdigit() for part in parts):
        return True  # not one of ours: leave it alone
    pid, start, namespace = (int(part) for part in parts)
    return namespace != _pid_namespace() or start_time(pid) == start


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which a process started; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if fields[0] not in ("Z", "X") else None


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
