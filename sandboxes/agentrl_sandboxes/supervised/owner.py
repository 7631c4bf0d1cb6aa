"""Labels that say which process owns a thing of the system, so that another can clean up."""

from __future__ import annotations

import os
from pathlib import Path


def owner_label() -> str:
    """This process as `PID-START`; the start time tells it from a later one of the same id."""
    return f"{os.getpid()}-{start_time(os.getpid())}"


def owner_lives(label: str) -> bool:
    """Whether the process that a label (and whatever follows it) names is still there."""
    pid, _, rest = label.partition("-")
    start = rest.partition("-")[0]
    if not pid.isdigit() or not start.isdigit():
        return True  # not one of ours: leave it alone
    return start_time(int(pid)) == int(start)


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which a process started; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if fields[0] not in ("Z", "X") else None
