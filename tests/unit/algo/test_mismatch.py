from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.mismatch import ScoredTokens, distances, mismatch_metrics


def tokens(
    trainer: list[float],
    engine: list[float],
    *,
    turn: list[int] | None = None,
    position: list[int] | None = None,
    lag: list[int] | None = None,
) -> ScoredTokens:
    zeros = [0] * len(trainer)
    return ScoredTokens(
        trainer=torch.tensor(trainer),
        engine=torch.tensor(engine),
        turn=torch.tensor(turn or zeros, dtype=torch.int64),
        position=torch.tensor(position or zeros, dtype=torch.int64),
        lag=torch.tensor(lag or zeros, dtype=torch.int64),
    )


def k3(difference: float) -> float:
    return math.exp(difference) - 1 - difference


def test_hand_worked_distances() -> None:
    got = distances(tokens([-1.0, -2.0, -0.5], [-1.0, -1.0, -1.0]))
    differences = [0.0, -1.0, 0.5]  # log of trainer's over engine's probability
    assert got == pytest.approx(
        {
            "logprob_abs_mean": 1.5 / 3,
            "logprob_abs_max": 1.0,
            "exp_abs_mean": (1 + math.e + math.exp(0.5)) / 3,
            "k3_kl": sum(map(k3, differences)) / 3,
            "ratio_oob_fraction": 1 / 3,  # e^-1 < 1/2
        },
        abs=1e-6,
    )


def test_equal_probabilities_show_exactly_nothing() -> None:
    got = mismatch_metrics(tokens([-1.0, -2.0], [-1.0, -2.0]))
    assert got == {
        "mismatch/logprob_abs_mean": 0.0,
        "mismatch/logprob_abs_max": 0.0,
        "mismatch/exp_abs_mean": 1.0,
        "mismatch/k3_kl": 0.0,
        "mismatch/ratio_oob_fraction": 0.0,
        "mismatch/num_tokens": 2.0,
        "mismatch/by_turn/turn_1": 0.0,
        "mismatch/num_tokens_by_turn/turn_1": 2.0,
        "mismatch/by_position/from_0": 0.0,
    }


def test_no_token_is_no_measurement() -> None:
    assert mismatch_metrics(tokens([], [])) == {}


def test_turns_and_positions_have_their_own_means() -> None:
    got = mismatch_metrics(
        tokens([0.0] * 4, [-0.1, -0.3, -1.0, 0.0], turn=[0, 0, 1, 11], position=[3, 255, 256, 5000])
    )
    by_turn = {n.rpartition("/")[2]: v for n, v in got.items() if n.startswith("mismatch/by_turn/")}
    assert by_turn == pytest.approx({"turn_1": 0.2, "turn_2": 1.0, "turn_9_on": 0.0}, abs=1e-6)
    assert got["mismatch/by_position/from_0"] == pytest.approx(0.2, abs=1e-6)
    assert got["mismatch/by_position/from_256"] == pytest.approx(1.0)
    assert got["mismatch/by_position/from_4096"] == 0.0


def test_what_was_learned_meanwhile_is_told_apart_from_the_mismatch_of_the_present_version() -> (
    None
):
    got = mismatch_metrics(tokens([-1.0, -1.0, -2.0], [-1.0, -1.1, -1.0], lag=[0, 0, 2]))
    assert got["mismatch/current/logprob_abs_max"] == pytest.approx(0.1, abs=1e-6)
    assert got["mismatch/stale/logprob_abs_max"] == pytest.approx(1.0)
    assert got["mismatch/current_fraction"] == pytest.approx(2 / 3)
    learned = k3(-1.0) - (k3(0.0) + k3(0.1)) / 2
    assert got["mismatch/learned_kl"] == pytest.approx(learned, abs=1e-6)


def test_where_every_token_is_stale_nothing_is_said_of_the_present_version() -> None:
    got = mismatch_metrics(tokens([-1.0], [-2.0], lag=[1]))
    assert got["mismatch/current_fraction"] == 0.0
    assert not [name for name in got if name.startswith("mismatch/current/")]
    assert "mismatch/learned_kl" not in got


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_no_number_stays_visible(broken: float) -> None:
    got = distances(tokens([-1.0, -1.0], [-1.0, broken]))
    assert not got["logprob_abs_mean"] <= 1e9
    assert got["ratio_oob_fraction"] == 0.5


@given(
    st.lists(
        st.tuples(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32), st.integers(0, 14)),
        min_size=1,
        max_size=40,
    )
)
def test_means_of_turns_recombine_to_the_overall_mean(rows: list[tuple[float, float, int]]) -> None:
    trainer, engine, turn = (list(column) for column in zip(*rows, strict=True))
    got = mismatch_metrics(tokens(trainer, engine, turn=turn))
    counts = "mismatch/num_tokens_by_turn/"
    names = [name.removeprefix(counts) for name in got if name.startswith(counts)]
    assert sum(got[counts + name] for name in names) == len(rows)
    total = sum(got[counts + name] * got[f"mismatch/by_turn/{name}"] for name in names)
    assert total / len(rows) == pytest.approx(got["mismatch/logprob_abs_mean"], abs=1e-9)
