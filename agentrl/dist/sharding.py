"""Shards a model over ranks with FSDP2, in mixed precision where asked.

Masters of the weights, gradients and the optimizer's moments are float32 and lie in shards, one per
rank; a layer's weights are gathered, in the precision of the forward pass, while it is at work.
Gradients are **summed** over ranks: losses are divided by global denominators already.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from agentrl.dist.config import Precision
from agentrl.dist.layers import decoder_layers
from agentrl.dist.packed_model import PackedModel
from agentrl.dist.ranks import Ranks

GATHERED_SHARE = 0.1
"""Share of the device's memory that gathered weights and unsharded gradients may take, for which
weights are gathered and gradients summed once per mini-batch instead of once per micro-batch."""
GATHERED_BYTES = 2
GRADIENT_BYTES = 4


class ShardedModel:
    """A model whose weights are sharded over the ranks, in place. All ranks build it together.

    Rank 0 holds the weights; what the others hold is replaced, and may be on the meta device. At no
    time does a rank have more on its device than its shards, one layer and what is outside of
    layers.

    Args:
        model: with every weight in float32 (or, frozen, in any type).
        ranks: arranged, with a mesh.
        precision: of forward and backward.
    """

    def __init__(self, model: PackedModel, ranks: Ranks, precision: Precision) -> None:
        assert ranks.mesh is not None, "sharding needs a process group"
        self.module = model
        num_params = sum(value.numel() for value in model.parameters())
        self._stays_gathered = stays_gathered(num_params, ranks.device)
        half = precision is Precision.bf16
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if half else None,
            reduce_dtype=torch.float32 if half else None,
        )
        for part in (*decoder_layers(model.model), model):
            _spread(part, ranks)
            fully_shard(
                part,
                mesh=ranks.mesh,
                reshard_after_forward=not self._stays_gathered,
                mp_policy=policy,
            )
        for part in self._parts() if ranks.world_size > 1 else ():
            # A rank by itself sums anyhow, and must not spend a multiplication by 1 on it.
            part.set_gradient_divide_factor(1.0)
            # gloo knows no scaled sum; NCCL's is free, where a plain one would be scaled after it.
            part.set_force_sum_reduction_for_comms(ranks.device.type == "cpu")

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Say whether more micro-batches follow before the optimizer's step."""
        assert isinstance(self.module, FSDPModule)
        if self._stays_gathered:
            self.module.set_reshard_after_backward(is_last)
            self.module.set_requires_gradient_sync(is_last)
        self.module.set_is_last_backward(is_last)

    def release(self) -> None:
        """Free gathered weights: after a forward pass without a backward, before shards change."""
        for part in self._parts():
            part.reshard()

    def _parts(self) -> Iterable[FSDPModule]:
        return [part for part in self.module.modules() if isinstance(part, FSDPModule)]


def stays_gathered(num_params: int, device: torch.device) -> bool:
    """Whether a model is small enough to be gathered once per mini-batch on its device."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return num_params * (GATHERED_BYTES + GRADIENT_BYTES) <= GATHERED_SHARE * memory


def full_tensor(value: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded; ranks call it together.

    What is whole already is returned as it is, live.
    """
    return value.full_tensor() if isinstance(value, DTensor) else value


def _spread(module: nn.Module, ranks: Ranks) -> None:
    """Bring what rank 0 holds of ``module``, shards aside, to the device of every rank."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}  # holds what is replaced: no id comes twice
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, old in tensors.items():
                if old is not None and not isinstance(old, DTensor):
                    if id(old) not in seen:
                        seen[id(old)] = (old, _brought(old, ranks))
                    tensors[name] = seen[id(old)][1]  # pyright: ignore[reportArgumentType]


def _brought(old: Tensor, ranks: Ranks) -> Tensor:
    new = old
    if ranks.rank == 0:
        if old.device != ranks.device:
            new = _like(old, old.detach().to(ranks.device))
    elif old.device != ranks.device:
        new = _like(old, torch.empty_like(old, device=ranks.device))
    if ranks.world_size > 1:
        dist.broadcast(new.detach(), src=0)
    return new


def _like(old: Tensor, data: Tensor) -> Tensor:
    if isinstance(old, nn.Parameter):
        return nn.Parameter(data, requires_grad=old.requires_grad)
    return data
