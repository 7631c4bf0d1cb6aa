"""One update of weights: buckets are packed while the ones before them are being loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from agentrl.errors import EngineError
from agentrl.weights.channels.base import DEFAULT_TIMEOUT_S, Address, Sender
from agentrl.weights.plan import BucketPlan
from agentrl.weights.served import ServedWeights, WeightSpec, refuse_other_weights

T = TypeVar("T")
GIVE_UP_TIMEOUT_S = 10.0
"""For sinks to hear that an update was given up."""


@runtime_checkable
class WeightSink(Protocol):
    """What takes weights bucket by bucket.

    From :meth:`begin_update` until :meth:`finish_update` it samples nothing; after an update that
    failed, nothing until another has succeeded.
    """

    @property
    def num_receivers(self) -> int:
        """Processes that open the channel: of an engine, its tensor-parallel ranks."""
        ...

    def weight_specs(self) -> Sequence[WeightSpec]:
        """Return the tensors that are served."""
        ...

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        """Open the receiving side of a channel, in place of the one before."""
        ...

    async def begin_update(self) -> None:
        """Wait until no request is unfinished, and let none begin."""
        ...

    async def load_bucket(self, index: int) -> None:
        """Load a bucket that was sent; returns once its slot is not read any more."""
        ...

    async def finish_update(self, version: int) -> ServedWeights:
        """Forget all that was computed with other weights; say what is served."""
        ...

    async def give_up_update(self, reason: str) -> None:
        """Hear that no more of an update comes: who waits for its end is told why.

        Does nothing where none is under way.
        """
        ...


class WeightSource(Protocol):
    """What sends buckets."""

    async def send(self, index: int) -> None:
        """Send the next bucket; they come in order."""
        ...

    async def finish(self) -> Mapping[str, int]:
        """Return name -> checksum of what was sent; nothing may be left over."""
        ...


class StreamSource:
    """Weights of this process.

    Args:
        params: name and tensor, of any dtype; read once.
        sender: that they go through.
    """

    def __init__(self, params: Iterable[tuple[str, Tensor]], sender: Sender) -> None:
        self._sender = sender
        self._buckets: Iterator[list[Tensor]] = sender.plan.fill(params)

    async def send(self, index: int) -> None:
        """See :class:`WeightSource`."""
        await asyncio.to_thread(self.send_now, index)

    def send_now(self, index: int) -> None:
        """Send the next bucket; blocks."""
        self._sender.send(index, next(self._buckets))

    async def finish(self) -> Mapping[str, int]:
        """See :class:`WeightSource`."""
        return await asyncio.to_thread(self.finish_now)

    def finish_now(self) -> Mapping[str, int]:
        """Return the checksums; blocks.

        Raises:
            EngineError: the stream has a tensor that the plan has not.
        """
        next(self._buckets, None)
        return self._sender.sums


async def push(
    source: WeightSource,
    sinks: Sequence[WeightSink],
    *,
    plan: BucketPlan,
    version: int,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    timeout_key: str = "weight_sync.timeout_s",
    names: Sequence[str] | None = None,
) -> list[ServedWeights]:
    """Have every sink serve the source's weights, and nothing else.

    Args:
        sinks: connected to the source's channel.
        plan: the channel's.
        version: of the weights.
        timeout_s: for all of it.
        timeout_key: the setting that it comes from.
        names: of the sinks, for messages.

    Returns:
        what each sink says it serves.

    Raises:
        EngineError: a tensor is missing, unknown or of another shape; a sink refused it, serves
            others than were sent or another version, or was not done in time.
        EngineLost: a sink's process is gone.
    """
    names = names or [f"engine {i}" for i in range(len(sinks))]
    progress = "the unfinished requests"
    loading: asyncio.Future[list[None]] | None = None
    failure: BaseException | None = None
    try:
        async with asyncio.timeout(timeout_s):
            await call_all([sink.begin_update for sink in sinks])
            for index in range(len(plan.buckets)):
                progress = f"bucket {index} of {len(plan.buckets)}"
                # Its slot was read two buckets ago; the one before is being loaded meanwhile.
                await source.send(index)
                if loading is not None:
                    await loading
                loading = asyncio.ensure_future(
                    call_all([partial(sink.load_bucket, index) for sink in sinks])
                )
            if loading is not None:
                await loading
            progress = "the checksums"
            sums = await source.finish()
            served = await call_all([partial(sink.finish_update, version) for sink in sinks])
    except TimeoutError:
        failure = EngineError(
            f"weights of version {version} have not arrived after {timeout_s:g} s: waiting for "
            f"{progress}; an engine hangs or is gone, or requests take longer: raise "
            f"{timeout_key}, or lower rollout.max_turn_tokens"
        )
        raise failure from None
    except BaseException as error:
        failure = error
        raise
    finally:
        if loading is not None:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)  # also of one that has failed
        if failure is not None:
            await _give_up(sinks, f"{type(failure).__name__}: {failure}")
    sent = ServedWeights(version=version, sums=sums)
    for name, found in zip(names, served, strict=True):
        refuse_other_weights(sent, found, where=name)
    return served


async def _give_up(sinks: Sequence[WeightSink], reason: str) -> None:
    """Tell every sink that no more comes; what is broken or gone hears nothing."""
    telling = [asyncio.ensure_future(sink.give_up_update(reason)) for sink in sinks]
    if telling:
        _, silent = await asyncio.wait(telling, timeout=GIVE_UP_TIMEOUT_S)
        for task in silent:
            task.cancel()
    await asyncio.gather(*telling, return_exceptions=True)


async def call_all(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Call and await all; the first error ends the others, and is raised when they have ended."""
    tasks = [asyncio.ensure_future(call()) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
