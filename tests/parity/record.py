"""Largest differences seen, for the table that ends a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 1e-5
SEEDS = range(200)


@dataclass(slots=True)
class Row:
    difference: float = 0.0
    batches: int = 0


TABLE: dict[str, Row] = {}
"""What was compared -> how it came out."""


def compare(name: str, ours: Tensor | float, theirs: Tensor | float) -> None:
    """Note one batch, and fail if it differs by the tolerance or more.

    The difference is absolute for values up to 1 and relative above: float32 carries no more.
    """
    got = torch.as_tensor(ours, dtype=torch.float64).detach()
    want = torch.as_tensor(theirs, dtype=torch.float64).detach()
    assert got.shape == want.shape, f"{name}: shapes {tuple(got.shape)} and {tuple(want.shape)}"
    apart = (got - want).abs() / want.abs().clamp(min=1.0)
    difference = float(apart.max()) if apart.numel() else 0.0
    row = TABLE.setdefault(name, Row())
    row.batches += 1
    # A NaN must not hide: max() of Python would drop it.
    row.difference = difference if not difference <= row.difference else row.difference
    assert difference < TOLERANCE, f"{name}: {difference} apart\nours {got}\nverl {want}"


def lines() -> list[str]:
    """The table."""
    width = max((len(name) for name in TABLE), default=0)
    rows = (f"{name:<{width}}  {r.difference:9.1e}  {r.batches:7d}" for name, r in TABLE.items())
    return [f"{'compared with verl 0.9.1':<{width}}  max diff   batches", *rows]
