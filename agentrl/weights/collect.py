"""Buckets for engines that take weights whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from agentrl.errors import EngineError
from agentrl.weights.channels import open_receiver
from agentrl.weights.channels.base import Address, Receiver
from agentrl.weights.plan import BucketPlan
from agentrl.weights.served import ServedWeights, WeightSpec


class WholeUpdates(Protocol):
    """An engine that is given all weights at once."""

    def weight_specs(self) -> Sequence[WeightSpec]:
        """Return the tensors that are served."""
        ...

    async def update_weights(
        self, params: Iterable[tuple[str, Tensor]], version: int
    ) -> ServedWeights:
        """Replace the weights, all or none."""
        ...


class CollectingSink:
    """A :class:`~agentrl.weights.push.WeightSink` that hands an engine its weights when all came.

    Holds a copy of them in the meantime: an engine that takes buckets needs none.

    Args:
        engine: of this process; it waits for its unfinished requests itself.
        device: where the copy lies.
    """

    num_receivers = 1

    def __init__(self, engine: WholeUpdates, *, device: torch.device | str) -> None:
        self._engine, self._device = engine, device
        self._plan: BucketPlan | None = None
        self._receiver: Receiver | None = None
        self._held: dict[int, Tensor] = {}

    def weight_specs(self) -> Sequence[WeightSpec]:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        return self._engine.weight_specs()

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        self.close()
        # In a thread: a sender that cannot be reached is waited for, and others are served.
        receiver = await asyncio.to_thread(open_receiver, address, plan, self._device)
        self._plan, self._receiver = plan, receiver

    async def begin_update(self) -> None:
        """Forget what came of an update that failed."""
        self._held.clear()

    async def load_bucket(self, index: int) -> None:
        """Copy a bucket."""
        if self._receiver is None:
            raise EngineError("a bucket of weights came before the engine was connected")
        flat = await asyncio.to_thread(self._receiver.receive, index)
        self._held[index] = flat.clone()
        if flat.is_cuda:  # its slot is about to be filled again
            torch.cuda.current_stream(flat.device).synchronize()

    async def finish_update(self, version: int) -> ServedWeights:
        """Update the engine.

        Raises:
            EngineError: a bucket is missing, or the engine refused the weights.
        """
        assert self._plan is not None
        missing = sorted(set(range(len(self._plan.buckets))) - self._held.keys())
        if missing:
            raise EngineError(f"weights of version {version}: buckets {missing[:5]} did not come")
        held, self._held = self._held, {}
        return await self._engine.update_weights(_named(self._plan, held), version)

    async def give_up_update(self, reason: str) -> None:
        """Forget what came: the engine serves as before."""
        self._held.clear()

    def close(self) -> None:
        """Close the channel. Idempotent."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()


def _named(plan: BucketPlan, held: dict[int, Tensor]) -> Iterable[tuple[str, Tensor]]:
    for index, bucket in enumerate(plan.buckets):
        for piece, view in zip(bucket.slices, bucket.views(held[index]), strict=True):
            yield piece.name, view
