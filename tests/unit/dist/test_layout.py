from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.dist.layout import head_problems, layout_problems, nearest_divisors


def _problems(num_ranks: int, shard_size: int, sequence_parallel: int) -> list[str]:
    found = layout_problems(
        "actor",
        num_ranks=num_ranks,
        shard_size=shard_size,
        sequence_parallel=sequence_parallel,
    )
    return list(found)


@given(st.integers(1, 64), st.data())
def test_what_divides_is_not_refused(num_ranks: int, data: st.DataObject) -> None:
    divisors = [value for value in range(1, num_ranks + 1) if num_ranks % value == 0]
    shard_size, shared = (
        data.draw(st.sampled_from([0, *divisors])),
        data.draw(st.sampled_from(divisors)),
    )
    assert _problems(num_ranks, shard_size, shared) == []


@given(st.integers(1, 64), st.integers(-3, 70))
def test_the_values_that_a_refusal_names_are_accepted(num_ranks: int, wanted: int) -> None:
    if found := _problems(num_ranks, 0, wanted):
        (problem,) = found
        for near in nearest_divisors(num_ranks, wanted):
            assert str(near) in problem
            assert _problems(num_ranks, 0, near) == []


def test_a_refusal_says_what_would_do() -> None:
    (shards,) = _problems(6, 4, 1)
    assert shards.startswith("actor.shard_size=4") and "3 or 6" in shards and "6 ranks" in shards
    (shared,) = _problems(8, 0, 3)
    assert shared.startswith("actor.sequence_parallel=3") and "2 or 4" in shared
    assert _problems(1, 0, 2)[0].endswith(
        "must divide the 1 rank of its pool; write 1, or have 2 ranks: cluster=ray "
        "placement.pools.train.ranks=2"
    )
    assert len(_problems(4, 3, 0)) == 2


@pytest.mark.parametrize(("num_heads", "shared", "near"), [(14, 4, "2 or 7"), (16, 3, "2 or 4")])
def test_heads_that_cannot_be_dealt_out_are_refused(num_heads: int, shared: int, near: str) -> None:
    (problem,) = head_problems("actor", num_heads=num_heads, sequence_parallel=shared)
    assert near in problem and f"{num_heads} attention heads" in problem
    assert not list(head_problems("actor", num_heads=num_heads, sequence_parallel=2))
