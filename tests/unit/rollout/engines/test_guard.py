"""Programs end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from agentrl.rollout.engines.guard import GroupGuard

_OWNER = """
import asyncio, sys
from agentrl.rollout.engines.sglang_server import ServerProcess

async def main():
    server = ServerProcess(["sh", "-c", "sleep 600 & sleep 600"], None)
    await server.start()
    print(server.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def members(group: int) -> list[psutil.Process]:
    """Return the processes of a group that are not just waiting to be reaped."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and os.getpgid(process.pid) == group:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


def wait_until_empty(group: int, timeout_s: float = 30.0) -> bool:
    """Return whether a group has ended in time."""
    end = time.monotonic() + timeout_s
    while members(group):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_and_its_children_end_with_a_killed_owner(how: signal.Signals) -> None:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    group = int(owner.stdout.readline())
    assert members(group)  # the witness that there was something to end
    owner.send_signal(how)
    owner.wait(30.0)
    owner.stdout.close()
    assert wait_until_empty(group)


def test_a_guard_that_was_dismissed_leaves_the_group_alone() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        guard = GroupGuard(other.pid)
        guard.dismiss()
        guard.dismiss()
        assert not psutil.pid_exists(guard.pid)
        assert other.poll() is None
        other.kill()
