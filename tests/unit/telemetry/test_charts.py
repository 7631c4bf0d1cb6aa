from __future__ import annotations

import math
from typing import Any

import pytest

from agentrl.telemetry.charts import MAX_POINTS, charts, step_timings
from agentrl.telemetry.jsonl import read_metrics
from agentrl.telemetry.run_dir import RunDir


def _titles(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return {chart.title: chart for chart in charts(lines)}


def test_a_run_has_the_promised_curves(finished_run: RunDir) -> None:
    found = _titles(read_metrics(finished_run.metrics_path))
    for title in (
        "Success",
        "Reward",
        "Turns per trajectory",
        "Weighted reward by name",
        "Share of the advantage by turn",
        "Entropy",
        "Entropy by turn",
        "KL",
        "Clip and zero-advantage fractions",
        "Throughput",
        "Time per step",
        "Stop reasons",
    ):
        assert found[title].series, title
    assert [item.label for item in found["Success"].series] == ["train", "validation"]
    assert found["Success"].series[1].low is not None


def test_charts_without_data_are_left_out() -> None:
    assert charts([]) == []
    assert list(_titles([{"step": 1, "actor/kl": 0.1}])) == ["KL"]


def test_points_that_cannot_be_drawn_are_skipped() -> None:
    lines = [{"step": s, "actor/kl": v} for s, v in enumerate([0.1, math.nan, None, "x", 0.2])]
    (series,) = _titles(lines)["KL"].series
    assert series.steps == [0, 4] and series.values == [0.1, 0.2]


def test_timings_of_a_step_add_up_to_the_step() -> None:
    line = {
        "timing_s/collect": 2.0,
        "timing_s/update": 1.0,
        "timing_s/update/logprob": 0.5,
        "timing_s/tool/python": 0.01,
        "timing_s/step": 3.5,
    }
    assert step_timings(line) == {"collect": 2.0, "update": 1.0, "other": 0.5}


def test_many_layers_end_in_other_and_keep_the_sum() -> None:
    reasons = {f"stop_reason/r{i}": (i + 1) / 55 for i in range(10)}
    (chart,) = charts([{"step": 1, **reasons}])
    assert [item.label for item in chart.series] == ["r9", "r8", "r7", "r6", "r5", "other"]
    assert sum(item.values[0] for item in chart.series) == pytest.approx(1.0)


def test_long_runs_are_thinned_by_averaging() -> None:
    lines = [{"step": s, "actor/kl": float(s % 2)} for s in range(10 * MAX_POINTS)]
    (series,) = _titles(lines)["KL"].series
    assert len(series.steps) == MAX_POINTS
    assert all(value == 0.5 for value in series.values)


def test_environments_are_told_apart_only_where_there_are_several() -> None:
    lines = [{"step": 0, "val/a/success": 0.1, "test/a/success": 0.2}]
    assert [s.label for s in _titles(lines)["Success"].series] == ["test", "validation"]
    lines[0]["val/b/success"] = 0.3
    labels = [s.label for s in _titles(lines)["Success"].series]
    assert labels == ["test a", "validation a", "validation b"]


def test_where_the_signal_lies_is_shown_by_turn_and_by_name() -> None:
    lines = [
        {
            "step": step,
            **{f"actor/entropy/turn_{turn}": 1.0 / turn for turn in (1, 2)},
            **{f"credit/advantage_mass/turn_{turn}": 0.5 for turn in (1, 2)},
            "credit/reward/outcome": 1.0 - step,
            "credit/reward/turn": 0.5,
            "credit/reward/tool": 0.0,
        }
        for step in (0, 1)
    ]
    found = _titles(lines)
    assert [s.label for s in found["Entropy by turn"].series] == ["turn_1", "turn_2"]
    mass = found["Share of the advantage by turn"]
    assert mass.stacked and [s.values for s in mass.series] == [[0.5, 0.5], [0.5, 0.5]]
    # What is 0 throughout is left out; what falls to 0 is not.
    rewards = {s.label: s.values for s in found["Weighted reward by name"].series}
    assert rewards == {"outcome": [1.0, 0.0], "turn": [0.5, 0.5]}


def test_one_turn_and_one_reward_have_no_charts_of_their_own() -> None:
    line = {
        "step": 1,
        "reward/mean": 1.0,
        "actor/entropy": 1.0,
        "actor/entropy/turn_1": 1.0,
        "credit/advantage_mass/turn_1": 1.0,
        "credit/reward/outcome": 1.0,
        "credit/reward/turn": 0.0,
    }
    assert list(_titles([line])) == ["Reward", "Entropy"]


def test_the_reference_and_the_rollout_correction_have_charts() -> None:
    line = {
        "step": 1,
        "actor/ref_kl": 0.1,
        "actor/kl_coef": 0.01,
        "correction/is_mean": 0.9,
        "correction/rs_masked_fraction": 0.2,
    }
    found = _titles([line])
    assert [s.label for s in found["KL to the reference"].series] == ["in the loss"]
    assert found["Coefficient of the KL"].series[0].values == [0.01]
    assert [s.label for s in found["Rollout correction"].series] == ["mean weight", "rejected"]
