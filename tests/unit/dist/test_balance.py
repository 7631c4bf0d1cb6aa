from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.dist.balance import MANY_ROWS, partition_rows

_LENGTHS = st.lists(st.integers(0, 5000), max_size=60)


@given(_LENGTHS, st.integers(1, 9))
def test_every_row_is_dealt_once_and_sums_differ_by_at_most_the_longest(
    lengths: list[int], num_parts: int
) -> None:
    parts = partition_rows(lengths, num_parts)
    assert len(parts) == num_parts
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    sums = [sum(lengths[row] for row in part) for part in parts]
    assert max(sums) - min(sums) <= max(lengths, default=0)


@given(_LENGTHS, st.integers(1, 9))
def test_the_same_rows_are_dealt_the_same_way(lengths: list[int], num_parts: int) -> None:
    assert partition_rows(lengths, num_parts) == partition_rows(list(lengths), num_parts)


@pytest.mark.parametrize("num_rows", [256, MANY_ROWS + 1])
def test_lognormal_lengths_are_dealt_evenly(num_rows: int) -> None:
    lengths = [int(1200 * 1.0137 ** (7919 * row % 200 - 100)) for row in range(num_rows)]
    sums = [sum(lengths[row] for row in part) for part in partition_rows(lengths, 8)]
    assert max(sums) <= 1.002 * sum(lengths) / 8


@given(st.integers(0, 5000), st.integers(1, 9))
def test_many_rows_are_dealt_once_too(longest: int, num_parts: int) -> None:
    lengths = [7919 * row % (longest + 1) for row in range(MANY_ROWS + 1)]
    parts = partition_rows(lengths, num_parts)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    sums = [sum(lengths[row] for row in part) for part in parts]
    assert max(sums) - min(sums) <= longest


def test_the_classic_case_where_greedy_fails() -> None:
    parts = partition_rows([8, 7, 6, 5, 4], 2)  # greedy gives 17 and 13
    assert sorted(sum([8, 7, 6, 5, 4][row] for row in part) for part in parts) == [14, 16]


def test_a_rank_without_rows_is_there() -> None:
    assert partition_rows([5], 3) == [[0], [], []]
    assert partition_rows([], 2) == [[], []]


def test_no_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="num_parts=0"):
        partition_rows([1], 0)
