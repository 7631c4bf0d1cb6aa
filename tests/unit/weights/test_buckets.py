"""What is packed comes out bit for bit, in few buffers of bounded size."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.weights.buckets import Bucket, pack, unpack
from agentrl.weights.checksum import checksum

DTYPES = ("float32", "bfloat16", "float16", "int64", "uint8")


@st.composite
def tensors(draw: st.DrawFn) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=8))
    made = []
    for i, shape in enumerate(shapes):
        dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
        value = torch.randint(0, 200, shape, generator=generator).to(dtype)
        made.append((f"layer.{i}", value))
    return made


@settings(max_examples=60, deadline=None)
@given(params=tensors(), bucket_bytes=st.integers(1, 4096))
def test_tensors_come_out_as_they_went_in(
    params: list[tuple[str, Tensor]], bucket_bytes: int
) -> None:
    sums: dict[str, int] = {}
    buckets = list(pack(params, bucket_bytes=bucket_bytes, dtypes={}, sums=sums))
    found = list(unpack(buckets))
    assert [name for name, _ in found] == [name for name, _ in params]
    for (_, sent), (name, got) in zip(params, found, strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape and torch.equal(got, sent)
        assert sums[name] == checksum(sent)
    for bucket in buckets:
        assert bucket.data.nbytes <= bucket_bytes or len(bucket.slices) == 1
        assert all(piece.offset % 64 == 0 for piece in bucket.slices)


def test_a_tensor_is_packed_and_summed_in_the_dtype_that_is_served() -> None:
    value = torch.tensor([1.0, 1.0 + 2**-20])
    sums: dict[str, int] = {}
    (bucket,) = pack([("w", value)], bucket_bytes=1 << 20, dtypes={"w": "bfloat16"}, sums=sums)
    ((_, got),) = unpack([bucket])
    assert got.dtype == torch.bfloat16 and bucket.data.nbytes == 4
    assert sums["w"] == checksum(value.to(torch.bfloat16)) != checksum(value)


def test_weights_are_pickled_out_of_band_and_read_where_they_lie() -> None:
    buffers: list[pickle.PickleBuffer] = []
    params = [("w", torch.arange(1000, dtype=torch.float32))]
    (bucket,) = pack(params, bucket_bytes=1 << 20, dtypes={}, sums={})
    frame = pickle.dumps(bucket, protocol=5, buffer_callback=buffers.append)
    assert len(frame) < 1000 and sum(len(b.raw()) for b in buffers) == 4000
    memory = bytes(buffers[0].raw())
    copy: Bucket = pickle.loads(frame, buffers=[memory])
    assert not copy.data.flags.writeable
    ((_, got),) = unpack([copy])
    assert got.data_ptr() == copy.data.ctypes.data and torch.equal(got, params[0][1])


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10_000])
def test_a_bucket_leaves_before_the_next_tensors_are_made(bucket_bytes: int) -> None:
    made = 0

    def stream():
        nonlocal made
        for i in range(10):
            made += 1
            yield f"w{i}", torch.zeros(100)

    first = next(pack(stream(), bucket_bytes=bucket_bytes, dtypes={}, sums={}))
    assert made == min(len(first.slices) + 1, 10)
