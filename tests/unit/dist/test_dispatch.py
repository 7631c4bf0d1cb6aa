from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.batch import Batch
from agentrl.dist.dispatch import (
    AllToAll,
    Call,
    Collective,
    DataParallel,
    Handle,
    Layout,
    OneToAll,
    RankZero,
    Shard,
)


def layout(*data_ranks: int) -> Layout:
    return Layout(len(data_ranks), lambda mesh: data_ranks)


def batch_of(lengths: Sequence[int]) -> Batch:
    rows = [torch.full((n,), index) for index, n in enumerate(lengths)]
    return Batch.from_rows({"ids": rows or [torch.zeros(0)]})


def run(dispatch: Any, place: Layout, call: Call, method: Any) -> Any:
    """Do what a group does, in one process."""
    calls = dispatch.split(call, place)
    results = [None if c is None else method(*c.args, **c.kwargs) for c in calls]
    return dispatch.collect(results, calls, place)


def test_one_to_all_repeats_the_call_and_lists_results() -> None:
    assert run(OneToAll(), layout(0, 1), Call((3,), {"b": 4}), lambda a, b: a * b) == [12, 12]


def test_all_to_all_deals_one_entry_to_each_rank() -> None:
    call = Call(([1, 2],), {"b": (10, 20)})
    assert run(AllToAll(), layout(0, 1), call, lambda a, b: a + b) == [11, 22]


def test_all_to_all_refuses_another_number_of_entries() -> None:
    with pytest.raises(ValueError, match="sequence of 2 entries.* got 3"):
        AllToAll().split(Call(([1, 2, 3],)), layout(0, 1))


def test_rank_zero_is_called_alone_and_collective_asks_everyone() -> None:
    ranks = layout(0, 1, 2)
    assert RankZero().split(Call((1,)), ranks)[1:] == [None, None]
    assert run(RankZero(), ranks, Call((1,)), lambda a: a) == 1
    assert [call is None for call in Collective().split(Call((1,)), ranks)] == [False] * 3
    assert Collective().collect([5, None, None], [Call()] * 3, ranks) == 5


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_data_parallel_gives_back_what_one_rank_would(
    lengths: list[int], dp_size: int, sequence_parallel: int
) -> None:
    batch = batch_of(lengths)
    place = layout(*[r // sequence_parallel for r in range(dp_size * sequence_parallel)])

    def method(shard: Shard, scale: int) -> dict[str, Any]:
        assert isinstance(shard.source, Batch)
        own = shard.source.select(shard.rows)
        return {
            "ids": own.tokens["ids"] * scale,
            "tokens": own.num_tokens,
            "longest_max": int(own.lengths.max()) if own.num_rows else 0,
        }

    got = run(DataParallel(), place, Call((batch, 3)), method)
    assert torch.equal(got["ids"], batch.tokens["ids"] * 3)
    assert got["tokens"] == batch.num_tokens
    assert got["longest_max"] == max(lengths)


def test_ranks_of_one_data_rank_get_the_same_rows() -> None:
    calls = DataParallel().split(Call((batch_of([3, 1, 2, 5]),)), layout(0, 0, 1, 1))
    rows = [call.args[0].rows.tolist() for call in calls if call is not None]
    assert rows[0] == rows[1] and rows[2] == rows[3]
    assert sorted(rows[0] + rows[2]) == [0, 1, 2, 3]


def test_the_mesh_is_that_of_the_named_role() -> None:
    meshes = {"actor": (0, 1), "critic": (0, 0)}
    place = Layout(2, lambda mesh: meshes[mesh or ""])
    dispatch = DataParallel(mesh_argument=0)

    def rows(role: str) -> list[list[int]]:
        calls = dispatch.split(Call((role, batch_of([1, 1]))), place)
        return [call.args[1].rows.tolist() for call in calls if call is not None]

    assert rows("actor") == [[0], [1]]
    assert rows("critic") == [[0, 1], [0, 1]]


def test_replicated_numbers_are_not_added() -> None:
    dispatch = DataParallel(replicated=frozenset({"lr"}))
    got = run(dispatch, layout(0, 1), Call((batch_of([1, 1]),)), lambda s: {"lr": 0.5, "loss": 2.0})
    assert got == {"lr": 0.5, "loss": 4.0}


def test_other_results_are_listed_by_data_rank() -> None:
    place = layout(0, 0, 1, 1)
    got = run(DataParallel(), place, Call((batch_of([2, 1]),)), lambda s: s.rows.tolist())
    assert got == [[0], [1]]


def test_a_handle_that_knows_its_rows_is_cut_without_being_seen() -> None:
    handle = Handle("somewhere", batch_of([4, 2]).cu_seqlens)
    calls = DataParallel().split(Call((handle,)), layout(0, 1))
    assert [call.args[0].source for call in calls if call is not None] == [handle, handle]


def test_data_parallel_refuses_a_call_without_batch_or_with_two_layouts() -> None:
    for args in [(), (batch_of([1, 2]), batch_of([2, 1]))]:
        with pytest.raises(ValueError, match="takes a Batch"):
            DataParallel().split(Call(args), layout(0))


def test_a_result_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(5,\) for rows with 3 tokens"):
        run(DataParallel(), layout(0), Call((batch_of([1, 2]),)), lambda s: {"x": torch.zeros(5)})


def test_a_field_that_a_rank_leaves_out_is_refused() -> None:
    def method(shard: Shard) -> dict[str, Any]:
        return {} if 1 in shard.rows else {"x": torch.zeros(1)}

    with pytest.raises(ValueError, match="'x' came from 1 of 2 ranks"):
        run(DataParallel(), layout(0, 1), Call((batch_of([1, 1]),)), method)
