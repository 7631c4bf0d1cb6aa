"""Metrics of micro-batches, added up without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class MetricSum:
    """Adds up shares of metrics; those named ``*_max`` are combined by maximum."""

    def __init__(self) -> None:
        self._totals: dict[str, float | Tensor] = {}

    def add(self, shares: Mapping[str, float | Tensor]) -> None:
        """Count a micro-batch in; tensors (of one value) stay on their device."""
        for name, share in shares.items():
            if isinstance(share, Tensor):
                share = share.detach().double()
            if name not in self._totals:
                self._totals[name] = share
            elif name.endswith("_max"):
                self._totals[name] = _larger(self._totals[name], share)
            else:
                self._totals[name] = self._totals[name] + share

    def result(self) -> dict[str, float]:
        """Return the totals; waits for the device once."""
        tensors = {name: v for name, v in self._totals.items() if isinstance(v, Tensor)}
        if tensors:
            values = torch.stack([value.reshape(()) for value in tensors.values()]).tolist()
            self._totals |= dict(zip(tensors, values, strict=True))
        return {name: float(value) for name, value in self._totals.items()}


def _larger(left: float | Tensor, right: float | Tensor) -> float | Tensor:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.maximum(left, right)
    return max(float(left), float(right))
