"""What a rank needs to know to build the engine of a role."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from agentrl.dist.config import EngineConfig, LoraConfig, Precision
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.half import keep_in_half
from agentrl.dist.lora import attach_adapters
from agentrl.dist.packed_model import Head
from agentrl.dist.ranks import Ranks
from agentrl.dist.stored_model import StoredModel
from agentrl.model.load import LoadedModel
from agentrl.rollout.engines.config import HFEngineConfig
from agentrl.seeding import derive_seed


@dataclass(slots=True, kw_only=True)
class EngineSpec:
    """A role's engine before it is built. Can be pickled where the model is stored."""

    role: str
    """``actor``, ``critic`` or ``reference``; names it in errors."""
    model: LoadedModel | StoredModel
    """What its weights start from: the model itself where there is one process."""
    config: EngineConfig
    head: Head = "language"
    """What the model answers of a token: log-probabilities, or values."""
    temperature: float = 1.0
    """Of the sampled distribution whose log-probabilities are computed."""
    total_updates: int | None = None
    """Optimizer steps of the whole run, where the schedule needs them."""
    deterministic: bool = True
    """Same inputs, same bits."""
    trainable: bool = True
    """A frozen engine keeps no gradients and no optimizer."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """With a rank above 0, adapters are trained in place of the weights."""
    exact: HFEngineConfig | None = None
    """Settings of the rollout engine whose operations the model is computed in; None: packed."""
    seed: int = 0
    """Of the run: that of torch's generators on a rank follows from it, and from the role."""


def build_engine(spec: EngineSpec, ranks: Ranks) -> FSDPEngine:
    """Build a role's engine on this rank; all ranks of the group do so together.

    Raises:
        ModelError: the model cannot be run, or not in the way asked for.
        ConfigError: its settings do not fit the number of ranks, or its adapters not the model.
    """
    place = ranks.arranged(
        shard_size=spec.config.shard_size,
        sequence_parallel=spec.config.sequence_parallel,
        role=spec.role,
    )
    torch.manual_seed(derive_seed(spec.seed, "engine", spec.role))
    loaded = spec.model
    if isinstance(loaded, StoredModel):
        # To be sharded it goes to the device layer by layer: no rank ever holds it there whole.
        device = str(place.device) if place.world_size == 1 else "cpu"
        loaded = loaded.open(device=device) if place.rank == 0 else loaded.outline()
    if spec.config.precision is Precision.bf16 and (spec.lora.rank or not spec.trainable):
        keep_in_half(loaded.model)  # what is frozen is kept as it is computed with
    adapters = None
    if spec.lora.rank:
        adapters = attach_adapters(loaded.model, spec.lora, seed=spec.seed, source=loaded.source)
    return FSDPEngine(
        loaded.model,
        loaded.tokenizer,
        spec.config,
        ranks=place,
        head=spec.head,
        temperature=spec.temperature,
        total_updates=spec.total_updates,
        deterministic=spec.deterministic,
        trainable=spec.trainable,
        adapters=adapters,
        exact=spec.exact,
    )
