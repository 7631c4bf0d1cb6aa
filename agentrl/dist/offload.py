"""Moves tensors to host memory between phases, and back, where they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostShelf:
    """Holds the content of tensors while their device's memory belongs to another phase.

    Tensors stay the objects that they are, views of one another included: only their storage is
    emptied and filled again. Host buffers, pinned for a GPU, are kept for the next time.

    Args:
        device: whose memory is given back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shelved: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._free: dict[int, list[Tensor]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether every tensor has its content."""
        return not self._shelved

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Take the content of tensors and free their memory; those without any are left alone."""
        for storage in _storages(tensors):
            size = storage.nbytes()
            if not size or not storage.resizable() or storage.device.type != self._device.type:
                continue  # gone already, memory of somebody else, or a counter on the CPU
            buffer = self._buffer(size)
            buffer.copy_(_bytes(storage), non_blocking=True)
            self._shelved.append((storage, buffer))
        self._wait()
        for storage, _ in self._shelved:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # other processes share the device

    def take_back(self) -> None:
        """Give every tensor its content again."""
        for storage, buffer in self._shelved:
            storage.resize_(buffer.numel())
            _bytes(storage).copy_(buffer, non_blocking=True)
        self._wait()
        for _, buffer in self._shelved:
            self._free.setdefault(buffer.numel(), []).append(buffer)
        self._shelved.clear()

    def _buffer(self, size: int) -> Tensor:
        kept = self._free.get(size)
        if kept:
            return kept.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return each storage once, in order; of a sharded tensor that of the rank's own shard."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType, reportCallIssue]
