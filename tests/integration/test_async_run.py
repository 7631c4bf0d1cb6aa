"""Runs in which sampling goes on while the policy is trained: bounds, exact resume, learning."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marked_processes import kill_one
from uneven_env import NUM_TASKS

from agentrl.config.load import load
from agentrl.launch import open_trainer
from agentrl.rollout.engines.hf_scheduler import Scheduler
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.trajectory_io import read_trajectories
from agentrl.train.trainer import Trainer
from agentrl.types import StopReason, Trajectory

SOAK = os.environ.get("AGENTRL_SOAK") == "1"
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.timeout(7200 if SOAK else 300),
]

HERE = Path(__file__).parent
UNEVEN = f"env.id={HERE / 'uneven_env.py'}:Uneven"
DECOUPLED = ["algo.old_logprobs=recompute", "algo.correction.weight=token"]
SMALL = [
    UNEVEN,
    "model.warm_start.steps=60",
    "trainer.prompts_per_step=3",
    "trainer.num_threads=1",
    "trainer.epochs=2",
    "trainer.eval_every=0",
    "rollout.n=2",
    "actor.lr=1e-4",
    "eval.val_tasks=2",
    "eval.test_tasks=2",
    "telemetry={trackers: [], report: false, quiet: true}",
]
NUM_STEPS = 2 * NUM_TASKS // 3


def train(
    run: Path, *settings: str, during: Callable[[Trainer], None] = lambda trainer: None
) -> list[dict[str, Any]]:
    """Train in this process; returns the lines of metrics of its steps."""
    config = load([*settings, f"trainer.run_dir={run}"])

    async def main() -> None:
        async with asyncio.timeout(1200 if SOAK else 280), open_trainer(config) as trainer:
            during(trainer)
            await trainer.fit()

    asyncio.run(main())
    lines = [json.loads(line) for line in RunDir(run).metrics_path.open()]
    return [line for line in lines if line["step"] > 0]


def steps_of(run: Path) -> list[list[Trajectory]]:
    """Return what was played for each step."""
    folder = run / "trajectories"
    return [read_trajectories(path) for path in sorted(folder.glob("step_*.jsonl"))]


def trained_tasks(run: Path) -> Counter[str]:
    """Count the groups that steps were made of, by task."""
    groups = Counter[str]()
    for trajectories in steps_of(run):
        found = {t.group_id: t for t in trajectories if t.stop_reason is not StopReason.CUT}
        groups.update(trajectory.task.id for trajectory in found.values())
    return groups


def assert_within(run: Path, max_staleness: int) -> int:
    """Check every sampled token of every step; returns the largest lag that there was."""
    largest = 0
    for version, trajectories in enumerate(steps_of(run)):
        for segment in (segment for t in trajectories for segment in t.segments):
            sampled = segment.policy_version[segment.loss_mask]
            assert sampled.max() <= version, "sampled by a policy that was not there yet"
            largest = max(largest, version - int(sampled.min()))
    assert largest <= max_staleness
    return largest


# ---------------------------------------------------------------- in one process


@pytest.mark.parametrize(("max_staleness", "window"), [(1, 0), (2, 4)])
def test_every_task_is_trained_once_an_epoch_within_the_bound(
    tmp_path: Path, max_staleness: int, window: int
) -> None:
    ahead = [f"rollout.max_staleness={max_staleness}", f"rollout.window={window}"]
    lines = train(tmp_path / "run", *SMALL, *DECOUPLED, *ahead)
    assert len(lines) == NUM_STEPS
    assert set(trained_tasks(tmp_path / "run").values()) == {2}
    assert assert_within(tmp_path / "run", max_staleness) > 0, "nothing was sampled ahead"
    assert all(line["staleness/max"] <= max_staleness for line in lines)


def test_episodes_go_on_while_the_driver_computes(tmp_path: Path) -> None:
    finished_before: list[int] = []

    def watch(trainer: Trainer) -> None:
        assemble, line = trainer.assemble, lambda: trainer.buffer.line
        loop = asyncio.get_running_loop()

        async def every_group_has_finished() -> None:
            while any(slot.group is None for slot in line()):
                await asyncio.sleep(0.01)

        def assemble_when_the_others_have_finished(groups: Any) -> Any:
            if not finished_before:  # waits for ever where the event loop waits for this
                finished_before.append(sum(slot.group is not None for slot in line()))
                waiting = asyncio.run_coroutine_threadsafe(every_group_has_finished(), loop)
                waiting.result(timeout=120)
            return assemble(groups)

        trainer.assemble = assemble_when_the_others_have_finished

    ahead = ["rollout.max_staleness=2", "rollout.window=6", "env.kwargs.slow_s=1.0"]
    train(tmp_path / "run", *SMALL, *DECOUPLED, *ahead, "trainer.epochs=1", during=watch)
    assert finished_before[0] < 6, "nothing was left to finish"


def test_new_weights_interrupt_turns_which_go_on_under_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, collect, advance = Scheduler.step, Trainer.collect, Trainer.advance
    made: list[None] = []
    held = threading.Event()

    def held_step(scheduler: Scheduler) -> Any:
        time.sleep(0.02)
        if held.is_set():
            return []
        made.append(None)
        return step(scheduler)

    # A batch is complete: what has begun by then gets a few tokens, and no more until the new
    # weights come, however long this machine takes over the update.
    async def collect_and_hold(trainer: Trainer) -> Any:
        groups, enough = await collect(trainer), len(made) + 5
        with contextlib.suppress(TimeoutError):  # nothing has begun
            async with asyncio.timeout(3):
                while len(made) < enough:
                    await asyncio.sleep(0.01)
        held.set()
        return groups

    async def go_on_and_advance(trainer: Trainer) -> Any:
        held.clear()
        return await advance(trainer)

    monkeypatch.setattr(Scheduler, "step", held_step)
    monkeypatch.setattr(Trainer, "collect", collect_and_hold)
    monkeypatch.setattr(Trainer, "advance", go_on_and_advance)
    run = tmp_path / "run"
    longer = ["env.id=calculator", "trainer.epochs=null", "trainer.total_steps=4"]
    train(run, *SMALL, *longer, *DECOUPLED, "rollout.max_staleness=1")
    mixed = 0
    for trajectory in (t for step in steps_of(run) for t in step):
        assert not trajectory.failed, "a turn was cut short"
        for turn in trajectory.turns:
            versions = trajectory.segments[turn.segment].policy_version[turn.start : turn.end]
            assert (np.diff(versions) >= 0).all()
            mixed += len(set(versions.tolist())) > 1
    assert mixed, "no turn was being generated when new weights came"
    assert_within(run, 1)


def test_stragglers_are_cut_counted_and_kept_as_data(tmp_path: Path) -> None:
    cut = ["rollout.stragglers=cut", "rollout.oversubscribe=2", "env.kwargs.slow_s=1.0"]
    lines = train(tmp_path / "run", *SMALL, *cut, "trainer.epochs=1")
    assert all(line["staleness/max"] == 0 for line in lines), "cut, and still on-policy"
    counted = sum(line.get("cut/groups", 0) for line in lines)
    ended = [t for step in steps_of(tmp_path / "run") for t in step if t.stop_reason == "cut"]
    assert counted and ended
    assert any(t.task.data["slow"] for t in ended)
    assert all(t.score is None for t in ended)
    tasks = {key.rpartition("/")[2] for line in lines for key in line if "cut/task" in key}
    assert tasks >= {t.task.id for t in ended}
    taken = trained_tasks(tmp_path / "run")
    assert len(lines) == NUM_STEPS // 2 and taken.total() - counted <= NUM_TASKS


# ---------------------------------------------------------------- kills


def test_a_driver_that_is_killed_trains_every_task_once_an_epoch(tmp_path: Path) -> None:
    num_kills = 50 if SOAK else 3
    ahead = ["rollout.max_staleness=2", "rollout.window=4", "trainer.save_every=1"]
    done = subprocess.run(
        [
            *(sys.executable, str(HERE / "killed_drivers.py"), str(tmp_path), str(num_kills)),
            *(*SMALL, *DECOUPLED, *ahead, "env.kwargs.slow_s=0.1"),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3600 if SOAK else 250,
        check=False,
    )
    kills = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kills) == num_kills, done.stderr[-4000:]
    for number, kill in enumerate(kills):
        run = tmp_path / str(number)
        assert kill["signal"] == 9 and kill["status"] == 0, done.stderr[-4000:]
        assert kill["resumed_from"] < NUM_STEPS, "it had ended before the kill"
        assert len(steps_of(run)) == NUM_STEPS
        trained = trained_tasks(run)
        assert len(trained) == NUM_TASKS and set(trained.values()) == {2}
        assert_within(run, 2)
    assert any(kill["finished_waiting"] for kill in kills), "no finished group was carried over"


def test_a_rollout_worker_that_is_killed_costs_no_task(tmp_path: Path, cluster: str) -> None:
    kills: list[int] = []

    def kill_in_step_3(trainer: Trainer) -> None:
        update = trainer.learner.update

        def update_and_kill(train_batch: Any, step: int) -> Any:
            if step == 2:
                kill_one(cluster, "ray::RolloutWorker")
                kills.append(step)
            return update(train_batch, step)

        trainer.learner.update = update_and_kill

    how = ["cluster=ray", "rollout.workers=2", "rollout.max_staleness=1", "rollout.window=3"]
    lines = train(tmp_path / "run", *SMALL, *DECOUPLED, *how, during=kill_in_step_3)
    assert kills == [2] and lines[-1]["cluster/rollout_worker_restarts"] == 1
    assert set(trained_tasks(tmp_path / "run").values()) == {2}
    assert assert_within(tmp_path / "run", 1) == 1


def test_vllm_in_a_pool_of_its_own_samples_ahead_of_training(tmp_path: Path, cluster: str) -> None:
    how = ["cluster=ray", "rollout=vllm", "rollout.max_staleness=1", "rollout.window=3"]
    lines = train(tmp_path / "run", *SMALL, *DECOUPLED, *how)
    assert len(lines) == NUM_STEPS
    assert set(trained_tasks(tmp_path / "run").values()) == {2}
    assert assert_within(tmp_path / "run", 1) == 1
    assert lines[0]["mismatch/logprob_abs_max"] < 1e-4, "sampled from other weights"
    assert all(line["weight_sync/checksum_ok"] == 1.0 for line in lines)


# ---------------------------------------------------------------- learning, in two pools


LEARNING = [
    "env.id=guess_number",
    "cluster=ray",  # the policy is trained in one process and sampled in others
    "rollout.workers=1",
    "model.warm_start.steps=200",
    "trainer.num_threads=1",
    "trainer.prompts_per_step=16",
    "trainer.eval_every=0",
    "rollout.n=8",
    "eval.val_tasks=6",
    "eval.test_tasks=0",
    "telemetry={trackers: [], report: false, quiet: true}",
]


def success(run: Path) -> list[float]:
    """Of the test split, before and after."""
    lines = map(json.loads, RunDir(run).metrics_path.open())
    key = "test/guess_number/success"
    return [line[key] for line in lines if key in line]


def learn(run: Path, max_staleness: int, *settings: str) -> float:
    """Train within the bound; returns the success at the end."""
    train(run, *LEARNING, *settings, *DECOUPLED, f"rollout.max_staleness={max_staleness}")
    assert_within(run, max_staleness)
    return success(run)[-1]


def test_a_run_far_ahead_of_its_updates_learns(tmp_path: Path, cluster: str) -> None:
    run = tmp_path / "run"
    after = learn(run, 4, "trainer.total_steps=8", "eval.test_tasks=64")
    assert after - success(run)[0] >= 0.1
    assert assert_within(run, 4) == 4


@pytest.mark.skipif(not SOAK, reason="nine runs of minutes each: AGENTRL_SOAK=1")
def test_samples_of_older_policies_do_not_harm_learning(tmp_path: Path, cluster: str) -> None:
    found: dict[int, list[float]] = {0: [], 1: [], 4: []}
    for seed in range(3):
        for max_staleness, after in found.items():
            how = [f"trainer.seed={seed}", "trainer.total_steps=80", "trainer.prompts_per_step=32"]
            after.append(learn(tmp_path / f"{max_staleness}-{seed}", max_staleness, *how))
    t_975 = 4.303  # Student's, two degrees of freedom
    for max_staleness in (1, 4):
        lost = [x - y for x, y in zip(found[max_staleness], found[0], strict=True)]
        half_width = t_975 * statistics.stdev(lost) / math.sqrt(3)
        assert statistics.mean(lost) - half_width > -0.08, found
