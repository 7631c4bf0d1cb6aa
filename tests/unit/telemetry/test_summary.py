from __future__ import annotations

import pytest

from agentrl.telemetry.summary import (
    held_out_changes,
    mean,
    stop_rows,
    timing_rows,
    tool_rows,
    total,
    training_change,
)


def test_held_out_success_from_first_to_last_with_intervals() -> None:
    key = "val/env/success"
    lines = [
        {"step": 0, key: 0.2, f"{key}_low": 0.1, f"{key}_high": 0.3, f"{key}/level=1": 0.9},
        {"step": 1},
        {"step": 2, key: 0.8, f"{key}_low": 0.7, f"{key}_high": 0.9},
    ]
    (change,) = held_out_changes(lines)
    assert (change.label, change.first, change.last) == ("validation", 0.2, 0.8)
    assert change.first_interval == (0.1, 0.3) and change.last_interval == (0.7, 0.9)


def test_training_change_averages_over_the_ends() -> None:
    lines = [{"step": s, "x": float(s)} for s in range(40)]
    change = training_change(lines, "x", "training")
    assert change is not None and (change.first, change.last) == (2.0, 37.0)
    assert training_change(lines, "y", "training") is None
    assert mean(lines, "y") is None and total(lines, "x") == sum(range(40))


def test_timings_are_nested_and_the_shares_of_the_top_add_up() -> None:
    line = {
        "timing_s/collect": 1.0,
        "timing_s/update": 2.0,
        "timing_s/update/logprob": 0.5,
        "timing_s/update/forward": 0.75,
        "timing_s/tool/python": 9.0,
        "timing_s/step": 4.0,
    }
    rows = timing_rows([{"step": 1, **line}, {"step": 2, **line}])
    assert [(row.name, row.depth) for row in rows] == [
        ("update", 0),
        ("forward", 1),
        ("logprob", 1),
        ("collect", 0),
        ("other", 0),
    ]
    assert rows[0].total_s == 4.0 and rows[0].mean_s == 2.0 and rows[0].fraction == 0.5
    assert sum(row.fraction for row in rows if not row.depth) == pytest.approx(1.0)
    assert timing_rows([]) == []


def test_stop_reasons_are_weighted_by_trajectories() -> None:
    lines = [
        {"step": 1, "trajectories/count": 10, "stop_reason/terminated": 1.0},
        {
            "step": 2,
            "trajectories/count": 30,
            "stop_reason/terminated": 0.5,
            "stop_reason/max_turns": 0.5,
        },
    ]
    first, second = stop_rows(lines)
    assert (first.reason, first.whole, first.first, first.last) == ("terminated", 0.625, 1.0, 0.5)
    assert (second.reason, second.whole, second.first) == ("max_turns", 0.375, 0.0)


def test_tool_calls_are_summed_and_their_time_averaged_per_call() -> None:
    lines = [
        {"step": 1, "tool/python/calls": 10, "tool/python/errors": 1, "timing_s/tool/python": 0.1},
        {"step": 2, "tool/python/calls": 30, "tool/python/errors": 0, "timing_s/tool/python": 0.3},
        {"step": 3, "tool/search/calls": 50},
    ]
    search, python = tool_rows(lines)
    assert search.name == "search" and search.seconds is None
    assert python.counts == {"calls": 40, "errors": 1}
    assert python.seconds == pytest.approx(0.25)
