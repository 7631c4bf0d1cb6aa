"""An engine's side of a weight channel without an engine: tensors, here or in a process."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from agentrl.errors import AgentRLError, EngineLost
from agentrl.weights.channels import open_receiver
from agentrl.weights.channels.base import Address, Receiver
from agentrl.weights.checksum import SliceSums, TensorSlice
from agentrl.weights.plan import BucketPlan
from agentrl.weights.served import ServedWeights, WeightSpec

ANSWER_TIMEOUT_S = 120.0
"""Of a process that may have to start first."""
END_TIMEOUT_S = 30.0


class TensorSink:
    """A :class:`~agentrl.weights.push.WeightSink` over named tensors.

    Args:
        specs: of the tensors.
        device: where they lie.

    Attributes:
        weights: as served.
        version: of them.
    """

    num_receivers = 1

    def __init__(self, specs: Sequence[WeightSpec], *, device: str = "cpu") -> None:
        self.weights = {
            spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for spec in specs
        }
        self.version = -1
        self._specs, self._device = list(specs), device
        self._sums = SliceSums([TensorSlice.whole(value) for value in self.weights.values()])
        self._receiver: Receiver | None = None
        self._plan: BucketPlan | None = None

    def weight_specs(self) -> Sequence[WeightSpec]:
        """Return what was given."""
        return self._specs

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        """Open the receiving side."""
        if self._receiver is not None:
            self._receiver.close()
        self._plan, self._receiver = plan, open_receiver(address, plan, self._device)

    async def begin_update(self) -> None:
        """Nothing is ever unfinished."""

    async def load_bucket(self, index: int) -> None:
        """Copy a bucket's tensors to where they are served."""
        assert self._plan is not None and self._receiver is not None
        bucket = self._plan.buckets[index]
        flat = await asyncio.to_thread(self._receiver.receive, index)
        targets = [self.weights[piece.name] for piece in bucket.slices]
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            targets, bucket.views(flat)
        )
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()

    async def finish_update(self, version: int) -> ServedWeights:
        """Say what is there."""
        self.version = version
        sums = dict(zip(self.weights, self._sums.compute().tolist(), strict=True))
        return ServedWeights(version=version, sums=sums)

    async def give_up_update(self, reason: str) -> None:
        """Nobody waits for the end of one."""


class ProcessSink:
    """A :class:`TensorSink` in another process.

    Args:
        specs: of the tensors.
        device: where they lie there.
        kind: of sink.

    Attributes:
        process: to be killed or stopped by a test.
        answer_timeout_s: for a call.
    """

    num_receivers = 1

    def __init__(
        self,
        specs: Sequence[WeightSpec],
        *,
        device: str = "cpu",
        kind: type[TensorSink] = TensorSink,
    ) -> None:
        self.answer_timeout_s = ANSWER_TIMEOUT_S
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._specs = list(specs)
        self.process: SpawnProcess = context.Process(
            target=_serve, args=(theirs, kind, self._specs, device), daemon=True
        )
        self.process.start()
        theirs.close()

    def weight_specs(self) -> Sequence[WeightSpec]:
        """Return what was given."""
        return self._specs

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        """See :class:`TensorSink`."""
        await self._call("connect", plan, address)

    async def begin_update(self) -> None:
        """See :class:`TensorSink`."""
        await self._call("begin_update")

    async def load_bucket(self, index: int) -> None:
        """See :class:`TensorSink`."""
        await self._call("load_bucket", index)

    async def finish_update(self, version: int) -> ServedWeights:
        """See :class:`TensorSink`."""
        return await self._call("finish_update", version)

    async def give_up_update(self, reason: str) -> None:
        """See :class:`TensorSink`; a process that hangs or is gone is not asked."""

    async def _call(self, name: str, *args: Any) -> Any:
        return await asyncio.to_thread(self.call, name, *args)

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the sink there; blocks.

        Raises:
            AgentRLError: what it raised.
            EngineLost: the process is gone, or does not answer.
        """
        try:
            self._pipe.send((name, args))
            answer = self._pipe.recv() if self._pipe.poll(self.answer_timeout_s) else None
        except (EOFError, OSError):
            raise EngineLost(f"the process that {name} was called in is gone") from None
        if answer is None:
            raise EngineLost(f"no answer to {name} after {self.answer_timeout_s:g} s")
        result, error = answer
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self.process.kill()
        self.process.join(END_TIMEOUT_S)


def _serve(
    pipe: Connection, kind: type[TensorSink], specs: Sequence[WeightSpec], device: str
) -> None:
    """Answer calls until the other side closes."""
    sink = kind(specs, device=device)
    while True:
        try:
            name, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = asyncio.run(getattr(sink, name)(*args)), None
        except AgentRLError as error:
            answer = None, error
        pipe.send(answer)


@contextmanager
def process_sinks(
    specs: Sequence[WeightSpec], count: int, *, device: str = "cpu"
) -> Iterator[list[ProcessSink]]:
    """Hold ``count`` processes that receive."""
    found: list[ProcessSink] = []
    try:
        for _ in range(count):
            found.append(ProcessSink(specs, device=device))
        yield found
    finally:
        for sink in found:
            sink.close()
