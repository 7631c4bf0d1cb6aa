from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agentrl.weights.checksum as module
from agentrl.weights.checksum import (
    SliceSums,
    TensorSlice,
    checksum,
    checksum_slice,
    checksums,
    wrapped_sum,
)
from agentrl.weights.served import differences


def _by_hand(values: torch.Tensor) -> int:
    total = sum((i + 1) * bits for i, bits in enumerate(values.view(torch.int32).tolist()))
    return (total + 2**63) % 2**64 - 2**63


def test_equals_the_formula_in_python_integers_and_wraps_around() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert checksum(values.reshape(10, 100)) == _by_hand(values)
    negative = torch.full((300_000,), -1e38)
    assert checksum(negative) == _by_hand(negative)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000)
    whole = checksum(values)
    monkeypatch.setattr(module, "_CHUNK", 7)
    assert checksum(values) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_flipped_bit_or_a_swap_is_noticed_in_every_width(dtype: torch.dtype) -> None:
    values = torch.arange(1, 65).to(dtype).reshape(8, 8)
    original = checksum(values)
    flipped = values.clone()
    flipped.view(torch.uint8)[3, 0] ^= 1
    assert checksum(flipped) != original
    assert checksum(values[[1, 0, *range(2, 8)]]) != original
    assert checksum(values.t()) != original


def test_a_view_is_summed_as_its_copy() -> None:
    values = torch.randn(6, 6)
    assert checksum(values.t()) == checksum(values.t().contiguous())
    assert checksum(values[1:, 2:4]) == checksum(values[1:, 2:4].clone())


def test_differences_name_what_is_missing_changed_or_new() -> None:
    sent = checksums([("a", torch.ones(2)), ("b", torch.ones(2)), ("c", torch.ones(2))])
    served = checksums([("a", torch.ones(2)), ("b", torch.zeros(2)), ("d", torch.ones(2))])
    assert differences(sent, served) == ["b", "c", "d"]
    assert differences(sent, sent) == []


DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, list[TensorSlice]]:
    """A tensor, any strides, and slices that cover it."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    axes = draw(st.permutations(range(len(shape))))
    values = torch.randint(0, 250, [shape[a] for a in axes], generator=generator)
    values = values.to(draw(st.sampled_from(DTYPES))).permute(
        [axes.index(i) for i in range(len(shape))]
    )
    assert list(values.shape) == shape
    cuts = [sorted({0, size, draw(st.integers(0, size))}) for size in shape]
    bounds = [list(itertools.pairwise(cut)) for cut in cuts]
    slices = [
        TensorSlice(
            values[tuple(slice(*bound) for bound in box)],
            tuple(shape),
            tuple(begin for begin, _ in box),
        )
        for box in itertools.product(*bounds)
    ]
    return values, slices


@settings(max_examples=150, deadline=None)
@given(cut=cut_tensors())
def test_slices_add_up_to_the_whole(cut: tuple[torch.Tensor, list[TensorSlice]]) -> None:
    values, slices = cut
    bits = values.contiguous().view(-1)
    bits = bits.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]
    )
    by_hand = wrapped_sum((i + 1) * b for i, b in enumerate(bits.tolist()))
    assert checksum(values) == by_hand
    parts = [checksum_slice(s.view, s.full_shape, s.starts) for s in slices]
    assert wrapped_sum(parts) == by_hand
    assert SliceSums(slices).compute().tolist() == parts


def test_sums_of_slices_follow_their_memory() -> None:
    value = torch.zeros(4, 4)
    sums = SliceSums([TensorSlice.whole(value), TensorSlice(value[2:], (4, 4), (2, 0))])
    value[3, 1] = 1.0
    assert sums.compute().tolist() == [checksum(value)] * 2


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_kernel_computes_the_same_in_tritons_interpreter() -> None:
    code = """
import contextlib, torch
import agentrl.weights.checksum_kernel as kernel
from agentrl.weights.checksum import SliceSums, TensorSlice, _runs
torch.cuda.device = lambda device: contextlib.nullcontext()
kernel._BLOCK, kernel._MAX_ELEMENTS = 64, 150
for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
    full = torch.randint(0, 255, (9, 7, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    cut = [(full[2:5], (2, 0, 0)), (full[:, 2:4], (0, 2, 0)), (full[1:4, 2:6, 1:3], (1, 2, 1))]
    slices = [TensorSlice(view, (9, 7, 5), starts) for view, starts in cut]
    slices += [TensorSlice.whole(full), TensorSlice.whole(full.permute(2, 0, 1))]
    runs = [(i, run) for i, piece in enumerate(slices) for run in _runs(piece)]
    table = kernel.RunTable(runs, num_sums=len(slices), device=torch.device("cpu"))
    assert torch.equal(table.compute(), SliceSums(slices).compute()), dtype
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_computes_the_same(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    full = torch.randint(-(2**31), 2**31, (301, 77, 5), generator=generator).to(dtype)
    cut = [(slice(2, 105), slice(None)), (slice(None), slice(2, 40))]
    for rows, cols in cut:
        starts = (rows.start or 0, cols.start or 0, 0)
        here = checksum_slice(full[rows, cols], full.shape, starts)
        assert checksum_slice(full.cuda()[rows, cols], full.shape, starts) == here
    named = [(f"w{i}", full[i]) for i in range(300)]
    assert checksums((n, v.cuda()) for n, v in named) == checksums(named)
    assert checksum(full.cuda().permute(2, 0, 1)) == checksum(full.permute(2, 0, 1))
