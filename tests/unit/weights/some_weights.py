"""A few tensors of several dtypes and shapes, in more buckets than there are slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.weights.checksum import checksums
from agentrl.weights.plan import BucketPlan
from agentrl.weights.served import WeightSpec

SPECS = (
    WeightSpec(name="embed", shape=(50, 8), dtype="float32"),
    WeightSpec(name="layer.weight", shape=(16, 8), dtype="bfloat16"),
    WeightSpec(name="layer.bias", shape=(16,), dtype="float32"),
    WeightSpec(name="scale", shape=(), dtype="float32"),
    WeightSpec(name="other.weight", shape=(20, 8), dtype="float32"),
    WeightSpec(name="head", shape=(50, 8), dtype="bfloat16"),
)
PLAN = BucketPlan.of(SPECS, bucket_bytes=700)


def trained(seed: int) -> list[tuple[str, Tensor]]:
    """Return weights as a trainer has them."""
    generator = torch.Generator().manual_seed(seed)
    return [(spec.name, torch.randn(spec.shape, generator=generator)) for spec in SPECS]


def as_served(params: Sequence[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the checksums of weights in the dtypes served."""
    kinds = {spec.name: getattr(torch, spec.dtype) for spec in SPECS}
    return checksums((name, value.to(kinds[name])) for name, value in params)
