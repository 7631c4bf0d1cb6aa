from __future__ import annotations

import pytest
import torch

from agentrl.algo.aggregate import AGGREGATIONS, denominators, token_weights

# Session 0 has two rows (segments) of 1 and 2 trained tokens, session 1 one row of 1, session 2
# nothing that is trained.
SESSION = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
MASK = torch.tensor([True, False, True, True, True, False, False, False])
LOSS = torch.tensor([1.0, 50.0, 2.0, 3.0, 10.0, 50.0, 50.0, 50.0])


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("token-mean", (1 + 2 + 3 + 10) / 4),
        ("seq-mean-token-sum", ((1 + 2 + 3) + 10) / 2),
        ("seq-mean-token-mean", ((1 + 2 + 3) / 3 + 10) / 2),
    ],
)
def test_weighted_sum_equals_the_mean_it_is_named_after(mode: str, want: float) -> None:
    totals = denominators(MASK, SESSION)
    weights = token_weights(MASK, SESSION, mode, totals)
    assert float((weights * LOSS).sum()) == pytest.approx(want)
    assert weights[~MASK].tolist() == [0.0] * 4


def test_denominators_leave_out_sessions_without_a_trained_token() -> None:
    totals = denominators(MASK, SESSION)
    assert (totals.num_tokens, totals.num_sessions) == (4, 2)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_nothing_to_train_gives_zeros_not_nan(mode: str) -> None:
    nothing = torch.zeros_like(MASK)
    weights = token_weights(nothing, SESSION, mode, denominators(nothing, SESSION))
    assert weights.tolist() == [0.0] * 8


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_parts_of_a_mini_batch_add_up_to_the_whole(mode: str) -> None:
    totals = denominators(MASK, SESSION)
    whole = token_weights(MASK, SESSION, mode, totals)
    parts = [
        token_weights(MASK[s == SESSION], SESSION[s == SESSION], mode, totals) for s in (0, 1, 2)
    ]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_an_unknown_mode_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="token-mean"):
        token_weights(MASK, SESSION, "mean", denominators(MASK, SESSION))
