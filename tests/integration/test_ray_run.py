"""The same run on a real Ray cluster of this machine: CPUs, gloo, processes that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marked_processes import MARK, RAYS_OWN, kill_one, marked, wait_until_gone

from agentrl.config.load import load
from agentrl.errors import WorkerLost
from agentrl.launch import open_trainer
from agentrl.resuming import resumed_config
from agentrl.telemetry.run_dir import RunDir
from agentrl.train.open_model import open_run_model
from agentrl.train.trainer import Trainer

SOAK = os.environ.get("AGENTRL_SOAK") == "1"
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.timeout(3600 if SOAK else 300),
]

QUIET = "telemetry={trackers: [], report: false, quiet: true}"
SMALL = [
    "env.id=guess_number",
    "model.warm_start.steps=200",
    "trainer.prompts_per_step=6",
    "trainer.num_threads=1",
    "rollout.n=4",
    "eval.val_tasks=6",
    "eval.test_tasks=6",
    QUIET,
]
CONSTANT = "actor.schedule=constant"
"""A learning rate that does not depend on the length of the run, which may change then."""
ENV_FILE = '''
"""An environment of a user's, in a file, which reads another file beside it."""

from pathlib import Path

from agentrl_envs.guess_number import GuessNumber


class Mine(GuessNumber):
    process = True
    sandboxed = True

    def __init__(self, **kwargs):
        assert Path("rules.txt").read_text() == "halve"
        super().__init__(**kwargs)
