from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algo.group_baselines import (
    gdpo,
    gpg,
    group_statistics,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from agentrl.testing.credit import SessionCredit, make_credit


def of(*outcomes: float, groups: list[int] | None = None, tokens: list[int] | None = None):
    groups = groups or [0] * len(outcomes)
    tokens = tokens or [1] * len(outcomes)
    return make_credit(
        *(
            SessionCredit(group=g, outcome=r, tokens=[n])
            for r, g, n in zip(outcomes, groups, tokens, strict=True)
        )
    )


def _by_hand(rewards: list[float], groups: list[int], *, normalize_std: bool) -> list[float]:
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(members) == 1 or max(members) - min(members) < 1e-6:
            out.append(0.0)
            continue
        centred = reward - statistics.fmean(members)
        out.append(centred / (statistics.stdev(members) + 1e-6) if normalize_std else centred)
    return out


GROUPED = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0]), st.integers(0, 3)),
    min_size=1,
    max_size=24,
)


@settings(deadline=None)
@given(GROUPED, st.booleans())
def test_grpo_equals_the_formula_written_with_the_statistics_module(
    members: list[tuple[float, int]], normalize_std: bool
) -> None:
    rewards, groups = map(list, zip(*members, strict=True))
    got = grpo(of(*rewards, groups=groups), normalize_std=normalize_std).advantages
    want = _by_hand(rewards, groups, normalize_std=normalize_std)
    assert got.tolist() == pytest.approx(want, abs=1e-9)


def test_grpo_hand_worked_values() -> None:
    batch = of(1.0, 0.0, 0.0, 1.0)
    assert grpo(batch, normalize_std=False).advantages.tolist() == [0.5, -0.5, -0.5, 0.5]
    # Bessel: variance 1/3, so each is 0.5 * sqrt(3).
    wanted = [0.8660239, -0.8660239, -0.8660239, 0.8660239]
    assert grpo(batch).advantages.tolist() == pytest.approx(wanted)


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    got = rloo(of(1.0, 0.0, 0.5, 9.0, 3.0, groups=[0, 0, 0, 1, 1])).advantages
    assert got.tolist() == [0.75, -0.75, 0.0, 6.0, -6.0]


def test_turn_rewards_and_penalties_count_in_what_a_session_earned() -> None:
    batch = make_credit(
        SessionCredit(tokens=[1, 1], turn_rewards=[0.5, 0.25], outcome=1.0, penalties=[0, -0.75]),
        SessionCredit(tokens=[1], penalties=[0]),
    )
    assert rloo(batch).advantages.tolist() == [1.0, 1.0, -1.0]


def test_a_member_without_tokens_counts_in_the_baseline() -> None:
    batch = make_credit(SessionCredit(outcome=1.0), SessionCredit(tokens=[], outcome=0.5))
    assert rloo(batch).advantages.tolist() == [0.5]


def test_opo_weighs_the_mean_by_sampled_tokens() -> None:
    got = opo(of(1.0, 0.0, tokens=[1, 3])).advantages
    assert got.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_reinforce_plus_plus_baseline_whitens_over_tokens() -> None:
    got = reinforce_plus_plus_baseline(of(1.0, 0.0, tokens=[1, 3])).advantages.tolist()
    # Centred: 0.5, -0.5 three times; mean -0.25, Bessel variance 0.25.
    assert got == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-6)


def test_grpo_passk_credits_the_best_with_its_lead() -> None:
    batch = of(0.25, 1.0, 0.5, 3.0, 3.0, groups=[0, 0, 0, 1, 1])
    plain = grpo_passk(batch, normalize_std=False).advantages
    assert plain.tolist() == [0, 0.5, 0, 0, 0]
    std = statistics.stdev([0.25, 1.0, 0.5])
    scaled = grpo_passk(batch).advantages
    assert scaled.tolist() == pytest.approx([0, 0.5 / (std + 1e-6), 0, 0, 0])


def test_grpo_passk_with_a_tie_at_the_top_credits_nobody() -> None:
    assert grpo_passk(of(1.0, 1.0, 0.0)).advantages.tolist() == [0, 0, 0]


def test_gpg_scales_by_the_share_of_sessions_that_earned_something() -> None:
    got = gpg(of(1.0, 0.0, 0.0, 0.0, groups=[0, 0, 1, 1])).advantages
    assert got.tolist() == [2.0, -2.0, 0.0, 0.0]  # alpha = 4 / 1


def test_gpg_of_rewards_that_are_all_zero_is_zero() -> None:
    assert gpg(of(0.0, 0.0)).advantages.tolist() == [0.0, 0.0]


def named(first: float, second: float, **more) -> SessionCredit:
    return SessionCredit(outcome=first + second, named={"a": first, "b": second}, **more)


def test_gdpo_lets_no_reward_drown_another_by_its_scale() -> None:
    batch = make_credit(named(100.0, 0.0), named(0.0, 1.0), named(0.0, 0.0))
    got = gdpo(batch).advantages.tolist()
    assert got == pytest.approx([3**-0.5, 3**-0.5, -2 * 3**-0.5], abs=1e-5)
    assert gdpo(batch, normalize_std=False).advantages[1] < 0


def test_gdpo_multiplies_by_the_weight_that_dividing_by_the_deviation_took_out() -> None:
    batch = make_credit(named(3.0, 0.0), named(0.0, -2.0), named(0.0, 0.0))
    weights = {
        "a": torch.full((3,), 3.0, dtype=torch.float64),
        "b": torch.full((3,), -2.0, dtype=torch.float64),
    }
    object.__setattr__(batch, "named_weights", weights)
    unweighted = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]  # before their weights 3 and -2
    total = torch.zeros(3, dtype=torch.float64)
    for weight, rewards in zip([3.0, -2.0], unweighted, strict=True):
        r = torch.tensor(rewards, dtype=torch.float64)
        total += weight * (r - r.mean()) / r.std()
    wanted = (total - total.mean()) / total.std()
    assert gdpo(batch).advantages.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


def test_gdpo_without_named_rewards_says_so() -> None:
    with pytest.raises(ValueError, match="names none"):
        gdpo(of(1.0, 0.0))


def test_gdpo_adds_penalties_centred_by_group() -> None:
    batch = make_credit(named(1.0, 1.0, penalties=[-0.5]), named(1.0, 1.0, penalties=[0.5]))
    assert gdpo(batch).advantages.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_statistics_refuse_what_is_no_reward() -> None:
    with pytest.raises(ValueError, match="must both be"):
        group_statistics(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="finite"):
        group_statistics(torch.tensor([0.0, float("nan")]), torch.zeros(2, dtype=torch.int64))
