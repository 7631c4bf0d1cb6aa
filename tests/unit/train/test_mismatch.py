"""What of a step is compared, and in which shape it is kept."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.config import AlgoConfig
from agentrl.batch import Batch
from agentrl.testing.sessions import make_group, make_session
from agentrl.train.assemble import TrainBatch, assemble
from agentrl.train.mismatch import judged, record_mismatch, scored_where, some_sessions

TWO_SEGMENTS = [[0, 1, 1, 0, 1], [0, 0, 1]]


def step(num_sessions: int = 3) -> tuple[TrainBatch, Batch]:
    """Sessions of two segments and three turns each, in one group."""
    members = [make_session(f"s{i}", float(i), TWO_SEGMENTS) for i in range(num_sessions)]
    batch = assemble([make_group(*members)], {"e": AlgoConfig()})
    assert batch.batch is not None
    return batch, batch.batch


def test_the_record_has_the_shape_of_the_trajectories() -> None:
    batch, packed = step()
    scored = packed.tokens["logprobs"] + torch.arange(packed.num_tokens) / 1000
    part = packed.select([2, 3])  # both segments of the second session
    values = scored[8:16]
    found = record_mismatch(batch, part, scored_where(values, part.tokens["turn"] >= 0), version=0)
    assert list(batch.trainer_logprobs) == ["s1"]
    first, second = batch.trainer_logprobs["s1"]
    nan = np.nan
    np.testing.assert_allclose(first, [nan, -0.491, -0.490, nan, -0.488], rtol=1e-5)
    np.testing.assert_allclose(second, [nan, nan, -0.485], rtol=1e-5)
    assert found["mismatch/num_tokens"] == 4
    assert found["mismatch/by_turn/turn_1"] == pytest.approx((0.009 + 0.010) / 2, rel=1e-3)
    assert found["mismatch/by_turn/turn_3"] == pytest.approx(0.015, rel=1e-3)


def test_of_a_session_that_is_scored_in_part_the_rest_is_unknown() -> None:
    batch, packed = step()
    part = packed.select([1])
    values = scored_where(part.tokens["logprobs"], part.tokens["turn"] >= 0)
    record_mismatch(batch, part, values, version=0)
    first, second = batch.trainer_logprobs["s0"]
    assert np.isnan(first).all() and len(first) == 5
    assert np.isfinite(second).tolist() == [False, False, True]


def test_a_score_that_is_no_number_is_wrong_not_missing() -> None:
    mask = torch.tensor([True, True, False])
    values = scored_where(torch.tensor([math.nan, -1.0, math.nan]), mask)
    assert values[:2].tolist() == [-math.inf, -1.0] and values[2].isnan()


@given(st.integers(1, 12), st.integers(1, 200))
def test_a_sample_holds_whole_sessions_within_the_budget(num_sessions: int, budget: int) -> None:
    _, packed = step(num_sessions)
    part = some_sessions(packed, budget)
    sessions = part.rows["session"].tolist()
    assert sorted(sessions) == sessions
    assert all(sessions.count(name) == 2 for name in sessions)
    assert part.num_tokens <= max(budget, 8)
    if budget >= packed.num_tokens:
        assert part.num_rows == packed.num_rows


@pytest.mark.parametrize(
    ("metrics", "want"),
    [
        ({}, None),
        ({"mismatch/exp_abs_mean": 1.2}, 1.2),
        ({"mismatch/exp_abs_mean": 1.2, "mismatch/current_fraction": 0.0}, None),
        (
            {
                "mismatch/exp_abs_mean": 1.2,
                "mismatch/current_fraction": 0.5,
                "mismatch/current/exp_abs_mean": 1.01,
            },
            1.01,
        ),
    ],
)
def test_only_tokens_of_the_present_version_are_judged(
    metrics: dict[str, float], want: float | None
) -> None:
    assert judged(metrics, "exp_abs_mean") == want
