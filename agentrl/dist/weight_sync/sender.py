"""A training engine's side of a direct channel; one on every rank, since ranks gather together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from agentrl.dist.engine import TrainEngine
from agentrl.dist.weight_sync.place import Place
from agentrl.errors import EngineError
from agentrl.weights.channels import open_sender
from agentrl.weights.channels.base import Address, Sender
from agentrl.weights.plan import BucketPlan


@runtime_checkable
class SendingRanks(Protocol):
    """All ranks of a training engine, called as one."""

    def weight_sender(self, call: str, *args: Any) -> list[Any]:
        """Call a method of every rank's :class:`EngineSender`; returns the results by rank.

        Raises:
            EngineError: of the first rank that raised one.
        """
        ...


class EngineSender:
    """Sends an engine's weights from one rank.

    Args:
        engine: all ranks' senders go through its stream together.
        device: of the rank.
        rank: of the training ranks.
    """

    def __init__(self, engine: TrainEngine, *, device: torch.device, rank: int) -> None:
        self._engine, self._device, self._rank = engine, device, rank
        self._plan: BucketPlan | None = None
        self._sender: Sender | None = None
        self._retired: list[Sender] = []
        """Receivers may still look at their memory."""
        self._buckets: Iterator[list[Tensor]] | None = None

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return name and shape of every tensor, in the order of sending."""
        return [(name, tuple(value.shape)) for name, value in self._engine.export_params()]

    def place(self) -> Place:
        """Say where this rank is."""
        return Place.of_this_process(on_gpu=self._device.type == "cuda")

    def open(
        self, transport: str, plan: BucketPlan, receivers: Sequence[int], timeout_s: float
    ) -> Address | None:
        """Open a channel in place of the one before, which is closed when the new one is used.

        Args:
            receivers: how many come to each rank; a rank of none sends nothing.
        """
        if self._sender is not None:
            self._retired.append(self._sender)
            self._sender = None
        self._plan = plan
        if receivers[self._rank]:
            device = torch.device("cpu") if transport in ("shm", "gloo") else self._device
            self._sender = open_sender(
                transport,
                plan,
                device=device,
                num_receivers=receivers[self._rank],
                timeout_s=timeout_s,
            )
        return None if self._sender is None else self._sender.address

    def begin(self) -> None:
        """Start the stream over."""
        assert self._plan is not None, "a channel is opened before it is used"
        self._close_retired()
        self._buckets = self._plan.fill(self._engine.export_params())

    def send(self, index: int) -> None:
        """Gather the next bucket, together with the other ranks, and send it."""
        assert self._buckets is not None
        tensors = next(self._buckets)
        if self._sender is not None:
            self._sender.send(index, tensors)

    def finish(self) -> Mapping[str, int] | None:
        """Return the checksums; None of a rank that sends nothing.

        Raises:
            EngineError: the stream has a tensor that the plan has not.
        """
        assert self._buckets is not None
        next(self._buckets, None)
        self._buckets = None
        return None if self._sender is None else self._sender.sums

    def close(self) -> None:
        """Close the channel. Idempotent."""
        if self._sender is not None:
            self._retired.append(self._sender)
        self._sender = self._buckets = None
        self._close_retired()

    def _close_retired(self) -> None:
        while self._retired:
            self._retired.pop().close()

    def call(self, name: str, args: Sequence[Any]) -> Any:
        """Call a method by name.

        Returns:
            its result, or the error of the channel: it is the update's, not the rank's, which goes
            on training.
        """
        try:
            return getattr(self, name)(*args)
        except EngineError as error:
            return error


class OneRank:
    """An engine of this process as :class:`SendingRanks`."""

    def __init__(self, engine: TrainEngine) -> None:
        _, first = next(iter(engine.export_params()))
        self._sender = EngineSender(engine, device=first.device, rank=0)

    def weight_sender(self, call: str, *args: Any) -> list[Any]:
        """See :class:`SendingRanks`."""
        return raise_first([self._sender.call(call, args)])


def sending_ranks(engine: TrainEngine | SendingRanks) -> SendingRanks:
    """Return the ranks of a training engine, or this process as the only one."""
    return engine if isinstance(engine, SendingRanks) else OneRank(engine)


def raise_first(results: list[Any]) -> list[Any]:
    """Return what ranks returned, unless one of them returned an error."""
    for result in results:
        if isinstance(result, EngineError):
            raise result
    return results
