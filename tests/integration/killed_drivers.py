"""Runs that are killed and resumed, each in a process of its own that has imported all it needs.

python killed_drivers.py FOLDER NUM_KILLS OVERRIDE ...

Every run is killed with signal 9 at a point chosen by chance and resumed to its end. Prints a JSON
line a run: the signal that ended it, the step of its last checkpoint, and how many finished groups
waited in that.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from agentrl.config.load import load
from agentrl.launch import open_trainer
from agentrl.resuming import resumed_config
from agentrl.train.manifest import step_of

DEADLINE_S = 120.0


def train(run: Path, overrides: list[str], *, resume: bool) -> None:
    config = (
        resumed_config(str(run), [])
        if resume
        else load([*overrides, f"trainer.run_dir={run}", f"trainer.seed={run.name}"])
    )

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), open_trainer(config) as trainer:
            await trainer.fit()

    asyncio.run(main())


def child(work: Callable[[], None]) -> int:
    """Begin ``work`` in a process of its own; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def num_lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def last_checkpoint(run: Path) -> tuple[int, int]:
    """Its step, 0 where there is none, and the finished groups that wait in it."""
    folder = run / "checkpoints"
    steps = [step for path in folder.glob("step_*") if (step := step_of(path.name)) is not None]
    if not steps:
        return 0, 0
    line = folder / f"step_{max(steps):06d}" / "waiting" / "line.json"
    places = json.loads(line.read_bytes()) if line.exists() else []
    return max(steps), sum(place["group"] is not None for place in places)


def kill_and_resume(run: Path, overrides: list[str], rng: random.Random) -> dict[str, int]:
    victim = child(lambda: train(run, overrides, resume=False))
    lines, deadline = rng.randint(2, 6), time.monotonic() + DEADLINE_S
    while num_lines(run) < lines and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(rng.uniform(0.0, 0.3))
    os.kill(victim, signal.SIGKILL)
    _, status = os.waitpid(victim, 0)
    step, finished = last_checkpoint(run)
    _, ended = os.waitpid(child(lambda: train(run, overrides, resume=True)), 0)
    return {
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "resumed_from": step,
        "finished_waiting": finished,
        "status": os.waitstatus_to_exitcode(ended),
    }


if __name__ == "__main__":
    work, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random()
    for number in range(kills):
        print(json.dumps(kill_and_resume(work / str(number), sys.argv[3:], chance)), flush=True)
