"""A vLLM engine is killed in the middle of a run, which goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.load import load
from agentrl.launch import open_trainer
from agentrl.rollout.engines import vllm
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.trajectory_io import read_trajectories

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]
NUM_KILLS = 5 if os.environ.get("AGENTRL_SOAK") else 1
NUM_STEPS, PROMPTS, SAMPLES = 3 + NUM_KILLS, 4, 4
SETTINGS = [
    "env.id=guess_number",
    "rollout=vllm",
    "rollout.serving.restart_pause_s=0",
    f"rollout.n={SAMPLES}",
    "model.warm_start.steps=60",
    f"trainer.total_steps={NUM_STEPS}",
    f"trainer.prompts_per_step={PROMPTS}",
    "trainer.num_threads=1",
    "trainer.eval_every=0",
    "actor.lr=3e-3",  # weights of an earlier version would show at once
    "eval.val_tasks=1",
    "eval.test_tasks=1",
    "telemetry={trackers: [], report: false, quiet: true}",
]


async def kill_in_mid_sentence(engines: list[Any], *, from_version: int) -> int:
    """Kill the newest engine while it works at turns; returns at how many."""
    while True:
        await asyncio.sleep(0.001)
        engine = engines[-1]
        if engine.policy_version < from_version or not engine.num_unfinished:
            continue
        os.kill(engine.pid, signal.SIGSTOP)
        await asyncio.sleep(0.2)  # what it had sent is here by now
        if unfinished := engine.num_unfinished:
            os.kill(engine.pid, signal.SIGKILL)
            return unfinished
        os.kill(engine.pid, signal.SIGCONT)


def test_a_run_whose_engine_is_killed_trains_every_task_once_on_current_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Any] = []
    start = vllm.VLLMEngine.start

    async def remembered(engine: Any) -> None:
        await start(engine)
        engines.append(engine)

    monkeypatch.setattr(vllm.VLLMEngine, "start", remembered)
    killed_with: list[int] = []

    async def kill_often() -> None:
        for version in range(2, 2 + NUM_KILLS):
            killed_with.append(await kill_in_mid_sentence(engines, from_version=version))

    async def run() -> None:
        config = load([*SETTINGS, f"trainer.run_dir={tmp_path / 'run'}"])
        async with open_trainer(config) as trainer:
            killing = asyncio.create_task(kill_often())
            try:
                await trainer.fit()
            finally:
                killing.cancel()
                await asyncio.gather(killing, return_exceptions=True)

    asyncio.run(run())
    assert len(killed_with) == NUM_KILLS and min(killed_with) > 0, "the fault never fired"
    lines = [json.loads(line) for line in RunDir(tmp_path / "run").metrics_path.open()]
    assert lines[-1]["serving/restarts"] == NUM_KILLS and len(engines) == 1 + NUM_KILLS
    assert lines[-1]["serving/replays"] == sum(killed_with)

    steps = [line for line in lines if line.get("step", 0) > 0]
    assert len(steps) == NUM_STEPS
    for line in steps:
        assert line["staleness/max"] == 0
        assert line["mismatch/logprob_abs_max"] < 1e-4, "sampled with other weights than trained"
    trained = Counter[str]()
    for path in sorted((tmp_path / "run" / "trajectories").glob("step_*.jsonl")):
        if path.name == "step_000000.jsonl":
            continue
        found = list(read_trajectories(path))
        assert not [trajectory.error for trajectory in found if trajectory.failed]
        trained.update(trajectory.task.id for trajectory in found)
    assert len(trained) == NUM_STEPS * PROMPTS and set(trained.values()) == {SAMPLES}
