from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.credit import ESTIMATORS, broadcast, grpo, has_signal, rloo


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


@given(GROUPED, st.booleans())
def test_grpo_equals_the_formula_written_with_the_statistics_module(
    members: list[tuple[float, int]], normalize_std: bool
) -> None:
    rewards, groups = map(list, zip(*members, strict=True))
    got = grpo(torch.tensor(rewards), torch.tensor(groups), normalize_std=normalize_std)
    want = _by_hand(rewards, groups, normalize_std=normalize_std)
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-6, rtol=1e-6)


def test_grpo_hand_worked_values() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([7, 7, 7, 7])
    plain = grpo(rewards, groups, normalize_std=False)
    assert plain.tolist() == [0.5, -0.5, -0.5, 0.5]
    # Bessel: variance 1/3, so each is 0.5 * sqrt(3).
    scaled = grpo(rewards, groups, normalize_std=True)
    assert scaled.tolist() == pytest.approx([0.8660239, -0.8660239, -0.8660239, 0.8660239])


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 9.0, 3.0]), torch.tensor([0, 0, 0, 1, 1])
    got = rloo(rewards, groups, normalize_std=False)
    assert got.tolist() == [0.75, -0.75, 0.0, 6.0, -6.0]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("normalize_std", [True, False])
class TestEveryEstimator:
    def test_equal_rewards_give_exactly_zero_despite_float_noise(
        self, name: str, normalize_std: bool
    ) -> None:
        rewards = torch.tensor([0.1 + 0.2, 0.3, 0.30000001, 1e6, 1e6 + 0.0625])
        groups = torch.tensor([0, 0, 0, 1, 1])
        got = ESTIMATORS[name](rewards, groups, normalize_std=normalize_std)
        assert got.tolist() == [0.0] * 5
        assert not has_signal(rewards, groups).any()

    def test_a_group_of_one_gives_zero_not_the_raw_reward(
        self, name: str, normalize_std: bool
    ) -> None:
        rewards, groups = torch.tensor([0.7, 1.0, 0.0]), torch.tensor([5, 6, 6])
        got = ESTIMATORS[name](rewards, groups, normalize_std=normalize_std)
        assert got[0] == 0.0
        assert got[1] > 0 > got[2]
        assert has_signal(rewards, groups).tolist() == [False, True, True]

    def test_order_of_sessions_and_names_of_groups_do_not_matter(
        self, name: str, normalize_std: bool
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        rewards = torch.rand(24, generator=generator)
        groups = torch.arange(24) // 8
        order = torch.randperm(24, generator=generator)
        straight = ESTIMATORS[name](rewards, groups, normalize_std=normalize_std)
        shuffled = ESTIMATORS[name](
            rewards[order], groups[order] * 1000 - 7, normalize_std=normalize_std
        )
        torch.testing.assert_close(shuffled, straight[order], atol=1e-6, rtol=1e-6)

    def test_a_group_sums_to_zero(self, name: str, normalize_std: bool) -> None:
        rewards, groups = torch.tensor([3.0, 1.0, 1.0, -2.0]), torch.zeros(4, dtype=torch.int64)
        got = ESTIMATORS[name](rewards, groups, normalize_std=normalize_std)
        assert float(got.sum()) == pytest.approx(0.0, abs=1e-6)

    def test_a_reward_that_is_no_number_is_refused(self, name: str, normalize_std: bool) -> None:
        with pytest.raises(ValueError, match="finite"):
            ESTIMATORS[name](
                torch.tensor([float("nan"), 1.0]), torch.tensor([0, 0]), normalize_std=normalize_std
            )


def test_no_sessions_give_no_advantages() -> None:
    empty = torch.zeros(0)
    assert grpo(empty, empty.long(), normalize_std=True).shape == (0,)


def test_broadcast_reaches_trained_tokens_only() -> None:
    advantages = torch.tensor([2.0, -1.0])
    session_of_token = torch.tensor([0, 0, 0, 1, 1])
    mask = torch.tensor([False, True, False, True, True])
    assert broadcast(advantages, session_of_token, mask).tolist() == [0.0, 2.0, 0.0, -1.0, -1.0]
