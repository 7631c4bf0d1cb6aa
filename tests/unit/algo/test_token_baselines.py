from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algo.credit import get_estimator
from agentrl.algo.token_baselines import (
    OTB_EPSILON,
    optimal_token_baseline,
    reinforce_plus_plus,
    remax,
)
from agentrl.testing.credit import SessionCredit, make_credit


def test_reinforce_plus_plus_whitens_discounted_rewards_to_go() -> None:
    batch = make_credit(
        SessionCredit(tokens=[1, 2], turn_rewards=[1.0, 0.0], outcome=2.0), SessionCredit()
    )
    to_go = [1.0 + 0.25 * 2.0, 1.0, 2.0, 0.0]
    mean = sum(to_go) / 4
    std = math.sqrt(sum((g - mean) ** 2 for g in to_go) / 3)
    got = reinforce_plus_plus(batch, gamma=0.5).advantages.tolist()
    assert got == pytest.approx([(g - mean) / std for g in to_go])


def test_remax_takes_the_greedy_return_from_the_reward_to_go() -> None:
    batch = make_credit(
        SessionCredit(tokens=[1, 1], turn_rewards=[0.5, 0.0], outcome=1.0, greedy=0.75),
        SessionCredit(outcome=0.0, greedy=0.25),
    )
    assert remax(batch).advantages.tolist() == [0.75, 0.25, -0.25]


def energetic(tokens: list[int], outcome: float, energy: list[float], **more: Any) -> SessionCredit:
    """A session whose tokens have the energies ``1 - 2 pi + sum pi**2``, with pi = 1/2."""
    return SessionCredit(
        tokens=tokens,
        outcome=outcome,
        old_logprobs=[math.log(0.5)] * len(energy),
        sum_pi_squared=energy,
        **more,
    )


def test_optimal_token_baseline_weighs_members_by_cumulative_energy() -> None:
    batch = make_credit(energetic([2], 1.0, [0.25, 0.5]), energetic([1, 1], 0.0, [0.75, 0.5]))
    # Position 0: (1 * 0.25 + 0 * 0.75) / 1 = 0.25; position 1: 0.75 / (0.75 + 1.25) = 0.375.
    got = optimal_token_baseline(batch).advantages.tolist()
    assert got == pytest.approx([0.75, 0.625, -0.25, -0.375], abs=1e-6)


def test_importance_weights_scale_the_energy_by_their_square() -> None:
    batch = make_credit(
        energetic([1], 1.0, [0.25], is_weights=[2.0]), energetic([1], 0.0, [0.5], is_weights=[1.0])
    )
    baseline = 1.0 / (1.0 + 0.5)
    got = optimal_token_baseline(batch).advantages.tolist()
    assert got == pytest.approx([1 - baseline, -baseline], abs=1e-6)


def test_positions_that_one_member_alone_reached_have_no_baseline() -> None:
    long, short = energetic([3], 1.0, [0.5] * 3), energetic([1], 0.0, [0.5])
    batch = make_credit(long, short)
    assert optimal_token_baseline(batch).advantages.tolist() == pytest.approx([0.5, 1, 1, -0.5])
    own = optimal_token_baseline(batch, handle_zero_tail=False).advantages.tolist()
    assert own == pytest.approx([0.5, 0, 0, -0.5])
    tied = make_credit(long, energetic([3], 0.0, [0.5] * 3))
    assert optimal_token_baseline(tied).advantages.tolist() == pytest.approx([0.5] * 3 + [-0.5] * 3)


def test_a_policy_sure_of_itself_gets_the_plain_mean() -> None:
    sure: dict[str, Any] = {"old_logprobs": [0.0], "sum_pi_squared": [1.0]}
    batch = make_credit(SessionCredit(outcome=1.0, **sure), SessionCredit(**sure))
    assert optimal_token_baseline(batch).advantages.tolist() == [0.5, -0.5]


def test_equal_rewards_in_sessions_of_different_length_give_exactly_zero() -> None:
    batch = make_credit(energetic([3], 0.3, [0.1, 0.2, 0.7]), energetic([1], 0.3, [0.4]))
    assert not optimal_token_baseline(batch).advantages.any()


def test_the_multi_turn_form_is_the_same_function() -> None:
    assert get_estimator("tir_optimal_token_baseline") is optimal_token_baseline


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),  # group
            st.lists(
                st.tuples(
                    st.floats(-3, -0.0625, width=32),  # log-probability
                    st.floats(0.5, 1, width=32),  # sum of squares, enough for an energy above 0
                    st.floats(-1, 1, width=32),  # penalty
                    st.floats(0.5, 2, width=32),  # importance weight
                ),
                max_size=4,
            ),
            st.floats(-2, 2, width=32),  # outcome
        ),
        min_size=1,
        max_size=8,
    )
)
def test_optimal_token_baseline_equals_its_loop(
    made: list[tuple[int, list[tuple[float, float, float, float]], float]],
) -> None:
    batch = make_credit(
        *(
            SessionCredit(
                group=group,
                tokens=[len(tokens)],
                outcome=outcome,
                old_logprobs=[t[0] for t in tokens],
                sum_pi_squared=[t[1] for t in tokens],
                penalties=[t[2] for t in tokens],
                is_weights=[t[3] for t in tokens],
            )
            for group, tokens, outcome in made
        )
    )
    to_go = [
        [sum(t[2] for t in tokens[k:]) + outcome for k in range(len(tokens))]
        for _, tokens, outcome in made
    ]
    energy = [
        [
            sum((1 - 2 * math.exp(t[0]) + t[1]) * t[3] ** 2 for t in tokens[: k + 1])
            for k in range(len(tokens))
        ]
        for _, tokens, _ in made
    ]
    wanted: list[float] = []
    for i, (group, tokens, _) in enumerate(made):
        for k in range(len(tokens)):
            members = [j for j, m in enumerate(made) if m[0] == group and len(m[1]) > k]
            weights = [energy[j][k] + OTB_EPSILON for j in members]
            mean = sum(w * to_go[j][k] for w, j in zip(weights, members, strict=True))
            wanted.append(to_go[i][k] - mean / sum(weights))
    got = optimal_token_baseline(batch, handle_zero_tail=False).advantages.tolist()
    assert got == pytest.approx(wanted, abs=3e-6)
