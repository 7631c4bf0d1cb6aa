"""Weights from training ranks straight into rollout workers, driven from here.

The channel is opened for the workers that there are, and again when one was replaced. What passes
through the driver is the order to send a bucket and the news that it was loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from agentrl.dist.weight_sync.place import Place, Target, choose_transport, senders_of
from agentrl.dist.weight_sync.sender import SendingRanks
from agentrl.errors import ChannelOutdated, EngineError
from agentrl.weights.channels.base import Address
from agentrl.weights.plan import BucketPlan, ordered_like
from agentrl.weights.push import call_all, push
from agentrl.weights.served import ServedWeights, WeightSpec, differences


class RemoteSink(Protocol):
    """A rollout worker; see :class:`~agentrl.dist.rollout_worker.RolloutWorker`."""

    async def weight_target(self) -> Target:
        """Say where it is and what it serves."""
        ...

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        """Open the receiving side."""
        ...

    async def begin_update(self) -> None:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        ...

    async def load_bucket(self, index: int) -> None:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        ...

    async def finish_update(self, version: int) -> ServedWeights:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        ...

    async def give_up_update(self, reason: str) -> None:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        ...


@dataclass(slots=True, frozen=True)
class _Sink:
    """A worker as a :class:`~agentrl.weights.push.WeightSink`."""

    worker: RemoteSink
    target: Target

    @property
    def num_receivers(self) -> int:
        return self.target.num_receivers

    def weight_specs(self) -> Sequence[WeightSpec]:
        return self.target.specs

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        await self.worker.connect(plan, address)

    async def begin_update(self) -> None:
        await self.worker.begin_update()

    async def load_bucket(self, index: int) -> None:
        await self.worker.load_bucket(index)

    async def finish_update(self, version: int) -> ServedWeights:
        return await self.worker.finish_update(version)

    async def give_up_update(self, reason: str) -> None:
        await self.worker.give_up_update(reason)


class _RankSource:
    """Training ranks as a :class:`~agentrl.weights.push.WeightSource`."""

    def __init__(self, ranks: SendingRanks) -> None:
        self._ranks = ranks

    async def send(self, index: int) -> None:
        await asyncio.to_thread(self._ranks.weight_sender, "send", index)

    async def finish(self) -> Mapping[str, int]:
        found = await asyncio.to_thread(self._ranks.weight_sender, "finish")
        return next(sums for sums in found if sums is not None)


class DirectChannel:
    """The channel between the ranks of a training engine and rollout workers.

    Args:
        ranks: that send.
        transport: ``weight_sync.transport``.
        bucket_bytes: of a bucket.
        timeout_s: for one update.
    """

    def __init__(
        self, ranks: SendingRanks, *, transport: str, bucket_bytes: int, timeout_s: float
    ) -> None:
        self._ranks = ranks
        self._wanted, self._bucket_bytes, self._timeout_s = transport, bucket_bytes, timeout_s
        self._places: list[Place] = []
        self._shapes: list[tuple[str, tuple[int, ...]]] = []
        self._targets: dict[int, tuple[RemoteSink, Target]] = {}
        self._open_for: list[RemoteSink] = []
        self._plan = BucketPlan(buckets=())
        self.sums: Mapping[str, int] = {}
        """Of what was published last."""

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return self._plan.num_bytes

    async def choose(self, workers: Sequence[RemoteSink]) -> str:
        """Return the transport that the configuration, ranks and workers allow.

        Raises:
            EngineError: none, or not the one that was asked for.
        """
        if not self._places:
            self._places = await self._call("place")
        targets = [await self._target(worker) for worker in workers]
        return choose_transport(self._wanted, self._places, targets)

    async def publish(
        self, version: int, workers: Sequence[RemoteSink], names: Sequence[str]
    ) -> None:
        """Have every worker serve the ranks' weights.

        Raises:
            EngineError: see :func:`~agentrl.weights.push.push`; the next update opens the channel
                anew.
            WorkerLost: a worker's process is gone.
        """
        self.sums = await self._push(version, workers, names)

    async def catch_up(self, version: int, worker: RemoteSink, name: str) -> bool:
        """Give a replaced worker what was published last, if the ranks still have it.

        Returns:
            whether it serves that now. If not, training has gone on, and the next update is near.

        Raises:
            EngineError, WorkerLost: see :meth:`publish`.
        """
        sums = await self._push(version, [worker], [name])
        return not differences(self.sums, sums)

    async def _push(
        self, version: int, workers: Sequence[RemoteSink], names: Sequence[str]
    ) -> Mapping[str, int]:
        try:
            return await self._push_once(version, workers, names)
        except ChannelOutdated:  # an engine within a worker was replaced: all connect again
            self._targets.clear()
            return await self._push_once(version, workers, names)

    async def _push_once(
        self, version: int, workers: Sequence[RemoteSink], names: Sequence[str]
    ) -> Mapping[str, int]:
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    sinks = [_Sink(worker, await self._target(worker)) for worker in workers]
                    if list(workers) != self._open_for:
                        await self._open(workers)
                    await self._call("begin")
            except TimeoutError:
                raise EngineError(
                    "the channel for weights was not open after weight_sync.timeout_s="
                    f"{self._timeout_s:g} s: a rollout worker or a training rank does not answer"
                ) from None
            served = await push(
                _RankSource(self._ranks),
                sinks,
                plan=self._plan,
                version=version,
                timeout_s=self._timeout_s,
                names=names,
            )
        except BaseException:
            self._open_for = []  # a receiver may be gone for good
            raise
        return served[0].sums

    async def _open(self, workers: Sequence[RemoteSink]) -> None:
        transport = await self.choose(workers)
        targets = [await self._target(worker) for worker in workers]
        _refuse_different(targets)
        if not self._shapes:
            self._shapes = (await self._call("shapes"))[0]
        specs = ordered_like(targets[0].specs, self._shapes)
        self._plan = BucketPlan.of(specs, bucket_bytes=self._bucket_bytes)
        sending = senders_of(transport, self._places, targets)
        receivers = [0] * len(self._places)
        for rank, target in zip(sending, targets, strict=True):
            receivers[rank] += target.num_members(transport)
        addresses = await self._call("open", transport, self._plan, receivers, self._timeout_s)
        await call_all(
            [
                partial(worker.connect, self._plan, addresses[rank])
                for worker, rank in zip(workers, sending, strict=True)
            ]
        )
        self._open_for = list(workers)

    async def _target(self, worker: RemoteSink) -> Target:
        known, target = self._targets.get(id(worker), (None, None))
        if known is not worker or target is None:  # held, so that its id stays its own
            target = await worker.weight_target()
            self._targets[id(worker)] = worker, target
        return target

    async def _call(self, name: str, *args: Any) -> list[Any]:
        return await asyncio.to_thread(self._ranks.weight_sender, name, *args)


def _refuse_different(targets: Sequence[Target]) -> None:
    first = {spec.name: spec for spec in targets[0].specs}
    for target in targets[1:]:
        for spec in target.specs:
            if first.get(spec.name) != spec or len(target.specs) != len(first):
                raise EngineError(
                    f"rollout workers serve different weights: {spec.name!r} is {spec} in one and "
                    f"{first.get(spec.name)} in another; give all of them the same engine"
                )
