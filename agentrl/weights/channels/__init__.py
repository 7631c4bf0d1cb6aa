"""Transports of buckets by name.

``shm``: processes of one machine, on CPUs. ``cuda_ipc``: processes on one GPU. ``nccl`` and
``gloo``: a broadcast between devices or machines.
"""

from __future__ import annotations

from typing import Any

import torch

from agentrl.errors import RegistryError
from agentrl.registry import Registry
from agentrl.weights.channels.base import DEFAULT_TIMEOUT_S, Address, Channel, Receiver, Sender
from agentrl.weights.plan import BucketPlan

_PACKAGE = "agentrl.weights.channels"
channel_registry: Registry[Channel] = Registry(
    "weight transport",
    "agentrl.weight_transports",
    {
        "shm": f"{_PACKAGE}.shm:CHANNEL",
        "cuda_ipc": f"{_PACKAGE}.cuda_ipc:CHANNEL",
        "nccl": f"{_PACKAGE}.collective:NCCL",
        "gloo": f"{_PACKAGE}.collective:GLOO",
    },
)
"""Transports by name."""


def open_sender(
    transport: str,
    plan: BucketPlan,
    *,
    device: torch.device | str,
    num_receivers: int,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Sender:
    """Open the side that has the weights.

    Args:
        transport: name of a registered one.
        plan: what will travel.
        device: of the slots; for ``cuda_ipc`` and ``nccl`` the GPU.
        num_receivers: that will open; each of an engine's tensor-parallel ranks is one.
        timeout_s: for receivers to come, and to take part.

    Raises:
        RegistryError: no such transport, or something else of that name.
        EngineError: it cannot work on this device or machine.
    """
    return _channel(transport).open_sender(
        plan, device=torch.device(device), num_receivers=num_receivers, timeout_s=timeout_s
    )


def open_receiver(address: Address, plan: BucketPlan, device: torch.device | str) -> Receiver:
    """Open the side that loads weights, in the process that does so.

    Args:
        address: of the sender.
        plan: the sender's.
        device: where the weights are loaded.

    Raises:
        EngineError: the sender is gone, or cannot be reached from this process.
    """
    open_one = _channel(address.transport).open_receiver
    return open_one(address, plan, torch.device(device))


def _channel(transport: str) -> Channel:
    found: Any = channel_registry.get(transport)
    if not isinstance(found, Channel):
        raise RegistryError(
            f"weight_sync.transport={transport!r} is {type(found).__name__}, no Channel "
            "(agentrl.weights.channels.base): write package.module:NAME with the name of one"
        )
    return found
