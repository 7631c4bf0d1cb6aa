"""What carries buckets from one process to others: two slots, filled in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from agentrl.weights.checksum import SliceSums, TensorSlice
from agentrl.weights.plan import BucketPlan

NUM_SLOTS = 2
"""One is filled while receivers read the other."""
DEFAULT_TIMEOUT_S = 600.0


@dataclass(slots=True, frozen=True, kw_only=True)
class Address:
    """Where a sender is found. Can be pickled."""

    transport: str
    timeout_s: float
    """For whatever a receiver waits for."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """For the transport's own receiver."""


class Sender(Protocol):
    """The side that has the weights. Its methods block."""

    @property
    def plan(self) -> BucketPlan:
        """What travels."""
        ...

    @property
    def address(self) -> Address:
        """What :func:`~agentrl.weights.channels.open_receiver` takes."""
        ...

    @property
    def sums(self) -> Mapping[str, int]:
        """Name -> checksum, in the dtype served, of what was sent last; waits for the device."""
        ...

    def send(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Cast, pack and sum the tensors of a bucket, and offer it to the receivers.

        Every receiver must be done with bucket ``index - 2``, whose slot is used again.

        Args:
            index: of the bucket.
            tensors: in the bucket's order; of any dtype and device.

        Raises:
            EngineError: the receivers did not come in time, or one of them is gone.
        """
        ...

    def close(self) -> None:
        """Free the slots. Idempotent."""
        ...


class Receiver(Protocol):
    """The side that loads weights. Its methods block."""

    def receive(self, index: int) -> Tensor:
        """Return bucket ``index`` as flat uint8; valid until bucket ``index + 2`` is sent.

        To be called once the sender has been told to send the bucket. On a GPU, work that reads it
        must have ended before the caller says that the bucket is loaded.

        Raises:
            EngineError: the sender is gone, or does not send in time.
        """
        ...

    def close(self) -> None:
        """Give the mapping back. Idempotent."""
        ...


class OpenSender(Protocol):
    """Opens the sending side of a transport."""

    def __call__(
        self, plan: BucketPlan, *, device: torch.device, num_receivers: int, timeout_s: float
    ) -> Sender:
        """Return it without waiting for receivers."""
        ...


class OpenReceiver(Protocol):
    """Opens the receiving side of a transport."""

    def __call__(self, address: Address, plan: BucketPlan, device: torch.device) -> Receiver:
        """Return it without waiting for the others."""
        ...


@dataclass(slots=True, frozen=True)
class Channel:
    """A transport."""

    open_sender: OpenSender
    open_receiver: OpenReceiver


class Packer:
    """Fills slots with buckets.

    Args:
        plan: of the buckets.
        slots: uint8 [plan.slot_bytes] each, of one device.
    """

    def __init__(self, plan: BucketPlan, slots: Sequence[Tensor]) -> None:
        self._plan = plan
        self._slots = slots
        self._sums: dict[int, SliceSums] = {}
        self._found: dict[int, Tensor] = {}

    def slot(self, index: int) -> Tensor:
        """Return where a bucket lies, flat."""
        return self._slots[index % len(self._slots)][: self._plan.buckets[index].num_bytes]

    @torch.no_grad()
    def pack(self, index: int, tensors: Sequence[Tensor]) -> Tensor:
        """Cast, pack and sum; return the filled slot."""
        flat = self.slot(index)
        views = self._plan.buckets[index].views(flat)
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            views, list(tensors)
        )
        if index not in self._sums:  # slots stay where they are
            self._sums[index] = SliceSums([TensorSlice.whole(view) for view in views])
        self._found[index] = self._sums[index].compute()
        return flat

    @property
    def sums(self) -> dict[str, int]:
        """Name -> checksum of what was packed last."""
        return {
            piece.name: value
            for index, found in sorted(self._found.items())
            for piece, value in zip(self._plan.buckets[index].slices, found.tolist(), strict=True)
        }
