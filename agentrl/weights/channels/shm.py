"""Buckets through memory that processes of one machine share.

The memory is a file without a name (``memfd``): it is not limited by the size of ``/dev/shm``, and
whoever dies leaves nothing behind. Receivers open it through the sender's ``/proc`` entry, map it
once, and find a token at its end that tells them whose it is.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import sys
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.errors import EngineError
from agentrl.weights.channels.base import NUM_SLOTS, Address, Channel, Packer
from agentrl.weights.plan import BucketPlan

_TOKEN_BYTES = 16


class ShmSender:
    """See :class:`~agentrl.weights.channels.base.Sender`."""

    def __init__(
        self, plan: BucketPlan, *, device: torch.device, num_receivers: int, timeout_s: float
    ) -> None:
        if device.type != "cpu" or not sys.platform.startswith("linux"):
            raise EngineError(
                f"weight_sync.transport=shm on {device} ({sys.platform}): shared memory carries "
                "weights between CPU processes on Linux; use cuda_ipc on one GPU, nccl between "
                "GPUs, or object_store"
            )
        self.plan = plan
        token = secrets.token_bytes(_TOKEN_BYTES)
        size = _slot_stride(plan) * NUM_SLOTS
        self._file, self._memory = _allocate(size + _TOKEN_BYTES)
        self._memory[size:] = token
        self._packer = Packer(plan, _slots(self._memory, plan))
        self.address = Address(
            transport="shm",
            timeout_s=timeout_s,
            details={
                "path": f"/proc/{os.getpid()}/fd/{self._file}",
                "host": socket.gethostname(),
                "token": token,
            },
        )
        self._closed = False

    @property
    def sums(self) -> dict[str, int]:
        """See :class:`~agentrl.weights.channels.base.Sender`."""
        return self._packer.sums

    def send(self, index: int, tensors: Sequence[Tensor]) -> None:
        """See :class:`~agentrl.weights.channels.base.Sender`."""
        self._packer.pack(index, tensors)

    def close(self) -> None:
        """Close the file; the memory goes when the last mapping does."""
        if not self._closed:
            self._closed = True
            os.close(self._file)


class ShmReceiver:
    """See :class:`~agentrl.weights.channels.base.Receiver`."""

    def __init__(self, address: Address, plan: BucketPlan, device: torch.device) -> None:
        size = _slot_stride(plan) * NUM_SLOTS
        path, token = address.details["path"], address.details["token"]
        here = socket.gethostname()
        try:
            if address.details["host"] != here:
                raise OSError(f"it runs on {address.details['host']}, this process on {here}")
            with open(path, "rb") as file:  # read-only: nobody but the sender writes
                self._memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            if len(self._memory) != size + _TOKEN_BYTES or self._memory[size:] != token:
                raise OSError("another file is there now")
        except (OSError, ValueError) as error:
            raise EngineError(
                f"weight_sync.transport=shm: the sender's memory at {path} cannot be opened "
                f"({error}); it is gone, or in another container or of another user: use gloo or "
                "object_store there"
            ) from error
        self._plan = plan
        self._slots = _slots(self._memory, plan)

    def receive(self, index: int) -> Tensor:
        """See :class:`~agentrl.weights.channels.base.Receiver`; to be read, not written."""
        return self._slots[index % NUM_SLOTS][: self._plan.buckets[index].num_bytes]

    def close(self) -> None:
        """The mapping goes with the last tensor that looks at it."""
        self._slots = []


def _allocate(size: int) -> tuple[int, mmap.mmap]:
    """Return a file without a name, and its memory.

    Raises:
        EngineError: this machine does not give so much.
    """
    file = -1
    try:
        file = os.memfd_create("agentrl-weights")
        os.ftruncate(file, size)
        return file, mmap.mmap(file, size)
    except (OSError, ValueError) as error:
        if file >= 0:
            os.close(file)
        raise EngineError(
            f"weight_sync.transport=shm: {size / 2**20:,.0f} MiB of shared memory for buckets "
            f"cannot be had ({error}); lower weight_sync.bucket_mb, or free memory"
        ) from error


def _slot_stride(plan: BucketPlan) -> int:
    return -(-max(1, plan.slot_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE


def _slots(memory: mmap.mmap, plan: BucketPlan) -> list[Tensor]:
    stride = _slot_stride(plan)
    with warnings.catch_warnings():  # a receiver's mapping is read-only, as it should be
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=stride * NUM_SLOTS)
    return list(flat.split(stride))


CHANNEL = Channel(ShmSender, ShmReceiver)
