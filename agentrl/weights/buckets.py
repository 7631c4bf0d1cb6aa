"""Named tensors packed into few flat buffers, and back.

A bucket is one uint8 array, so it is pickled out of band (protocol 5): whoever shares memory with
the object store reads the weights where they lie.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentrl.weights.checksum import checksum

ALIGNMENT = 64
"""Bytes; every tensor begins at a multiple, which suits any dtype and a cache line."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Slice:
    """Where a tensor lies in its bucket."""

    name: str
    dtype: str
    """Name of a torch dtype."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the bucket."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * _dtype(self.dtype).itemsize


@dataclass(slots=True, frozen=True, kw_only=True)
class Bucket:
    """Some tensors, packed."""

    slices: tuple[Slice, ...]
    data: np.ndarray
    """uint8 [bytes]"""


def pack(
    params: Iterable[tuple[str, Tensor]],
    *,
    bucket_bytes: int,
    dtypes: Mapping[str, str],
    sums: dict[str, int],
) -> Iterator[Bucket]:
    """Cast a stream of tensors to what is served and pack it; a bucket leaves when it is full.

    Args:
        params: read once, in order; only the tensors of one bucket are held at a time.
        bucket_bytes: a bucket is at most this large, unless one tensor alone is larger.
        dtypes: name -> dtype it is served in; what is not named keeps its own.
        sums: gets the :func:`~agentrl.weights.checksum.checksum` of every tensor in the
            dtype served, computed where the tensor lies.
    """
    pending: list[tuple[Slice, Tensor]] = []
    size = 0
    for name, value in params:
        kind = dtypes.get(name, str(value.dtype).removeprefix("torch."))
        value = value.detach().to(_dtype(kind)).contiguous()
        sums[name] = checksum(value)
        begin = -(-size // ALIGNMENT) * ALIGNMENT
        num_bytes = value.numel() * value.element_size()
        if pending and begin + num_bytes > bucket_bytes:
            yield _filled(pending, size)
            pending, size, begin = [], 0, 0
        piece = Slice(name=name, dtype=kind, shape=tuple(value.shape), offset=begin)
        pending.append((piece, value))
        size = begin + num_bytes
    if pending:
        yield _filled(pending, size)


def unpack(buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of buckets, in order, without copying them: to be read, not written."""
    for bucket in buckets:
        flat = _read_only(bucket.data)
        for piece in bucket.slices:
            raw = flat[piece.offset : piece.offset + piece.num_bytes]
            yield piece.name, raw.view(_dtype(piece.dtype)).view(piece.shape)


def _filled(pending: list[tuple[Slice, Tensor]], size: int) -> Bucket:
    flat = torch.empty(size, dtype=torch.uint8)
    for piece, value in pending:
        raw = flat[piece.offset : piece.offset + piece.num_bytes]
        raw.view(value.dtype).view(piece.shape).copy_(value)
    return Bucket(slices=tuple(piece for piece, _ in pending), data=flat.numpy())


def _read_only(data: np.ndarray) -> Tensor:
    if not data.size:  # its stride would be 0
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():  # memory of an object store is read-only; nobody writes to it
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
        return torch.from_numpy(data)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
