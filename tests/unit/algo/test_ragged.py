from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algo.ragged import (
    BLOCK,
    count_up,
    cumulative_sum,
    discounted_to_go,
    last_elements,
    position_in_segment,
    segment_sum,
    spread,
    whiten,
)

LENGTHS = st.lists(st.integers(0, 2 * BLOCK + 3), max_size=12).map(
    lambda lengths: torch.tensor(lengths, dtype=torch.int64)
)


def random_values(lengths: torch.Tensor, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(int(lengths.sum()), generator=rng, dtype=torch.float64)


def split(values: torch.Tensor, lengths: torch.Tensor) -> list[list[float]]:
    return [part.tolist() for part in values.split(lengths.tolist())]


@settings(deadline=None)
@given(LENGTHS, st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_discounted_to_go_equals_the_loop(lengths: torch.Tensor, discount: float) -> None:
    values = random_values(lengths)
    wanted: list[float] = []
    for segment in split(values, lengths):
        running, backwards = 0.0, []
        for value in reversed(segment):
            running = value + discount * running
            backwards.append(running)
        wanted += reversed(backwards)
    got = discounted_to_go(values, lengths, discount)
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), atol=1e-9, rtol=0)


def test_a_segment_longer_than_a_block_of_blocks() -> None:
    lengths = torch.tensor([5, BLOCK * BLOCK * 3 + 7, 1])
    got = discounted_to_go(torch.ones(int(lengths.sum())), lengths, 1.0)
    assert got[5:-1].tolist() == list(range(int(lengths[1]), 0, -1))
    assert got[:5].tolist() == [5, 4, 3, 2, 1] and got[-1] == 1


@settings(deadline=None)
@given(LENGTHS)
def test_sums_positions_and_spreads_segment_by_segment(lengths: torch.Tensor) -> None:
    values = random_values(lengths)
    segments = split(values, lengths)
    assert segment_sum(values, lengths).tolist() == pytest.approx([sum(s) for s in segments])
    running = [sum(s[: i + 1]) for s in segments for i in range(len(s))]
    assert cumulative_sum(values, lengths).tolist() == pytest.approx(running)
    positions = [i for s in segments for i in range(len(s))]
    assert position_in_segment(lengths).tolist() == positions
    numbers = torch.arange(len(lengths))
    repeated = [n for n, s in enumerate(segments) for _ in s]
    assert spread(numbers, lengths).tolist() == repeated
    counted = [100 * n + i for n, s in enumerate(segments) for i in range(len(s))]
    assert count_up(100 * numbers, lengths).tolist() == counted
    ends = [i for i, n in enumerate(repeated) if i + 1 == len(repeated) or repeated[i + 1] != n]
    assert last_elements(lengths).tolist() == ends


def test_the_sum_of_a_segment_depends_on_nothing_around_it() -> None:
    values = torch.tensor([1e16, 0.1, 0.2, -1e16], dtype=torch.float64)
    assert segment_sum(values, torch.tensor([1, 2, 1]))[1] == 0.1 + 0.2


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=50))
def test_whitened_values_have_mean_zero_and_variance_one_or_are_all_zero(
    numbers: list[float],
) -> None:
    values = torch.tensor(numbers, dtype=torch.float64)
    got = whiten(values)
    if float(values.max() - values.min()) > 0.1:
        assert float(got.mean()) == pytest.approx(0, abs=1e-9)
        assert float(got.var()) == pytest.approx(1, abs=1e-4)
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("numbers", [[], [3.0], [0.1] * 7, [0.1 + 0.2, 0.3]])
def test_equal_values_whiten_to_exactly_zero(numbers: list[float]) -> None:
    assert whiten(torch.tensor(numbers, dtype=torch.float64)).tolist() == [0.0] * len(numbers)
