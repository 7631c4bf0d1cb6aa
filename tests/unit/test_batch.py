from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.batch import Batch, RowView, tensor_from_array, tensor_to_array


def make_batch(lengths: list[int], seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths).tolist()])
    return Batch(
        cu_seqlens,
        {
            "ids": torch.randint(0, 99, (tokens,), generator=generator),
            "loss_mask": torch.rand(tokens, generator=generator) < 0.5,
            "logprobs": -torch.rand(tokens, generator=generator),
            "half": torch.rand(tokens, generator=generator).bfloat16(),
        },
        {"session": torch.arange(len(lengths))},
    )


def same(one: Batch, two: Batch) -> bool:
    def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
        return a.keys() == b.keys() and all(
            a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
        )

    layout = torch.equal(one.cu_seqlens, two.cu_seqlens)
    return layout and equal(one.tokens, two.tokens) and equal(one.rows, two.rows)


def out_of_band(value: Any) -> tuple[bytes, list[bytes]]:
    """Pickle as an object store does: buffers that come back are read-only."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return data, [bytes(buffer) for buffer in buffers]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=6), st.sampled_from([2, 4, 5]))
def test_pickling_keeps_every_value_and_dtype(lengths: list[int], protocol: int) -> None:
    batch = make_batch(lengths)
    assert same(pickle.loads(pickle.dumps(batch, protocol=protocol)), batch)


def test_tensors_travel_out_of_band_and_are_read_where_they_lie() -> None:
    batch = make_batch([3000, 1, 5000])
    data, buffers = out_of_band(batch)
    assert len(data) < 3000  # names and shapes only
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = pickle.loads(data, buffers=buffers)
    assert same(back, batch)
    addresses = {np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers}
    assert {value.data_ptr() for value in back.tokens.values()} <= addresses


def test_what_is_selected_of_shared_memory_can_be_written() -> None:
    batch = make_batch([4, 2, 3])
    data, buffers = out_of_band(batch)
    shared = pickle.loads(data, buffers=buffers)
    part = RowView(shared, torch.tensor([1])).select([0])
    part.tokens["ids"].zero_()
    part.rows["session"].zero_()
    assert same(shared, batch)


def test_memory_outlives_the_array_it_came_in() -> None:
    array = np.frombuffer(bytes(range(200)), np.uint8)
    tensor = tensor_from_array(array, "uint8")
    want = tensor.clone()
    del array
    _ = [bytes(200) for _ in range(1000)]
    assert torch.equal(tensor, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int32])
def test_arrays_keep_the_bits_of_every_dtype(dtype: torch.dtype) -> None:
    value = (torch.rand(5, generator=torch.Generator().manual_seed(1)) * 9).to(dtype)
    back = tensor_from_array(*tensor_to_array(value))
    assert back.dtype == dtype and torch.equal(back, value)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.data())
def test_a_view_reads_as_the_rows_it_names(lengths: list[int], data: st.DataObject) -> None:
    batch = make_batch(lengths)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=5))
    view, copy = RowView(batch, torch.tensor(rows, dtype=torch.int64)), batch.select(rows)
    assert same(view.load(), copy)
    assert (view.num_rows, view.num_tokens) == (copy.num_rows, copy.num_tokens)
    assert torch.equal(view.cu_seqlens, copy.cu_seqlens)
    assert torch.equal(view.sum_by_row("loss_mask"), copy.sum_by_row("loss_mask"))
    chosen = list(range(len(rows)))[::-2]
    assert same(view.select(chosen), copy.select(chosen))


def test_sums_by_row_count_bools() -> None:
    batch = make_batch([4, 0, 3])
    want = [int(row.sum()) for row in batch.tokens["loss_mask"].split([4, 0, 3])]
    assert batch.sum_by_row("loss_mask").tolist() == want


def test_a_view_of_everything_costs_nothing() -> None:
    batch = make_batch([4, 2])
    assert RowView(batch, torch.arange(2)).load() is batch
    assert RowView(batch, torch.tensor([1, 0])).load() is not batch
