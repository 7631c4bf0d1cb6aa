"""Weights into an SGLang server by ``/update_weights_from_tensor``.

The server takes tensors that were pickled for another process: what travels by HTTP is where they
lie, not what is in them. They lie in one flat buffer of this process that is made once, in shared
memory or on the GPU, so that the server maps it once; the tensors of a bucket are views of it. A
CPU buffer is shared by file name (torch's ``file_system`` strategy), since the server is no
relative of this process: the two must see one ``/dev/shm``, as processes of one container do.
"""

from __future__ import annotations

import base64
import io
import itertools
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing
from torch import Tensor

from agentrl.errors import EngineError, EngineLost
from agentrl.rollout.engines.sglang_served import (
    Ask,
    Update,
    read_rows,
    readable,
    refuse_unchanged,
    served_fingerprints,
)
from agentrl.weights.checksum import checksum
from agentrl.weights.plan import BucketPlan, PlannedBucket

_ROWS = 2
_SHARED_MEMORY = "/dev/shm"


class TensorHandover:
    """Hands buckets to a server.

    Args:
        ask: of the server.
        plan: of the buckets.
        device: of the buffer.
        num_ranks: of the server's tensor parallelism; each takes its part by itself.
        verify_tensors: tensors that are read back after an update.
    """

    def __init__(
        self,
        ask: Ask,
        plan: BucketPlan,
        *,
        device: str,
        num_ranks: int,
        verify_tensors: int,
    ) -> None:
        self.plan = plan
        self._ask = ask
        self._num_ranks = num_ranks
        pieces = [piece for bucket in plan.buckets for piece in bucket.slices]
        self._readable = readable({piece.name: piece.shape for piece in pieces})
        self._verify_tensors = min(verify_tensors, len(self._readable))
        self._next_verified = 0
        self._rows: dict[str, list[float]] = {}
        self._buffer = _buffer(max(plan.slot_bytes, 1), device)
        self._held: Tensor | None = None
        self._last = Update(sums={}, prints=None)
        self.sums: dict[str, int] = {}

    def begin(self) -> None:
        """Forget what is left of an update that was given up."""
        self._held = None

    async def load(self, index: int, flat: Tensor) -> None:
        """Hand over a bucket; the last one is kept until :meth:`finish` tells its version.

        Args:
            flat: uint8, as the plan has it, on any device; read before this returns.

        Raises:
            EngineError: it holds values that are not finite, or the server refused it.
            EngineLost: it ended the server.
        """
        if index == len(self.plan.buckets) - 1:
            self._held = flat.clone()
        else:
            await self._hand_over(index, flat, version=None)

    async def finish(self, version: int) -> None:
        """Hand over the last bucket with the version, and look at what the server has.

        Raises:
            EngineError: the server refused it, or has not what it was sent.
            EngineLost: it ended the server.
        """
        held, self._held = self._held, None
        assert held is not None, "the last bucket is missing"
        before, self._last = self._last, Update(sums={}, prints=None)
        await self._hand_over(len(self.plan.buckets) - 1, held, version=version)
        await self._verify_rows()
        after = Update(sums=dict(self.sums), prints=await served_fingerprints(self._ask))
        refuse_unchanged(before, after)
        self._last = after

    async def _hand_over(self, index: int, flat: Tensor, *, version: int | None) -> None:
        bucket = self.plan.buckets[index]
        self._buffer[: bucket.num_bytes].copy_(flat[: bucket.num_bytes])
        if self._buffer.device.type == "cuda":
            torch.cuda.synchronize(self._buffer.device)
        named = self._named(bucket)
        for name, value in named:
            if not torch.isfinite(value).all():
                raise EngineError(f"weight update: {name!r} holds values that are not finite")
        self.sums |= {name: checksum(value) for name, value in named}
        self._note_rows(named)
        payload = _pickled(named)
        body = {
            "serialized_named_tensors": [payload] * self._num_ranks,
            "flush_cache": version is not None,
        }
        if version is not None:
            body["weight_version"] = str(version)
        try:
            reply = await self._ask("/update_weights_from_tensor", body)
        except EngineLost as error:
            raise EngineLost(
                f"SGLang went away while it loaded weights ({bucket.slices[0].name} …), as it does "
                f"where its model has other shapes than the one that is trained: {error}"
            ) from error
        if reply.status != 200:
            raise EngineError(f"SGLang refused weights ({bucket.slices[0].name} …): {reply.text}")

    def _named(self, bucket: PlannedBucket) -> list[tuple[str, Tensor]]:
        views = bucket.views(self._buffer)
        return [(piece.name, view) for piece, view in zip(bucket.slices, views, strict=True)]

    def _note_rows(self, named: Sequence[tuple[str, Tensor]]) -> None:
        wanted = self._verified_names()
        for name, value in named:
            if name in wanted:
                self._rows[name] = value[:_ROWS].float().flatten().tolist()

    def _verified_names(self) -> set[str]:
        turns = itertools.islice(itertools.cycle(self._readable), self._next_verified, None)
        return set(itertools.islice(turns, self._verify_tensors))

    async def _verify_rows(self) -> None:
        """Read rows back and compare."""
        rows, self._rows = self._rows, {}
        for name, expected in rows.items():
            found = await read_rows(self._ask, name, _ROWS)
            if found is not None and found != expected:
                raise EngineError(
                    f"scrambled policy: SGLang serves {name!r} otherwise than it was sent; "
                    "sampling from it would train another policy"
                )
        num_names = max(len(self._readable), 1)
        self._next_verified = (self._next_verified + self._verify_tensors) % num_names


def _buffer(size: int, device: str) -> Tensor:
    """Return uint8 [size] that the server can map.

    Raises:
        EngineError: there is no room for it.
    """
    hint = "lower weight_sync.bucket_mb, or enlarge it (docker run --shm-size)"
    try:
        if torch.device(device).type == "cpu":
            # Asked before: what torch cannot fill it leaves behind.
            free = shutil.disk_usage(_SHARED_MEMORY).free
            if free < size:
                raise OSError(f"{free / 2**20:,.1f} MiB are free in {_SHARED_MEMORY}; {hint}")
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        if buffer.device.type == "cpu":
            with _by_file_name():
                buffer.share_memory_()
    except (OSError, RuntimeError) as error:
        raise EngineError(
            f"{size / 2**20:,.1f} MiB to hand weights over to SGLang cannot be had on {device}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return buffer


def packed(bucket: PlannedBucket, tensors: Sequence[Tensor], device: str) -> Tensor:
    """Return the tensors of a bucket as uint8 [num_bytes], cast to what is served."""
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
    for view, value in zip(bucket.views(flat), tensors, strict=True):
        view.copy_(value.detach())
    return flat


def _pickled(named: Sequence[tuple[str, Tensor]]) -> str:
    buffer = io.BytesIO()
    with _by_file_name():
        ForkingPickler(buffer).dump(list(named))
    return base64.b64encode(buffer.getvalue()).decode()


@contextmanager
def _by_file_name() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
