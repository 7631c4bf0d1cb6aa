from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algo.aggregate import AGGREGATIONS, Denominators, denominators, token_weights

# Session 0 has two rows (segments) of 1 and 2 trained tokens, which are two turns; session 1 one
# row of 1; session 2 nothing that is trained; session 3 a turn of 1 and one of 2.
SESSION = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3])
TURN = torch.tensor([0, -1, 1, 1, 0, -1, 0, 0, 0, 1, 1])
MASK = torch.tensor([1, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]).bool()
LOSS = torch.tensor([1.0, 50.0, 2.0, 3.0, 10.0, 50.0, 50.0, 50.0, 4.0, 6.0, 8.0])
PER_SESSION = [[1.0, 2.0, 3.0], [10.0], [4.0, 6.0, 8.0]]
PER_TURN = [[1.0], [2.0, 3.0], [10.0], [4.0], [6.0, 8.0]]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _weights(mask: Tensor, mode: str, totals: Denominators | None = None) -> Tensor:
    totals = totals or denominators(mask, SESSION, TURN)
    return token_weights(mask, SESSION, TURN, mode, totals, norm_tokens=20)


WORKED = {
    "token-mean": _mean(sum(PER_SESSION, [])),
    "token-sum": sum(sum(PER_SESSION, [])),
    "seq-mean-token-sum": _mean([sum(losses) for losses in PER_SESSION]),
    "seq-mean-token-sum-norm": _mean([sum(losses) for losses in PER_SESSION]) / 20,
    "seq-mean-token-mean": _mean([_mean(losses) for losses in PER_SESSION]),
    "session-mean": _mean([_mean(losses) for losses in PER_SESSION]),
    "turn-mean": _mean([_mean(losses) for losses in PER_TURN]),
}


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_weighted_sum_equals_the_mean_it_is_named_after(mode: str) -> None:
    weights = _weights(MASK, mode)
    assert float((weights * LOSS).sum()) == pytest.approx(WORKED[mode])
    assert not weights[~MASK].any()


def test_denominators_leave_out_what_has_no_trained_token() -> None:
    totals = denominators(MASK, SESSION, TURN)
    assert totals == Denominators(num_tokens=7, num_sessions=3, num_turns=5)
    assert denominators(MASK, SESSION).num_turns is None


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_nothing_to_train_gives_zeros_not_nan(mode: str) -> None:
    assert not _weights(torch.zeros_like(MASK), mode).any()
    nothing = torch.zeros(0, dtype=torch.int64)
    totals = denominators(nothing.bool(), nothing, nothing)
    weights = token_weights(nothing.bool(), nothing, nothing, mode, totals, norm_tokens=1)
    assert weights.shape == (0,)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_parts_of_a_mini_batch_add_up_to_the_whole(mode: str) -> None:
    totals = denominators(MASK, SESSION, TURN)
    parts = [
        token_weights(MASK[of], SESSION[of], TURN[of], mode, totals, norm_tokens=20)
        for of in (SESSION == 0, SESSION == 1, SESSION == 2, SESSION == 3)
    ]
    torch.testing.assert_close(torch.cat(parts), _weights(MASK, mode, totals))


@given(
    mode=st.sampled_from(sorted(AGGREGATIONS)),
    mask=st.lists(st.booleans(), min_size=len(MASK), max_size=len(MASK)),
    order=st.permutations(range(len(MASK))),
)
def test_weights_follow_their_tokens_and_means_add_up_to_one(
    mode: str, mask: list[bool], order: list[int]
) -> None:
    trained, index = torch.tensor(mask) & (TURN >= 0), torch.tensor(order)
    weights = _weights(trained, mode)
    totals = denominators(trained[index], SESSION[index], TURN[index])
    shuffled = token_weights(
        trained[index], SESSION[index], TURN[index], mode, totals, norm_tokens=20
    )
    torch.testing.assert_close(shuffled, weights[index])
    if "sum" not in mode and bool(trained.any()):
        assert float(weights.sum()) == pytest.approx(1.0)


def test_a_turn_is_one_of_its_session() -> None:
    """Turn 0 of two sessions are two turns, whatever the labels of the sessions."""
    sessions = torch.tensor([7, 7, -3, -3])
    turns = torch.zeros(4, dtype=torch.int32)
    mask = torch.ones(4, dtype=torch.bool)
    assert denominators(mask, sessions, turns).num_turns == 2


def test_an_unknown_mode_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="token-mean"):
        _weights(MASK, "mean")


def test_modes_without_what_they_need_are_refused() -> None:
    totals = denominators(MASK, SESSION)
    with pytest.raises(ValueError, match="turn of every token"):
        token_weights(MASK, SESSION, None, "turn-mean", totals)
    for norm_tokens in (None, 0):
        with pytest.raises(ValueError, match="norm_tokens"):
            token_weights(
                MASK, SESSION, TURN, "seq-mean-token-sum-norm", totals, norm_tokens=norm_tokens
            )


def test_a_trained_token_without_a_turn_is_refused() -> None:
    with pytest.raises(ValueError, match="turn -1"):
        denominators(torch.ones_like(MASK), SESSION, TURN)
