"""A checksum of weights that notices a changed bit and a changed place.

``sum((i + 1) * bits_i)`` modulo 2^64, as a signed integer, where ``bits_i`` is the memory of
element ``i`` of the flattened tensor, read as an integer of the same width. Exact, so the same on
every device; it tells permuted values apart, and rounding to another dtype too. It adds up over
slices: ranks that hold parts of a tensor each sum their own, and nobody needs the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 2**16
"""Elements at a time on a CPU: their int64 copies stay in its cache."""
_GROUP_BYTES = 256 << 20
"""Of a stream of tensors on a GPU that are summed by one launch."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True, frozen=True)
class TensorSlice:
    """A part of a named tensor, where it lies."""

    view: Tensor
    """Of as many axes as the tensor; any strides."""
    full_shape: tuple[int, ...]
    starts: tuple[int, ...]
    """Of the part, along each axis."""

    @classmethod
    def whole(cls, tensor: Tensor) -> TensorSlice:
        """Return a tensor as a slice of itself."""
        return cls(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())


@dataclass(slots=True, frozen=True)
class Run:
    """Rows of a slice.

    Element (r, c) has the number ``first + r * row_stride + c`` in the whole tensor.
    """

    bits: Tensor
    """Integers [R, C]"""
    first: int
    row_stride: int


def checksum(tensor: Tensor) -> int:
    """Return the checksum of a tensor."""
    return int(SliceSums([TensorSlice.whole(tensor)]).compute()[0])


def checksum_slice(view: Tensor, full_shape: Sequence[int], starts: Sequence[int]) -> int:
    """Return what a slice adds to the checksum of the tensor it was cut from.

    Slices that cover a tensor without overlap add up to its checksum; see :func:`wrapped_sum`.

    Args:
        view: the slice, of as many axes as the tensor.
        full_shape: of the tensor.
        starts: of the slice, along each axis.
    """
    piece = TensorSlice(view, tuple(full_shape), tuple(starts))
    return int(SliceSums([piece]).compute()[0])


