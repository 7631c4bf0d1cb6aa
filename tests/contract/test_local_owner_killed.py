"""The process that owns the sandboxes is killed: nothing of them outlives the next start."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
from agentrl_sandboxes.local import LocalBackend, UnsafeBackend
from agentrl_sandboxes.local.cgroup import BoxesGroup, sweep_groups
from agentrl_sandboxes.supervised.owner import owner_label, owner_lives
from host_state import alive, descendants, list_local
from sandbox_arms import cannot_run

from agentrl.sandbox.base import SandboxLimits

KILLS = 50 if os.environ.get("AGENTRL_SOAK") == "1" else 5

_OWNER = """
import asyncio, sys, warnings
from agentrl.sandbox.base import SandboxLimits
from agentrl_sandboxes.local import LocalBackend, UnsafeBackend

DAEMON = '''
import os, signal, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True: time.sleep(1)
'''

async def main():
    warnings.simplefilter("ignore")
    local, plain = LocalBackend(), UnsafeBackend()
    for backend in (local, plain):
        await backend.start()
    box, unsafe = await local.create(SandboxLimits()), await plain.create(SandboxLimits())
    await box.run_code(DAEMON)
    await unsafe.write("file", b"left behind")
    running = [asyncio.create_task(b.run_code("while True: pass", timeout_s=900))
               for b in (box, unsafe)]
    print("running", flush=True)
    while True:
        fresh = await local.create(SandboxLimits())
        await fresh.run_code("1")
        await fresh.close()

asyncio.run(main())
"""


def _left_in_system(owner: int) -> list[str]:
    groups = Path("/sys/fs/cgroup").glob(f"*/agentrl-boxes-{owner}-*")
    folders = Path(tempfile.gettempdir()).glob(f"agentrl-unsafe-{owner}-*")
    return [str(path) for path in (*groups, *folders)]


async def _start_anew() -> str | None:
    for backend in (UnsafeBackend(), LocalBackend()):
        await backend.start()
        box = await backend.create(SandboxLimits())
        result = await box.run_code("6 * 7")
        await backend.close()
    return result.result


@pytest.mark.timeout(60 + 20 * KILLS)
def test_nothing_of_a_killed_owner_outlives_the_next_start():
    rng, before = random.Random(0), list_local()
    for _ in range(KILLS):
        others = descendants()  # of tests before this one, such as a server that a process keeps
        owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE)
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"running\n"
        time.sleep(rng.uniform(0, 0.2))
        processes = {one for one in descendants() - others if one[0] != owner.pid}
        assert len(processes) >= 6, "zygote, supervisors, interpreters"
        owner.kill()
        owner.wait()
        owner.stdout.close()
        assert _left_in_system(owner.pid), "the kill left something to clean up"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert asyncio.run(_start_anew()) == "42"
        assert _left_in_system(owner.pid) == []
        end = time.monotonic() + 10
        while alive(processes) and time.monotonic() < end:
            time.sleep(0.02)
        assert not alive(processes)
    assert list_local() == before


def test_a_group_whose_owner_is_gone_is_emptied_and_removed_and_others_stay():
    mine = BoxesGroup(memory_bytes=1 << 30, max_tasks=100)
    if not mine.enforced():
        mine.remove()
        cannot_run("this", "no control group can be made")
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        mine.add(sleeper.pid)
        folder = next(place.folder for place in mine._places)
        # As if made by a process of our id that started at another time.
        pid, start, namespace = owner_label().split("-")
        dead = folder.with_name(f"agentrl-boxes-{pid}-{int(start) + 1}-{namespace}-1")
        dead.mkdir()
        (dead / "cgroup.procs").write_text(str(sleeper.pid))
        sweep_groups()
        assert not dead.exists() and folder.exists()
        assert sleeper.wait(10) == -9
    finally:
        sleeper.kill()
        sleeper.wait()
        mine.remove()
    assert not folder.exists()


def test_an_owner_is_told_from_a_later_process_of_the_same_id():
    label = owner_label()
    pid, start, namespace = label.split("-")
    assert owner_lives(label) and owner_lives(f"{label}-and-more")
    assert not owner_lives(f"{pid}-{int(start) + 1}-{namespace}-1")
    ended = subprocess.Popen(["true"])
    assert not owner_lives(f"{ended.pid}-1-{namespace}")
    ended.wait()
    # What is not ours, or cannot be seen from here, is left alone.
    assert owner_lives("nobody-of-ours") and owner_lives(f"{pid}-{int(start) + 1}-7")
