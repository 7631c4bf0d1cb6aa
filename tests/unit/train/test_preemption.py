"""SIGTERM reaches a run wherever it is, and it ends in time whatever it does."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentrl.train.preemption import going_on, resume_command, stop_on_sigterm

_PROGRAM = """
import asyncio, os, signal, sys, time
from agentrl.train.preemption import stop_on_sigterm

def term():
    os.kill(os.getpid(), signal.SIGTERM)

async def obedient():
    stop = asyncio.Event()
    with stop_on_sigterm(lambda why: stop.set(), grace_s=60, how_to_go_on=lambda: "go on"):
        term()
        await stop.wait()
    print("ended by itself")

async def deaf():  # the loop does not turn
    with stop_on_sigterm(lambda why: None, grace_s=0.2, how_to_go_on=lambda: "resume it like this"):
        term()
        time.sleep(60)

async def stubborn_at_its_end():
    with stop_on_sigterm(lambda why: None, grace_s=0.2, how_to_go_on=lambda: "resume it like this"):
        term()
    await asyncio.sleep(60)  # parts that do not close

async def noted_at_once():  # the loop does not turn
    asked = []
    with stop_on_sigterm(asked.append, grace_s=60, how_to_go_on=lambda: "go on", at_once=True):
        term()
        while not asked:
            time.sleep(0.01)
    print("ended by itself after", *asked)

async def told_twice():
    with stop_on_sigterm(lambda why: None, grace_s=60, how_to_go_on=lambda: "go on"):
        term()
        await asyncio.sleep(0)
        term()
        await asyncio.sleep(60)

asyncio.run(locals()[sys.argv[1]]())
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("case", "status", "says"),
    [
        ("obedient", 0, "ended by itself"),
        ("deaf", 75, "not ended within trainer.grace_s=0.2; resume it like this"),
        ("noted_at_once", 0, "ended by itself after SIGTERM"),
        ("stubborn_at_its_end", 75, "resume it like this"),
        ("told_twice", -signal.SIGTERM, ""),
    ],
)
def test_a_run_that_is_told_to_stop_ends(case: str, status: int, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, case], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == status, done.stderr
    assert says in done.stdout + done.stderr


def test_what_is_said_of_a_stopped_run_is_what_lies_there(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    command = resume_command(run)
    assert command == f"agentrl train --resume '{run}'"
    begun = run / "checkpoints"
    for name in ("", ".writing-step_000002"):  # none, and one that is not complete
        (begun / name).mkdir(parents=True)
        assert going_on(run, command) == (
            f"no checkpoint is saved yet, so it begins anew with {command}"
        )
    for name in ("step_000009", "step_000010"):
        (begun / name).mkdir()
    assert going_on(run, command) == f"the checkpoint of step 10 is saved; go on with {command}"


def test_the_handler_of_before_is_back_afterwards_and_other_threads_have_none() -> None:
    async def run() -> object:
        with stop_on_sigterm(lambda why: None, grace_s=60, how_to_go_on=str):
            return signal.getsignal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    assert asyncio.run(run()) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(run())))
    thread.start()
    thread.join(timeout=30)
    assert found == [before]
