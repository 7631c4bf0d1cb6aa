"""Weights into several engines at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from agentrl.errors import EngineError, EngineLost
from agentrl.rollout.engine import RolloutEngine
from agentrl.weights.served import ServedWeights, WeightSpec

if TYPE_CHECKING:
    import torch

    from agentrl.weights.channels.base import Address, Sender
    from agentrl.weights.plan import BucketPlan
    from agentrl.weights.push import WeightSink

T = TypeVar("T")
_TIMEOUT = "rollout.serving.update_timeout_s"


async def on_each(
    engines: Sequence[RolloutEngine], call: Callable[[RolloutEngine], Awaitable[T]]
) -> list[T | EngineLost]:
    """Call every engine at once; returns in their order what it said, or that it is lost.

    Raises:
        BaseException: what else the first of them raised, once all have ended.
    """
    results = await asyncio.gather(*(call(engine) for engine in engines), return_exceptions=True)
    found: list[T | EngineLost] = []
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, EngineLost):
            raise result
        found.append(result)
    return found


class Publisher:
    """Gives engines weights of this process: through one channel to all that take buckets.

    An engine that is lost on the way does not keep the others from theirs.

    Args:
        timeout_s: for an update.
        bucket_bytes: of a bucket; a smaller model is one.
    """

    def __init__(self, *, timeout_s: float, bucket_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._sender: Sender | None = None
        self._transport = ""
        self._connected: list[RolloutEngine] = []

    async def publish(
        self,
        engines: Sequence[RolloutEngine],
        params: Iterable[tuple[str, torch.Tensor]],
        version: int,
    ) -> list[ServedWeights | EngineLost]:
        """Replace the weights of engines that work at no request.

        Args:
            params: read once. Engines that take no buckets share the tensors; none is copied.

        Raises:
            EngineError: an engine refused the weights, serves others than were sent, or has not
                loaded them in time.
        """
        from agentrl.weights.push import WeightSink

        sinks = [engine for engine in engines if isinstance(engine, WeightSink)]
        if len(engines) > 1 and sinks and len(sinks) == len(engines):
            return await self._push(engines, sinks, params, version)
        self.forget_connections()
        given = params if len(engines) == 1 else list(params)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await on_each(engines, lambda engine: engine.update_weights(given, version))
        except TimeoutError:
            raise EngineError(
                f"weights of version {version} have not been loaded after {_TIMEOUT}="
                f"{self._timeout_s:g} s; an engine hangs, or raise it"
            ) from None

    def forget_connections(self) -> None:
        """Hear that engines were given weights another way, for which they may open a channel.

        An engine has one: before the next update through this one, all connect again.
        """
        self._connected = []

    def close(self) -> None:
        """Close the channel. Idempotent."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    async def _push(
        self,
        engines: Sequence[RolloutEngine],
        sinks: Sequence[WeightSink],
        params: Iterable[tuple[str, torch.Tensor]],
        version: int,
    ) -> list[ServedWeights | EngineLost]:
        from agentrl.weights.push import StreamSource, push

        stream = iter(params)
        first = next(stream, None)
        whole = stream if first is None else itertools.chain([first], stream)
        device = "cpu" if first is None else first[1].device
        sender = self._open(engines[0].weight_specs(), device, len(sinks))
        survivors = [Survivor(sink, sender) for sink in sinks]
        new = [
            survivor
            for engine, survivor in zip(engines, survivors, strict=True)
            if not any(engine is known for known in self._connected)
        ]
        await self._connect(new, sender)
        self._connected = list(engines)
        served = await push(
            StreamSource(whole, sender),
            survivors,
            plan=sender.plan,
            version=version,
            timeout_s=self._timeout_s,
            timeout_key=_TIMEOUT,
        )
        return [item.lost or found for item, found in zip(survivors, served, strict=True)]

    async def _connect(self, sinks: Sequence[Survivor], sender: Sender) -> None:
        from agentrl.weights.push import call_all

        try:
            async with asyncio.timeout(self._timeout_s):
                await call_all([partial(s.connect, sender.plan, sender.address) for s in sinks])
        except TimeoutError:
            raise EngineError(
                f"an engine has not opened the channel of weights after {_TIMEOUT}="
                f"{self._timeout_s:g} s; it hangs, or raise it"
            ) from None

    def _open(
        self, specs: Sequence[WeightSpec], device: torch.device | str, num_receivers: int
    ) -> Sender:
        """Return the channel, which is opened once for all updates from one kind of device."""
        from agentrl.weights.channels import open_sender
        from agentrl.weights.plan import BucketPlan

        transport = "cuda_ipc" if str(device).startswith("cuda") else "shm"
        if self._sender is None or transport != self._transport:
            self.close()
            self._connected = []
            self._transport = transport
            self._sender = open_sender(
                transport,
                BucketPlan.of(specs, bucket_bytes=self._bucket_bytes),
                device=device,
                num_receivers=num_receivers,
                timeout_s=self._timeout_s,
            )
        return self._sender


class Survivor:
    """A sink that lets others go on when it is lost: it notes so, and takes the rest as loaded.

    Args:
        sink: what is behind it.
        sender: of what it is given.
    """

    def __init__(self, sink: WeightSink, sender: Sender) -> None:
        self._sink = sink
        self._sender = sender
        self.lost: EngineLost | None = None

    @property
    def num_receivers(self) -> int:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        return self._sink.num_receivers

    def weight_specs(self) -> Sequence[WeightSpec]:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        return self._sink.weight_specs()

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        await self._unless_lost(lambda: self._sink.connect(plan, address))

    async def begin_update(self) -> None:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        await self._unless_lost(self._sink.begin_update)

    async def load_bucket(self, index: int) -> None:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        await self._unless_lost(lambda: self._sink.load_bucket(index))

    async def finish_update(self, version: int) -> ServedWeights:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        served = await self._unless_lost(lambda: self._sink.finish_update(version))
        # Of a lost one nothing is served: who pushes looks at `lost` before this.
        return served or ServedWeights(version=version, sums=self._sender.sums)

    async def give_up_update(self, reason: str) -> None:
        """See :class:`~agentrl.weights.push.WeightSink`."""
        await self._unless_lost(lambda: self._sink.give_up_update(reason))

    async def _unless_lost(self, call: Callable[[], Awaitable[T]]) -> T | None:
        if self.lost is None:
            try:
                return await call()
            except EngineLost as error:
                self.lost = error
        return None
