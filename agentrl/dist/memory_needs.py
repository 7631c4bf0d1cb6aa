"""What a memory plan is made from: models, the engine that samples, and the memories they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from agentrl.dist.config import EngineConfig
from agentrl.dist.model_shape import ModelShape

MASTER_BYTES = 4
"""Of a weight at rest: masters are float32."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelNeed:
    """A model that training processes hold."""

    role: str
    """``actor``, ``critic``, ``reference``, ``reward_model``."""
    shape: ModelShape
    settings: EngineConfig
    settings_key: str | None = None
    """Where its settings stand, with a dot at the end; None: under its role."""
    pool: str = "train"
    num_ranks: int = 1
    """Processes of the pool."""
    trained: bool = True
    lora_rank: int = 0
    """0: all weights are trained."""
    master_bytes: int = MASTER_BYTES
    """Of a weight at rest."""
    has_vocabulary: bool = True
    """Whether logits over the vocabulary are computed; a value head has none."""
    longest_row: int = 0
    """Tokens of the longest sequence, which is never cut."""
    on_gpu: bool = False
    bucket_bytes: int = 0
    """For weights on their way to engines, on a rank that sends them."""

    @property
    def num_trained(self) -> int:
        """Parameters with a gradient."""
        if not self.trained:
            return 0
        return self.lora_rank * self.shape.linear_widths or self.shape.num_params

    @property
    def num_shards(self) -> int:
        """Ranks over which weights are sharded."""
        return self.settings.shard_size or self.num_ranks

    @property
    def num_tokens(self) -> int:
        """Of the largest micro-batch, the part of one rank."""
        largest = max(self.settings.tokens_per_micro_batch, self.longest_row)
        return -(-largest // self.settings.sequence_parallel)


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplerNeed:
    """A rollout engine: on transformers, or one that claims its memory as a whole."""

    shape: ModelShape
    pool: str = "train"
    num_processes: int = 1
    num_on_gpu: int = 1
    """Of the processes, those that share one GPU."""
    sleeps: bool = False
    """Whether the cache is given back while others train."""
    num_slots: int
    """Sequences that are decoded at once."""
    max_context: int
    """Tokens of each."""
    session_cache_bytes: int
    """For sessions that hold no slot."""
    value_bytes: int = 4
    """Of weights and cache."""
    keeps_module: bool = True
    """Whether the float32 module stays beside the engine's own weights."""
    bucket_bytes: int = 0
    """For weights on their way here, where the sender's memory cannot be read."""
    claimed_bytes: int | None = None
    """What an engine with processes of its own takes at start, whatever it serves: for its cache,
    and on a GPU for all that it holds there; None: what its slots need."""
    weight_bytes: int = 0
    """Of an engine that claims its cache alone."""
    process_bytes: int = 0
    """Of the processes that such an engine starts, before they hold a tensor."""


class Memory(StrEnum):
    """Whose memory a device is."""

    gpu = "gpu"
    """Of the GPU of one rank of a pool."""
    host = "host"
    """Of a machine that computes on its CPU: every process of the run shares it."""
    host_of_gpus = "host_of_gpus"
    """Of a machine that computes on GPUs: holds what waits between phases."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Device:
    """A memory that a part of the run lives in."""

    name: str
    memory: Memory
    pool: str = ""
    """Whose ranks have such a GPU each."""
    capacity: int | None
    """Bytes; None where it cannot be known from here."""
    process_bytes: int
    """Of a process before it holds a tensor: libraries, or the context of CUDA."""
    num_processes: int = 1
    """That use this memory."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Request:
    """Everything that decides the plan."""

    models: Sequence[ModelNeed]
    sampler: SamplerNeed | None
    devices: Sequence[Device]
