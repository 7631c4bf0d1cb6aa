"""What a run holds of weights on their way to its engines: two buckets on each side that packs."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config.cluster import RAY, rollout_share
from agentrl.config.schema import Config
from agentrl.dist.model_shape import ModelShape
from agentrl.dist.weight_sync.config import AUTO, OBJECT_STORE

_SLOTS = 2
_OWN_PROCESSES = frozenset({"vllm", "sglang"})
"""Engines that get buckets also within one process of ours."""
_BROADCASTS = frozenset({"nccl", "gloo"})
"""Transports whose receivers hold buckets too; those of others read the sender's."""
_ON_CPU = frozenset({"shm", "gloo"})


@dataclass(slots=True, frozen=True, kw_only=True)
class Buckets:
    """Bytes where the run computes: on its GPUs, or on the host where it has none."""

    sending: int = 0
    """Of a training rank that sends."""
    receiving: int = 0
    """Of an engine."""


def plan_buckets(config: Config, shape: ModelShape, *, on_gpu: bool) -> Buckets:
    """Return what the buckets of ``weight_sync.bucket_mb`` take.

    Args:
        shape: of the policy.
        on_gpu: whether the run computes on GPUs.
    """
    transport = _transport(config, on_gpu=on_gpu)
    if transport is None or (on_gpu and transport in _ON_CPU):
        return Buckets()
    size = _served_bytes(config)
    largest = shape.vocab_size * shape.hidden_size  # it travels alone where it is larger
    slot = max(config.weight_sync.bucket_mb << 20, size * largest)
    two = _SLOTS * min(slot, size * shape.num_params)
    return Buckets(sending=two, receiving=two if transport in _BROADCASTS else 0)


def _transport(config: Config, *, on_gpu: bool) -> str | None:
    """Return how weights will travel; None where nothing is packed into buckets of ours."""
    if config.cluster.kind != RAY:
        own = config.rollout.engine.id in _OWN_PROCESSES
        return ("cuda_ipc" if on_gpu else "shm") if own else None
    wanted = config.weight_sync.transport
    if wanted == AUTO:
        share = rollout_share(config)
        wanted = "shm" if not on_gpu else "cuda_ipc" if share.shared else "nccl"
    return None if wanted == OBJECT_STORE else wanted


def _served_bytes(config: Config) -> int:
    """Return the bytes of a value as engines serve it."""
    engine = config.rollout.engine
    default = "float32" if engine.id == "hf" or config.trainer.deterministic else "bfloat16"
    return 4 if (engine.kwargs.get("dtype") or default) == "float32" else 2
