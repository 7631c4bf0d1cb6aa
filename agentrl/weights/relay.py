"""Weights that come from afar once, for several engines on one GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from agentrl.errors import EngineError
from agentrl.weights.channels import open_receiver, open_sender
from agentrl.weights.channels.base import Address, Receiver, Sender
from agentrl.weights.plan import BucketPlan
from agentrl.weights.push import WeightSink
from agentrl.weights.served import ServedWeights, WeightSpec


class RelaySink:
    """A :class:`~agentrl.weights.push.WeightSink` that receives for the receivers of another one.

    NCCL takes one process of a GPU into a group. Engines that share one get each bucket from this
    process, which is the only one that the sender knows of.

    Args:
        sink: with several receivers, all of them here.
        device: of this process's buckets: the GPU of them all, or a CPU.
    """

    num_receivers = 1

    def __init__(self, sink: WeightSink, *, device: torch.device | str) -> None:
        self._sink = sink
        self._device = torch.device(device)
        self._plan: BucketPlan | None = None
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        self._retired: list[Receiver | Sender] = []
        """Of channels before: engines map a sender's memory until they have connected anew."""

    def weight_specs(self) -> Sequence[WeightSpec]:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        return self._sink.weight_specs()

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        """Open a channel on either side, in place of those before."""
        self._retire()
        self._receiver = await asyncio.to_thread(open_receiver, address, plan, self._device)
        self._sender = open_sender(
            "cuda_ipc" if self._device.type == "cuda" else "shm",
            plan,
            device=self._device,
            num_receivers=self._sink.num_receivers,
            timeout_s=address.timeout_s,
        )
        self._plan = plan
        await self._sink.connect(plan, self._sender.address)
        self._close_retired()

    async def begin_update(self) -> None:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        await self._sink.begin_update()

    async def load_bucket(self, index: int) -> None:
        """Take a bucket and hand it on; returns once nobody reads it any more.

        Raises:
            EngineError: there is no channel, or the sender does not send.
        """
        await asyncio.to_thread(self._hand_on, index)
        await self._sink.load_bucket(index)

    def _hand_on(self, index: int) -> None:
        if self._plan is None or self._receiver is None or self._sender is None:
            raise EngineError("a bucket of weights came before the engines were connected")
        flat = self._receiver.receive(index)
        self._sender.send(index, self._plan.buckets[index].views(flat))

    async def finish_update(self, version: int) -> ServedWeights:
        """See :class:`~agentrl.weights.push.WeightSink`: the engines' own sums."""
        return await self._sink.finish_update(version)

    async def give_up_update(self, reason: str) -> None:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        await self._sink.give_up_update(reason)

    def close(self) -> None:
        """Close both channels. Idempotent."""
        self._retire()
        self._close_retired()

    def _retire(self) -> None:
        self._retired += [end for end in (self._receiver, self._sender) if end is not None]
        self._receiver = self._sender = None

    def _close_retired(self) -> None:
        while self._retired:
            self._retired.pop().close()
