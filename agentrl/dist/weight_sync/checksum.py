"""A checksum of weights that notices a changed bit and a changed place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


def differences(sent: Mapping[str, int], served: Mapping[str, int]) -> list[str]:
    """Return the names that one side lacks or has with another checksum, sorted."""
    return sorted(
        name for name in sent.keys() | served.keys() if sent.get(name) != served.get(name)
    )
