"""A checksum of weights that notices a changed bit and a changed place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_CHUNK = 2**22
"""Elements at a time: bounds the int64 copies."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """Return ``sum((i + 1) * bits_i)`` modulo 2^64 as a signed integer.

    ``bits_i`` is the i-th element's memory, read as an integer of the same width. Exact, so the
    same on every device; it tells permuted values apart, and rounding to another dtype too.
    """
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + len(chunk), device=flat.device)
        total += (chunk * places).sum()  # wraps around, as intended
    return int(total)


def checksums(params: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the checksum of every named tensor."""
    return {name: checksum(value) for name, value in params}


def checksum_slice(view: Tensor, full_shape: Sequence[int], starts: Sequence[int]) -> int:
    """Return what a slice adds to the :func:`checksum` of the tensor it was cut from.

    Slices that cover a tensor without overlap add up to its checksum modulo 2^64; see
    :func:`wrapped_sum`.

    Args:
        view: the slice, of as many axes as the tensor.
        full_shape: of the tensor.
        starts: of the slice, along each axis.
    """
    places = torch.ones((), dtype=torch.int64, device=view.device)
    stride = 1
    for axis in reversed(range(view.dim())):
        along = torch.arange(view.shape[axis], dtype=torch.int64, device=view.device)
        along = (along + starts[axis]) * stride
        places = places + along.view(-1, *[1] * (view.dim() - 1 - axis))
        stride *= full_shape[axis]
    bits = view.detach().contiguous().view(_INTEGERS[view.element_size()])
    return int((bits.to(torch.int64) * places).sum())


def wrapped_sum(parts: Iterable[int]) -> int:
    """Add checksums of slices modulo 2^64; signed, as :func:`checksum` is."""
    return (sum(parts) + 2**63) % 2**64 - 2**63
