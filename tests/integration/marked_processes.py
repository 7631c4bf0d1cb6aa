"""Finds every process that a test has started, however deep: each inherits a mark."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

MARK = "AGENTRL_TEST_MARK"
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Where a driver is killed, these try for up to a minute to tell its dead cluster, then end."""


def marked(value: str, title: str = "") -> list[int]:
    """Pids of the living processes with the mark, other than this one.

    Args:
        title: what their command line begins with; Ray writes an actor's class there.
    """
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if f"{MARK}={value}".encode() in environment and state != "Z" and title in command:
            found.append(int(folder.name))
    return sorted(found)


def kill_one(value: str, title: str) -> None:
    """Kill a process with the mark whose command line begins with ``title``."""
    pids = marked(value, title)
    assert pids, f"no process {title} to kill"
    os.kill(pids[0], signal.SIGKILL)


def wait_until_gone(value: str, timeout_s: float, but: tuple[str, ...] = ()) -> str:
    """Wait for the marked processes to end; returns the command lines of those that have not.

    Args:
        but: what the command lines of processes begin with that may stay.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        lines = [line for pid in marked(value) if not (line := _command(pid)).startswith(but)]
        if not any(lines) or time.monotonic() > deadline:
            return "\n".join(lines)
        time.sleep(0.2)


def _command(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""  # it has just ended
    return text.replace(b"\0", b" ").decode(errors="replace").strip()[:200]
