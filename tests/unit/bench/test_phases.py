"""Every moment of a step has one owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.bench.phases import (
    OTHER,
    PHASES,
    Interval,
    IntervalMeter,
    of_trajectory,
    phase_of,
    shares,
)
from agentrl.testing.run_data import make_trajectory


def nonzero(seconds: dict[str, float]) -> dict[str, float]:
    return {phase: value for phase, value in seconds.items() if value}


def test_a_moment_belongs_to_the_first_phase_that_goes_on() -> None:
    intervals = [
        Interval("wait", 0.0, 10.0),
        Interval("gen", 1.0, 5.0),
        Interval("gen", 2.0, 4.0),
        Interval("tool", 4.0, 8.0),
        Interval("update", 10.0, 12.0),
        Interval("gen", 11.0, 13.0),
    ]
    found = nonzero(shares(intervals, 0.0, 14.0))
    assert found == {"wait": 3.0, "gen": 5.0, "tool": 3.0, "update": 2.0, OTHER: 1.0}


def test_what_lies_outside_of_a_step_is_not_its_time() -> None:
    found = nonzero(shares([Interval("gen", -5.0, 1.0), Interval("gen", 3.0, 9.0)], 0.0, 4.0))
    assert found == {"gen": 2.0, OTHER: 2.0}


@given(
    st.lists(
        st.tuples(st.sampled_from(PHASES), st.floats(-2, 12), st.floats(0, 5)).map(
            lambda item: Interval(item[0], item[1], item[1] + item[2])
        ),
        max_size=30,
    )
)
def test_phases_add_up_to_the_whole(intervals: list[Interval]) -> None:
    found = shares(intervals, 0.0, 10.0)
    assert sum(found.values()) == pytest.approx(10.0)
    assert min(found.values()) >= 0.0


def test_spans_of_the_loop_are_phases() -> None:
    assert {phase_of(name) for name in ("collect", "logprob", "wake", "credit", "sync")} <= {
        *PHASES
    }


def test_a_meter_notes_when_spans_and_steps_began() -> None:
    meter = IntervalMeter()
    with meter.step(1), meter.span("update"), meter.span("logprob"):
        pass
    logp, update = meter.intervals
    assert (logp.phase, update.phase) == ("logp", "update")
    (start, end) = meter.steps[0]
    assert start <= update.start <= logp.start <= logp.end <= update.end <= end


def test_an_episode_is_reset_then_turns_then_graded() -> None:
    trajectory = make_trajectory(seed=1)
    for number, turn in enumerate(trajectory.turns):
        turn.timings_s = {"start": 1.0 + 4 * number, "generate": 2.0, "tools": 0.5, "env": 0.5}
    end = 4.0 * len(trajectory.turns)
    trajectory.timings_s = {
        "began": 100.0,
        "total": end + 3.0,
        "env": 0.5 * len(trajectory.turns) + 0.25,
        "reward": 1.5,
    }
    found = nonzero(shares(of_trajectory(trajectory), 100.0, 100.0 + end + 3.0))
    assert found["gen"] == pytest.approx(2.0 * len(trajectory.turns))
    assert found["tool"] == pytest.approx(1.0 * len(trajectory.turns) + 0.25)
    assert found["reward"] == pytest.approx(1.5)


def test_an_episode_that_never_began_took_nobodys_time() -> None:
    trajectory = make_trajectory(seed=1)
    trajectory.timings_s = {}
    assert list(of_trajectory(trajectory)) == []
