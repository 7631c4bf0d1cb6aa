from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.dist.micro_batch import plan_micro_batches


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 120))
def test_every_row_once_and_within_the_budget(lengths: list[int], budget: int) -> None:
    plan = plan_micro_batches(lengths, budget)
    assert sorted(row for part in plan for row in part) == list(range(len(lengths)))
    for part in plan:
        assert sum(lengths[row] for row in part) <= budget or len(part) == 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(50, 120))
def test_no_more_micro_batches_than_twice_the_fewest(lengths: list[int], budget: int) -> None:
    assert len(plan_micro_batches(lengths, budget)) <= 2 * sum(lengths) / budget + 1


def test_a_row_longer_than_the_budget_is_alone_not_cut() -> None:
    assert plan_micro_batches([3, 100, 3], 10) == [[0, 2], [1]]


def test_rows_of_like_length_share_a_micro_batch_in_a_fixed_order() -> None:
    lengths = [9, 1, 9, 1, 1]
    assert plan_micro_batches(lengths, 18) == [[1, 3, 4, 0], [2]]
    assert plan_micro_batches([9, 1, 9, 9], 18) == [[1, 0], [2, 3]]


def test_an_impossible_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_micro_batches([1], 0)


def test_the_last_micro_batch_is_no_leftover() -> None:
    lengths = [10] * 9
    sizes = [len(rows) for rows in plan_micro_batches(lengths, 40)]
    assert sizes == [3, 3, 3], "and not 4, 4, 1"
