"""The checksum on a GPU: one launch for many tensors, and nothing but their memory is read."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false
# Kernels are launched with options that their signatures do not name.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from agentrl.weights.checksum import Run

_BLOCK = 8192
"""Elements of one program."""
_MAX_ELEMENTS = 2**30
"""Of one table row, so that its elements are counted in 32 bits."""
_COLUMNS = 7
"""Of the table: address, rows, columns, their strides in memory, first number, stride of rows."""


@dataclass(slots=True, frozen=True)
class _Launch:
    """Runs of one kind: elements of one width, contiguous or not."""

    width: int
    flat: bool
    table: Tensor
    """int64 [runs, _COLUMNS]"""
    blocks: Tensor
    """int32 [programs, 2]: run, and which of its blocks."""
    slots: Tensor
    """int64 [programs]: the sum that a program adds to."""


class RunTable:
    """Where runs lie, on their GPU.

    Args:
        runs: (number of the sum, run).
        num_sums: of them.
        device: of the runs.
    """

    def __init__(
        self, runs: Sequence[tuple[int, Run]], *, num_sums: int, device: torch.device
    ) -> None:
        self._num_sums, self._device = num_sums, device
        kinds: dict[tuple[int, bool], list[tuple[int, Run]]] = {}
        for slot, run in runs:
            for part in _short(run):
                flat = len(part.bits) == 1 and part.bits.stride(1) == 1
                kinds.setdefault((part.bits.element_size(), flat), []).append((slot, part))
        self._launches = [_launch(*kind, found, device) for kind, found in kinds.items()]

    def compute(self) -> Tensor:
        """Return int64 [sums]."""
        sums = torch.zeros(self._num_sums, dtype=torch.int64, device=self._device)
        with torch.cuda.device(self._device):
            for launch in self._launches:
                partial = torch.empty_like(launch.slots)
                _sum_kernel[(len(partial),)](
                    launch.table,
                    launch.blocks,
                    partial,
                    WIDTH=launch.width,
                    FLAT=launch.flat,
                    COLUMNS=_COLUMNS,
                    BLOCK=_BLOCK,
                    num_warps=8,
                )
                sums.index_add_(0, launch.slots, partial)
        return sums


def _short(run: Run) -> Iterator[Run]:
    """Cut a run of more than ``_MAX_ELEMENTS``."""
    num_rows, num_cols = run.bits.shape
    if run.bits.numel() <= _MAX_ELEMENTS:
        yield run
    elif num_rows > 1:
        half = num_rows // 2
        yield from _short(Run(run.bits[:half], run.first, run.row_stride))
        first = run.first + half * run.row_stride
        yield from _short(Run(run.bits[half:], first, run.row_stride))
    else:
        half = num_cols // 2
        yield from _short(Run(run.bits[:, :half], run.first, run.row_stride))
        yield from _short(Run(run.bits[:, half:], run.first + half, run.row_stride))


def _launch(
    width: int, flat: bool, runs: Sequence[tuple[int, Run]], device: torch.device
) -> _Launch:
    rows = [
        [run.bits.data_ptr(), *run.bits.shape, *run.bits.stride(), run.first, run.row_stride]
        for _, run in runs
    ]
    counts = np.array([-(-run.bits.numel() // _BLOCK) for _, run in runs])
    numbers = np.repeat(np.arange(len(runs)), counts)
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    slots = np.array([slot for slot, _ in runs])[numbers]
    blocks = np.stack([numbers, within], axis=1).astype(np.int32)
    return _Launch(
        width,
        flat,
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.from_numpy(blocks).to(device),
        torch.from_numpy(slots).to(device),
    )


@triton.jit
def _sum_kernel(
    table,
    blocks,
    partial,
    WIDTH: tl.constexpr,
    FLAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    run = table + tl.load(blocks + 2 * program) * COLUMNS
    at = tl.load(blocks + 2 * program + 1) * BLOCK + tl.arange(0, BLOCK)  # int32
    address, num_rows, num_cols = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    first, row_stride = tl.load(run + 5), tl.load(run + 6)
    if FLAT:
        offset = at.to(tl.int64)
        number = first + 1 + offset
    else:
        cols = num_cols.to(tl.int32)
        row = at // cols
        col = (at - row * cols).to(tl.int64)
        row = row.to(tl.int64)
        offset = row * tl.load(run + 3) + col * tl.load(run + 4)
        number = first + 1 + row * row_stride + col
    if WIDTH == 1:
        memory = address.to(tl.pointer_type(tl.uint8))
    elif WIDTH == 2:
        memory = address.to(tl.pointer_type(tl.int16))
    elif WIDTH == 4:
        memory = address.to(tl.pointer_type(tl.int32))
    else:
        memory = address.to(tl.pointer_type(tl.int64))
    bits = tl.load(memory + offset, mask=at < num_rows * num_cols, other=0).to(tl.int64)
    tl.store(partial + program, tl.sum(bits * number, axis=0))  # wraps around, as intended
