"""Buckets in memory of a GPU that sender and receivers, on the same one, map once."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from agentrl.errors import EngineError
from agentrl.weights.channels.base import NUM_SLOTS, Address, Channel, Packer
from agentrl.weights.channels.cuda_memory import (
    DeviceMemory,
    all_or_none,
    allocate,
    open_shared,
)
from agentrl.weights.plan import BucketPlan

_own: dict[str, list[Tensor]] = {}
"""Slots of this process's senders by token: the driver opens no handle where it was made."""


class CudaIpcSender:
    """See :class:`~agentrl.weights.channels.base.Sender`."""

    def __init__(
        self, plan: BucketPlan, *, device: torch.device, num_receivers: int, timeout_s: float
    ) -> None:
        if device.type != "cuda":
            raise EngineError(
                f"weight_sync.transport=cuda_ipc on {device}: it works between processes on one "
                "GPU; use shm or gloo on CPUs"
            )
        self.plan = plan
        self._device = device
        size = max(1, plan.slot_bytes)
        self._memory = all_or_none([partial(allocate, size, device)] * NUM_SLOTS)
        slots = [memory.tensor() for memory in self._memory]
        self._packer = Packer(plan, slots)
        self._token = secrets.token_hex(8)
        _own[self._token] = slots
        self.address = Address(
            transport="cuda_ipc",
            timeout_s=timeout_s,
            details={
                "pid": os.getpid(),
                "token": self._token,
                "gpu": gpu_uuid(device),
                "handles": [memory.handle() for memory in self._memory],
            },
        )

    @property
    def sums(self) -> dict[str, int]:
        """See :class:`~agentrl.weights.channels.base.Sender`."""
        return self._packer.sums

    def send(self, index: int, tensors: Sequence[Tensor]) -> None:
        """See :class:`~agentrl.weights.channels.base.Sender`."""
        with torch.cuda.device(self._device):
            self._packer.pack(index, tensors)
            # Receivers are told by other means than this stream.
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Free the memory, which receivers must have given back."""
        _own.pop(self._token, None)
        for memory in self._memory:
            memory.close()


class CudaIpcReceiver:
    """See :class:`~agentrl.weights.channels.base.Receiver`."""

    def __init__(self, address: Address, plan: BucketPlan, device: torch.device) -> None:
        details = address.details
        here = gpu_uuid(device)
        if here != details["gpu"]:
            raise EngineError(
                f"weight_sync.transport=cuda_ipc: the sender is on GPU {details['gpu']} and the "
                f"receiver on {here}; only processes on the same GPU can share memory: use nccl"
            )
        self._plan = plan
        self._memory: list[DeviceMemory] = []
        if details["pid"] == os.getpid() and details["token"] in _own:
            self._slots = _own[details["token"]]
        else:
            size = max(1, plan.slot_bytes)
            handles = details["handles"]
            self._memory = all_or_none(partial(open_shared, item, size, device) for item in handles)
            self._slots = [memory.tensor() for memory in self._memory]

    def receive(self, index: int) -> Tensor:
        """See :class:`~agentrl.weights.channels.base.Receiver`."""
        return self._slots[index % NUM_SLOTS][: self._plan.buckets[index].num_bytes]

    def close(self) -> None:
        """See :class:`~agentrl.weights.channels.base.Receiver`."""
        self._slots = []
        for memory in self._memory:
            memory.close()


def gpu_uuid(device: torch.device) -> str:
    """Return the name of a GPU that is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


CHANNEL = Channel(CudaIpcSender, CudaIpcReceiver)
