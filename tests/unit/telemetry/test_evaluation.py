from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.telemetry.evaluation import (
    evaluate_strata,
    evaluation_metrics,
    mean_interval,
    paired_gain,
    pass_at_k,
    proportion_interval,
)
from agentrl.testing.run_data import make_trajectory
from agentrl.types import StopReason, Task, Trajectory, TrajectoryGroup


def _samples(task_id: str, successes: list[bool | None], **tags: str) -> list[Trajectory]:
    task = Task(id=task_id, data={}, tags=tags)
    return [
        make_trajectory(seed=i, task=task, success=s, num_turns=1)
        if s is not None
        else make_trajectory(seed=i, task=task, stop_reason=StopReason.ENV_ERROR)
        for i, s in enumerate(successes)
    ]


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(1, 6))
def test_pass_at_k_is_the_share_of_subsets_with_a_success(outcomes: list[bool], k: int) -> None:
    k = min(k, len(outcomes))
    subsets = list(combinations(outcomes, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(expected)


def test_pass_at_k_stays_exact_for_large_counts_and_refuses_nonsense() -> None:
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)
    for n, c, k in ((4, 5, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1), (4, -1, 1)):
        with pytest.raises(ValueError, match="pass@k"):
            pass_at_k(n, c, k)


def test_one_sample_per_task_gives_the_wilson_interval() -> None:
    interval = proportion_interval([1.0] * 8 + [0.0] * 2)
    assert interval.mean == 0.8
    assert interval.low == pytest.approx(0.4902, abs=1e-4)  # Wilson, 8 of 10
    assert interval.high == pytest.approx(0.9433, abs=1e-4)
    assert str(interval) == "0.800 [0.490, 0.943]"


def test_samples_that_are_all_alike_within_a_task_are_no_extra_evidence() -> None:
    alike = proportion_interval([1.0, 0.0] * 20, samples_per_task=8)
    single = proportion_interval([1.0, 0.0] * 20)
    assert alike == single
    spread = proportion_interval([0.5] * 39 + [0.625], samples_per_task=8)
    assert spread.high - spread.low < single.high - single.low
    trials = proportion_interval([1.0] * 160 + [0.0] * 160)  # 40 tasks x 8 independent samples
    assert spread.high - spread.low == pytest.approx(trials.high - trials.low, rel=0.01)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.integers(1, 16))
def test_proportion_intervals_hold_the_mean_and_stay_in_range(values: list[float], n: int) -> None:
    interval = proportion_interval(values, samples_per_task=n)
    assert 0.0 <= interval.low <= interval.mean <= interval.high <= 1.0
    assert interval.low < interval.high


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        rates = rng.beta(2.0, 1.0, size=60)  # tasks differ; the true mean is 2/3
        means = rng.binomial(4, rates) / 4
        interval = proportion_interval(means.tolist(), samples_per_task=4)
        hits += interval.low <= 2 / 3 <= interval.high
    assert 0.92 <= hits / 400 <= 0.98


def test_mean_interval_matches_the_normal_formula() -> None:
    interval = mean_interval([1.0, 2.0, 3.0, 4.0])
    half = 1.959964 * np.std([1, 2, 3, 4], ddof=1) / 2
    assert interval.mean == 2.5
    assert interval.high - interval.mean == pytest.approx(half)
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])


def test_tasks_weigh_the_same_whatever_their_number_of_samples() -> None:
    items = _samples("a", [True] * 6) + _samples("b", [False, False])
    (result,) = evaluate_strata(items)
    assert result.success.mean == 0.5
    assert result.num_tasks == 2 and result.num_samples == 8
    assert result.pass_at_k[1].mean == 0.5


def test_pass_at_k_leaves_out_the_few_tasks_with_fewer_samples() -> None:
    items = [t for i in range(3) for t in _samples(f"t{i}", [True, False])]
    items += _samples("lost one", [False, None]) + _samples("has more", [False] * 9)
    (result,) = evaluate_strata(items)
    assert sorted(result.pass_at_k) == [1, 2]
    assert result.pass_at_k[2].mean == 0.75
    assert result.pass_at_k[1].mean == pytest.approx(0.3)


def test_strata_come_from_the_tags_of_the_tasks() -> None:
    items = (
        _samples("a", [True, False], level="1")
        + _samples("b", [True, True], level="1")
        + _samples("c", [False, False], level="2")
    )
    results = {result.stratum: result for result in evaluate_strata(items)}
    assert list(results) == ["all", "level=1", "level=2"]
    assert results["level=1"].success.mean == 0.75
    assert results["level=1"].pass_at_k[2].mean == 1.0
    assert results["level=2"].success.mean == 0.0
    assert results["level=2"].success.high > 0.0


def test_strata_are_in_natural_order() -> None:
    items = [t for w in ("10", "9", "x", "²") for t in _samples(f"t{w}", [True], width=w)]
    strata = [result.stratum for result in evaluate_strata(items)]
    assert strata == ["all", "width=9", "width=10", "width=x", "width=²"]


def test_failed_samples_are_left_out_and_counted() -> None:
    items = _samples("a", [True, None]) + _samples("b", [None, None])
    (result,) = evaluate_strata(items)
    assert result.success.mean == 1.0
    assert (result.num_tasks, result.num_samples, result.num_failed) == (1, 1, 3)
    assert evaluate_strata(_samples("a", [None])) == []


def _groups(*members: list[Trajectory]) -> list[TrajectoryGroup]:
    return [
        TrajectoryGroup(
            id=items[0].task.id,
            task=items[0].task,
            env_id="code_sandbox",
            trajectories=items,
            policy_version=0,
        )
        for items in members
    ]


def test_flat_metrics_hold_interval_strata_and_pass_at_k() -> None:
    groups = _groups(_samples("a", [True, True], level="1"), _samples("b", [False, True, None]))
    metrics = evaluation_metrics(groups, prefix="val/code_sandbox")
    assert metrics["val/code_sandbox/success"] == 0.75
    assert metrics["val/code_sandbox/success_low"] < 0.75
    assert metrics["val/code_sandbox/success_high"] > 0.75
    assert metrics["val/code_sandbox/success/level=1"] == 1.0
    assert metrics["val/code_sandbox/pass@2"] == 1.0
    assert metrics["val/code_sandbox/tasks"] == 2
    assert metrics["val/code_sandbox/failed"] == 1
    dead = _groups(_samples("a", [None]))
    assert evaluation_metrics(dead, prefix="test/x") == {"test/x/failed": 1}


def test_gain_is_paired_by_task() -> None:
    before = [t for i in range(40) for t in _samples(f"t{i}", [i % 2 == 0])]
    after = [t for i in range(40) for t in _samples(f"t{i}", [i % 2 == 0 or i < 10])]
    after += _samples("unseen before", [False])
    gain = paired_gain(before, after)
    assert gain.mean == pytest.approx(5 / 40)
    assert 0 < gain.low < gain.mean < gain.high
    with pytest.raises(ValueError, match="at least one"):
        paired_gain(before, _samples("x", [True]))