'''


During = Callable[[Trainer], None]


def train(run: Path, *overrides: str, resume: bool = False, during: During | None = None) -> None:
    """Train in this process.

    Args:
        during: called with the trainer before it begins.
    """
    if resume:
        config = resumed_config(str(run), list(overrides))
    else:
        config = load([*SMALL, f"trainer.run_dir={run}", *overrides])

    async def main() -> None:
        async with asyncio.timeout(250), open_trainer(config) as trainer:
            if during is not None:
                during(trainer)
            await trainer.fit()

    asyncio.run(main())


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Metrics of every step, without what depends on the clock or on where things run."""
    left_out = ("timing_s/", "throughput/", "weight_sync/seconds", "cluster/", "serving/")
    return [
        {key: value for key, value in line.items() if not key.startswith(left_out)}
        for line in map(json.loads, RunDir(run).metrics_path.open())
    ]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return open_run_model(run, device="cpu").model.state_dict()


def sampled(run: Path, step: int) -> str:
    """What was sampled for a step, without timings."""
    stored = [json.loads(line) for line in RunDir(run).trajectories_path(step).open()]
    return json.dumps([_untimed(item) for item in stored])


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _untimed(v) for k, v in value.items() if k not in ("timings_s", "duration_s")}
    return [_untimed(item) for item in value] if isinstance(value, list) else value


def assert_same_run(one: Path, other: Path) -> None:
    assert lines_of(one) == lines_of(other)
    first, second = weights_of(one), weights_of(other)
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---------------------------------------------------------------- the same samples, the same run


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an environment of the user's own in it."""
    (tmp_path / "mine.py").write_text(ENV_FILE)
    (tmp_path / "rules.txt").write_text("halve")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def whole(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps in one process, with a checkpoint after each."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(run, "trainer.total_steps=3", "trainer.save_every=1", CONSTANT)
    return run


def test_rollout_workers_change_nothing_even_where_one_is_killed(work: Path, cluster: str) -> None:
    mine = ["env.id='./mine.py:Mine'", "trainer.total_steps=3"]
    train(work / "local", *mine)
    kills: list[int] = []

    def kill_in_step_2(trainer: Trainer) -> None:
        collect = trainer.collect

        async def collect_and_kill() -> Any:
            if trainer.step == 1:
                kill_one(cluster, "ray::RolloutWorker")
                kills.append(trainer.step)
            return await collect()

        trainer.collect = collect_and_kill

    ray_run = work / "ray"
    train(ray_run, *mine, "cluster=ray", "rollout.workers=2", during=kill_in_step_2)
    assert kills == [1]
    for step in (1, 2, 3):
        assert sampled(work / "local", step) == sampled(ray_run, step)
    assert_same_run(work / "local", ray_run)
    lines = [json.loads(line) for line in RunDir(ray_run).metrics_path.open()]
    last = lines[-1]
    assert last["cluster/rollout_worker_restarts"] == 1, "it was killed and not replaced"
    assert last["weight_sync/checksum_ok"] == 1
    assert last["serving/turns"] > 0
    assert max(line.get("serving/replicas", 0) for line in lines) == 2, "not those of both workers"


# ---------------------------------------------------------------- two ranks learn


def success(run: Path) -> list[float]:
    """Of the test split, before and after."""
    return [
        x["test/guess_number/success"] for x in lines_of(run) if "test/guess_number/success" in x
    ]


LEARNING = ["trainer.prompts_per_step=16", "rollout.n=8", "eval.test_tasks=64"]
NUM_STEPS = 20 if SOAK else 6


@pytest.mark.parametrize("algo", ["grpo", "ppo"])  # ppo: a critic beside the actor
def test_two_ranks_learn_as_one_does(tmp_path: Path, cluster: str, algo: str) -> None:
    how = [*LEARNING, f"algo={algo}", f"trainer.total_steps={NUM_STEPS}", "trainer.eval_every=0"]
    how += ["critic.epochs=2"] if algo == "ppo" else []
    train(tmp_path / "one", *how)
    two = ["cluster=ray", "placement.pools.train.ranks=2"]
    # Elsewhere in this file weights go the way that auto takes on one machine: shared memory.
    two.append(f"weight_sync.transport={'object_store' if algo == 'ppo' else 'gloo'}")
    train(tmp_path / "two", *how, *two)
    assert sampled(tmp_path / "one", 1) == sampled(tmp_path / "two", 1)
    (before, one), (start, after) = success(tmp_path / "one"), success(tmp_path / "two")
    assert start == before
    assert after - start >= 0.2, "nothing was learned on two ranks"
    assert abs(after - one) <= 0.15


# ---------------------------------------------------------------- resuming, and kills


ONE_RANK = ["placement.pools.train.ranks=1"]


def test_a_run_goes_from_two_ranks_to_one_and_back(
    tmp_path: Path, cluster: str, whole: Path
) -> None:
    run = tmp_path / "run"
    on_two = ["cluster=ray", "placement.pools.train.ranks=2"]
    train(run, "trainer.total_steps=1", CONSTANT, *on_two)
    train(run, "trainer.total_steps=2", "cluster=local", *ONE_RANK, resume=True)
    train(run, "trainer.total_steps=3", *on_two, resume=True)
    found, wanted = lines_of(run), lines_of(whole)
    assert [line["step"] for line in found[1:]] == [1, 2, 3]
    for got, want in zip(found[1:], wanted[1:], strict=True):
        assert got["actor/grad_norm"] == pytest.approx(want["actor/grad_norm"], rel=1e-3)
        assert got["actor/lr"] == pytest.approx(want["actor/lr"])
        assert got["reward/mean"] == want["reward/mean"]


def test_a_training_rank_killed_in_an_update_leaves_a_run_that_goes_on_bit_for_bit(
    tmp_path: Path, cluster: str, whole: Path
) -> None:
    rng = random.Random(0)
    resumed_from: list[int] = []
    for number in range(50 if SOAK else 5):
        run = tmp_path / f"run{number}"

        def kill_in_an_update(trainer: Trainer) -> None:
            update, begins = trainer.learner.update, rng.randint(1, 3)

            def update_and_kill(train_batch: Any, step: int) -> Any:
                if step + 1 == begins:
                    delay_s = rng.uniform(0.0, 0.06)
                    threading.Timer(delay_s, kill_one, (cluster, "ray::RankActor")).start()
                return update(train_batch, step)

            trainer.learner.update = update_and_kill

        how = ["trainer.total_steps=3", "trainer.save_every=1", CONSTANT]
        with pytest.raises(WorkerLost, match="is gone"):
            train(run, *how, "cluster=ray", during=kill_in_an_update)
        resumed_from.append(len(lines_of(run)))
        train(run, "cluster=local", resume=True)
        assert_same_run(whole, run)
    assert len(set(resumed_from)) > 1, "every kill came at the same step: little was tested"


def test_nothing_is_left_of_a_run_whose_driver_is_killed(work: Path, one_thread: None) -> None:
    mark = uuid.uuid4().hex
    mine = [*SMALL, "env.id='./mine.py:Mine'", "trainer.save_every=1", CONSTANT]
    arguments = [*mine, "trainer.run_dir=run", "trainer.total_steps=200", "cluster=ray"]
    driver = subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli.main", "train", *arguments],
        env=os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 200
        while not (work / "run" / "checkpoints" / "step_000002").is_dir():
            assert driver.poll() is None, driver.stderr.read() if driver.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.02)
        started = len(marked(mark))
        assert started > 6, "Ray, its workers, their environments and sandboxes"
        time.sleep(random.Random().uniform(0.0, 0.3))
        driver.kill()
        driver.wait(timeout=30)
        assert not wait_until_gone(mark, 30, but=RAYS_OWN)
    finally:
        driver.kill()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
    steps = len(lines_of(work / "run")) - 1
    assert steps < 200
    train(work / "run", "cluster=local", f"trainer.total_steps={steps + 1}", resume=True)
    train(work / "whole", *mine, f"trainer.total_steps={steps + 1}")
    wanted = lines_of(work / "whole")
    assert lines_of(work / "run")[: steps + 1] == wanted[: steps + 1]