def checksums(params: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the checksum of every named tensor; a GPU is waited for once, at the end."""
    sums = StreamSums({})
    for _ in sums.watch(params):
        pass
    return sums.result()


class StreamSums:
    """Checksums of a stream of tensors on its way to whoever reads it.

    Args:
        dtypes: name -> name of the dtype that tensors are cast to; the others stay as they are.

    Attributes:
        num_bytes: that went by, in the dtypes they were cast to.
    """

    def __init__(self, dtypes: Mapping[str, str]) -> None:
        self._dtypes = {name: getattr(torch, dtype) for name, dtype in dtypes.items()}
        self._group: list[tuple[str, Tensor]] = []
        self._names: list[str] = []
        self._sums: list[Tensor] = []
        self._group_bytes = 0
        self.num_bytes = 0

    def watch(self, params: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a stream, cast; a GPU is given a few large sums to compute."""
        for name, value in params:
            cast = value.detach().to(self._dtypes.get(name, value.dtype))
            if self._group and cast.device != self._group[0][1].device:
                self._flush()
            self._group.append((name, cast))
            self._group_bytes += cast.nbytes
            self.num_bytes += cast.nbytes
            if self._group_bytes > _GROUP_BYTES or cast.device.type == "cpu":
                self._flush()  # on a CPU while it is in the cache
            yield name, cast
        self._flush()

    def _flush(self) -> None:
        if self._group:
            slices = [TensorSlice.whole(value) for _, value in self._group]
            self._names += [name for name, _ in self._group]
            self._sums.append(SliceSums(slices).compute())
            self._group, self._group_bytes = [], 0

    def result(self) -> dict[str, int]:
        """Return name -> checksum of what went by; a GPU is waited for here."""
        self._flush()
        values = [value for found in self._sums for value in found.tolist()]
        return dict(zip(self._names, values, strict=True))


def wrapped_sum(parts: Iterable[int]) -> int:
    """Add checksums of slices modulo 2^64; signed, as a checksum is."""
    return (sum(parts) + 2**63) % 2**64 - 2**63


class SliceSums:
    """Checksums of slices that stay where they are: built once, computed after every update.

    Args:
        slices: of one device.
    """

    def __init__(self, slices: Sequence[TensorSlice]) -> None:
        self._num = len(slices)
        self._device = slices[0].view.device if slices else torch.device("cpu")
        assert all(piece.view.device == self._device for piece in slices)
        found = [(slot, run) for slot, piece in enumerate(slices) for run in _runs(piece)]
        self._runs = found
        self._table = None
        if self._device.type == "cuda" and found:
            from agentrl.weights.checksum_kernel import RunTable

            self._table = RunTable(found, num_sums=self._num, device=self._device)

    def compute(self) -> Tensor:
        """Return int64 [slices] on the slices' device; does not wait for a GPU."""
        if self._table is not None:
            return self._table.compute()
        totals = [0] * self._num
        for slot, run in self._runs:
            totals[slot] += _flat_sum(run) if len(run.bits) == 1 else _sum_of_rows(run)
        wrapped = [wrapped_sum([total]) for total in totals]
        return torch.tensor(wrapped, dtype=torch.int64, device=self._device)


def _runs(piece: TensorSlice) -> Iterator[Run]:
    """Cut a slice into few runs of rows."""
    view = piece.view.detach()
    assert view.dim() == len(piece.full_shape) == len(piece.starts)
    if not view.numel():
        return
    axes = _merged(view, piece.full_shape, piece.starts)
    yield from _runs_of_axes(view.view(_INTEGERS[view.element_size()]), axes, 0, 0)


@dataclass(slots=True)
class _Axis:
    size: int
    memory_stride: int
    start: int
    full: int


def _merged(view: Tensor, full_shape: Sequence[int], starts: Sequence[int]) -> list[_Axis]:
    """Return the axes, those that lie one behind the other in memory and tensor taken together."""
    axes = [
        _Axis(*found)
        for found in zip(view.shape, view.stride(), starts, full_shape, strict=True)
        if found[3] != 1
    ]
    merged: list[_Axis] = []
    for axis in axes:
        before = merged[-1] if merged else None
        if (
            before is not None
            and axis.size == axis.full
            and (before.memory_stride == axis.memory_stride * axis.size or before.size == 1)
        ):
            size, full = before.size * axis.size, before.full * axis.full
            merged[-1] = _Axis(size, axis.memory_stride, before.start * axis.full, full)
        else:
            merged.append(axis)
    return merged


def _runs_of_axes(bits: Tensor, axes: list[_Axis], first: int, offset: int) -> Iterator[Run]:
    strides = [1]
    for axis in reversed(axes[1:]):
        strides.insert(0, strides[0] * axis.full)
    if len(axes) <= 2:
        first += sum(axis.start * stride for axis, stride in zip(axes, strides, strict=False))
        shape = [axis.size for axis in axes]
        memory = [axis.memory_stride for axis in axes]
        shape, memory = [1] * (2 - len(axes)) + shape, [0] * (2 - len(axes)) + memory
        values = bits.as_strided(shape, memory, bits.storage_offset() + offset)
        yield Run(values, first, strides[0] if len(axes) == 2 else 0)
        return
    outer = axes[0]
    for i in range(outer.size):
        number = first + (outer.start + i) * strides[0]
        yield from _runs_of_axes(bits, axes[1:], number, offset + i * outer.memory_stride)


def _flat_sum(run: Run) -> int:
    bits = run.bits[0]
    places = torch.arange(1, min(_CHUNK, len(bits)) + 1, device=bits.device)
    buffer = torch.empty_like(places)
    total = 0
    for start in range(0, len(bits), _CHUNK):
        chunk = bits[start : start + _CHUNK]
        values = buffer[: len(chunk)].copy_(chunk)
        total += int(values.sum()) * (run.first + start)
        total += int(values.mul_(places[: len(chunk)]).sum())  # wraps around, as intended
    return total


def _sum_of_rows(run: Run) -> int:
    num_rows, num_cols = run.bits.shape
    step = max(1, _CHUNK // num_cols)
    places = run.first + 1 + torch.arange(num_cols, device=run.bits.device)
    numbers = torch.arange(num_rows, device=run.bits.device) * run.row_stride
    total = 0
    for start in range(0, num_rows, step):
        values = run.bits[start : start + step].to(torch.int64)
        total += int((values * (numbers[start : start + step, None] + places)).sum())
    return total
