"""A run on two environments: proportions, resume, estimators and reports of each."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from test_training_run import (
    _assert_same_run,
    _wait_for,
    agentrl,
    metrics_of,
    start,
)

from agentrl.telemetry.trajectory_io import iter_stored
from agentrl.types import ToolStatus

MIX = (
    "env.mix=[{id: guess_number, weight: 2, algo: {advantage: rloo}}, {id: calculator, name: sums}]"
)
SMALL = [
    MIX,
    "model.warm_start.steps=40",
    "trainer.prompts_per_step=3",
    "rollout.n=4",
    "eval.val_tasks=5",
    "eval.test_tasks=7",
    "telemetry.trackers=[]",
    "trainer.num_threads=1",
    "trainer.total_steps=4",
    "trainer.save_every=2",
]
STEPS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed") / "run"
    agentrl(cache, "train", *SMALL, f"trainer.run_dir={path}")
    return path


def test_every_step_holds_the_environments_by_weight_and_their_tools(run: Path) -> None:
    for step in STEPS:
        groups: dict[str, str] = {}
        for stored in iter_stored(run / "trajectories" / f"step_{step:06d}.jsonl"):
            trajectory = stored.trajectory
            groups[trajectory.group_id] = trajectory.env_id
            assert trajectory.group_id.startswith(f"train-{trajectory.env_id}-")
            called = (result for turn in trajectory.turns for result in turn.tool_results)
            answered = [result for result in called if result.status is ToolStatus.OK]
            # So little training tries the other one's tool now and then: it is not there.
            assert trajectory.env_id == "sums" or not answered
        assert Counter(groups.values()) == {"guess_number": 2, "sums": 1}


def test_every_environment_is_measured_by_itself(run: Path) -> None:
    lines = metrics_of(run)
    for env in ("guess_number", "sums"):
        for line in (lines[0], lines[-1]):
            assert line[f"test/{env}/tasks"] == 7, "eval.test_tasks of each"
            assert 0 <= line[f"test/{env}/success"] <= 1
        assert lines[0][f"val/{env}/tasks"] == 5
        for line in lines[1:]:
            assert line[f"group/{env}/share"] == pytest.approx(2 / 3 if env != "sums" else 1 / 3)
            assert {f"success/{env}/mean", f"reward/{env}/mean"} < line.keys()
            assert 0 <= line[f"group/{env}/zero_advantage_fraction"] <= 1
    last = lines[-1]
    pooled = (2 * last["reward/guess_number/mean"] + last["reward/sums/mean"]) / 3
    assert last["reward/mean"] == pytest.approx(pooled)
    page = (run / "report.html").read_text()
    assert "Success by environment" in page and "share of groups" in page
    assert "Evaluation in sums on the test split" in page


def test_every_environment_has_the_estimator_of_its_entry(run: Path) -> None:
    seen = Counter[str]()
    for step in STEPS:
        groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for stored in iter_stored(run / "trajectories" / f"step_{step:06d}.jsonl"):
            trajectory = stored.trajectory
            assert stored.advantages is not None
            sampled = trajectory.segments[0].loss_mask
            (value,) = np.unique(stored.advantages[0][sampled])
            key = (trajectory.env_id, trajectory.group_id)
            groups.setdefault(key, []).append((trajectory.total_reward, float(value)))
        for (env, _), members in groups.items():
            rewards, advantages = map(np.array, zip(*members, strict=True))
            centred = rewards - rewards.mean()
            if not centred.any():
                continue
            seen[env] += 1
            # Against the mean of the three others; divided by the group's standard deviation.
            expected = centred * 4 / 3 if env != "sums" else centred / (rewards.std(ddof=1) + 1e-6)
            assert advantages == pytest.approx(expected, rel=1e-3), env
    assert seen["guess_number"], "no group with a difference: nothing was tested"


def test_a_mixed_run_goes_on_bit_for_bit_after_a_kill(
    cache: Path, run: Path, tmp_path: Path
) -> None:
    again = tmp_path / "run"
    process = start(cache, "train", *SMALL, f"trainer.run_dir={again}")
    _wait_for(again / "trajectories" / "step_000003.jsonl", process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    assert not (again / "checkpoints" / "step_000004").exists(), "it had finished"
    agentrl(cache, "train", "--resume", str(again))
    _assert_same_run(run, again)


def test_a_resume_with_another_mix_is_refused_by_name(cache: Path, run: Path) -> None:
    other = "env.mix=[{id: guess_number}, {id: calculator, name: sums}]"
    out = agentrl(cache, "train", "--resume", str(run), other, expect=2)
    assert "env.mix was" in out


def test_a_mixed_run_is_evaluated_and_played_in_all_its_environments(
    cache: Path, run: Path, tmp_path: Path
) -> None:
    out = agentrl(cache, "eval", "--model", str(run), "--tasks", "3", "--json")
    measured = json.loads(out[out.index("{") : out.rindex("}") + 1])
    assert measured["env"] == "guess_number+sums"
    wholes = {row["env"]: row for row in measured["results"] if row["stratum"] == "all"}
    assert {env: row["tasks"] for env, row in wholes.items()} == {"guess_number": 3, "sums": 3}
    rolled = tmp_path / "rolled.jsonl"
    shown = agentrl(cache, "rollout", "--model", str(run), "--tasks", "2", "--out", str(rolled))
    assert re.search(r"4 trajectories", shown)
    played = Counter(stored.trajectory.env_id for stored in iter_stored(rolled))
    assert played == {"guess_number": 2, "sums": 2}
    out = agentrl(cache, "eval", "--model", str(run), "--env", "guess_number", expect=2)
    assert "env.mix=[]" in out
