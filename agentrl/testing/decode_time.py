"""How long a language model takes on a device: the roofline of decoding and of prefill.

Formulas: a decode step reads all weights and all keys and values of the batch once (memory), and
multiplies every weight with every sequence (compute); it takes the longer of the two,
``t = max((2 Pm + B S k) / W, B (2 Pm + 4 L n_h d_h S) / F)`` with ``k = 4 L n_kv d_h`` bytes of
keys and values per token in bfloat16. Prefill of a token that attends to ``S`` others costs
``(2 Pm + 4 L n_h d_h S) / F``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelShape:
    """What the cost of a decoder depends on."""

    matmul_params: float
    """Parameters that every token is multiplied with, the output head included (Pm)."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values in bfloat16."""
        return 4.0 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def attention_flops(self) -> float:
        """Per pair of tokens of which one attends to the other."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim


@dataclass(slots=True, frozen=True, kw_only=True)
class Device:
    """What a device reaches, as measured."""

    bytes_per_s: float
    flops_per_s: float


QWEN2_5_0_5B = ModelShape(
    matmul_params=0.494e9, num_layers=24, num_heads=14, num_kv_heads=2, head_dim=64
)
QWEN3_1_7B = ModelShape(
    matmul_params=1.720e9, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128
)
H200 = Device(bytes_per_s=4.3e12, flops_per_s=790e12)


@dataclass(slots=True, frozen=True)
class EngineCost:
    """Seconds that a model takes on a device."""

    shape: ModelShape = QWEN2_5_0_5B
    device: Device = H200
    step_overhead_s: float = 0.0
    """Of every decode step: launches, scheduling."""

    def step_s(self, batch: int, context: float) -> float:
        """Return the time of one decode step.

        Args:
            batch: sequences.
            context: tokens that they hold, all together.
        """
        return self.steps_s(1, batch, context)

    def steps_s(self, steps: int, batch: int, context: float) -> float:
        """Return the time of ``steps`` steps in a row; each adds a token to every sequence.

        Memory and compute both grow evenly from step to step, so the longer of the two changes
        sides once at most: a sum of two arithmetic series.
        """
        memory, memory_growth = self._memory(batch, context)
        compute, compute_growth = self._compute(batch, context)
        gap, growth = memory - compute, memory_growth - compute_growth
        if growth > 0:  # compute rules first, if it does at all
            first, later = (compute, compute_growth), (memory, memory_growth)
            turn = -gap / growth
        else:
            first, later = (memory, memory_growth), (compute, compute_growth)
            turn = gap / -growth if growth else (math.inf if gap >= 0 else 0.0)
        split = steps if turn >= steps else max(math.ceil(turn), 0)
        seconds = _series(*first, 0, split) + _series(*later, split, steps)
        return seconds + steps * self.step_overhead_s

    def steps_until(self, seconds: float, batch: int, context: float, *, most: int) -> int:
        """Return the fewest steps that take at least ``seconds``, or ``most``."""
        low, high = 0, most
        while low < high:
            middle = (low + high) // 2
            if self.steps_s(middle, batch, context) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low

    def prefill_s(self, num_tokens: int, num_before: int = 0) -> float:
        """Return the time to read ``num_tokens`` after ``num_before`` that are cached."""
        attended = num_before + num_tokens / 2
        flops = 2 * self.shape.matmul_params + self.shape.attention_flops * attended
        return num_tokens * flops / self.device.flops_per_s

    def work(self, num_tokens: int, num_before: int, *, batch: int) -> tuple[float, float]:
        """Return seconds of memory and of compute that a turn takes of a full device at least.

        Args:
            num_tokens: decoded.
            num_before: tokens of context before them.
            batch: sequences that share the reading of the weights.
        """
        context = num_tokens * num_before + num_tokens * (num_tokens - 1) / 2
        weights = 2 * self.shape.matmul_params
        read = num_tokens * weights / batch + context * self.shape.kv_bytes_per_token
        flops = num_tokens * weights + context * self.shape.attention_flops
        return read / self.device.bytes_per_s, flops / self.device.flops_per_s

    def _memory(self, batch: int, context: float) -> tuple[float, float]:
        per_token = self.shape.kv_bytes_per_token / self.device.bytes_per_s
        weights = 2 * self.shape.matmul_params / self.device.bytes_per_s
        return weights + context * per_token, batch * per_token

    def _compute(self, batch: int, context: float) -> tuple[float, float]:
        per_pair = self.shape.attention_flops / self.device.flops_per_s
        weights = batch * 2 * self.shape.matmul_params / self.device.flops_per_s
        return weights + context * per_pair, batch * per_pair


def _series(start: float, growth: float, first: int, last: int) -> float:
    """Add up ``start + j growth`` for j from ``first`` to ``last - 1``."""
    count = last - first
    return count * start + growth * (first + last - 1) * count / 2
