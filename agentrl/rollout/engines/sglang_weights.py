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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor

from agentrl.errors import EngineError
from agentrl.rollout.engines.http import JsonClient
from agentrl.weights.checksum import checksum
from agentrl.weights.plan import BucketPlan, PlannedBucket

_ROWS = 2
_SHARED_MEMORY = "/dev/shm"


class TensorHandover:
    """Hands buckets to a server.

    Args:
        plan: of the buckets.
        device: of the buffer.
        num_ranks: of the server's tensor parallelism; each takes its part by itself.
        timeout_s: for the server to answer.
        verify_tensors: tensors that are read back after an update.
    """

    def __init__(
        self,
        client: JsonClient,
        plan: BucketPlan,
        *,
        device: str,
        num_ranks: int,
        timeout_s: float,
        verify_tensors: int,
    ) -> None:
        self.plan = plan
        self._client = client
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._verify_tensors = verify_tensors
        self._next_verified = 0
        self._rows: dict[str, list[float]] = {}
        self._buffer = _buffer(max(plan.slot_bytes, 1), device)
        self._held: Tensor | None = None
        self._sent: tuple[dict[str, int], str | None] = ({}, None)
        """Checksums and the server's fingerprint of the update before."""
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
        """
        if index == len(self.plan.buckets) - 1:
            self._held = flat.clone()
        else:
            await self._hand_over(index, flat, version=None)

    async def finish(self, version: int) -> None:
        """Hand over the last bucket with the version, and look at what the server has.

        Raises:
            EngineError: the server refused it, or has not what it was sent.
        """
        held, self._held = self._held, None
        assert held is not None, "the last bucket is missing"
        before, self._sent = self._sent, ({}, None)
        await self._hand_over(len(self.plan.buckets) - 1, held, version=version)
        await self._verify_rows()
        found = await served_fingerprint(self._client, timeout_s=self._timeout_s)
        refuse_unchanged(before, (self.sums, found))
        self._sent = dict(self.sums), found

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
        reply = await self._client.post(
            "/update_weights_from_tensor", body, timeout_s=self._timeout_s
        )
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
        names = [piece.name for bucket in self.plan.buckets for piece in bucket.slices]
        count = min(self._verify_tensors, len(names))
        turns = itertools.islice(itertools.cycle(names), self._next_verified, None)
        return set(itertools.islice(turns, count))

    async def _verify_rows(self) -> None:
        """Read rows back and compare."""
        rows, self._rows = self._rows, {}
        for name, expected in rows.items():
            found = await self._read(name)
            if found is not None and found != expected:
                raise EngineError(
                    f"scrambled policy: SGLang serves {name!r} otherwise than it was sent; "
                    "sampling from it would train another policy"
                )
        names = sum(len(bucket.slices) for bucket in self.plan.buckets)
        self._next_verified = (self._next_verified + self._verify_tensors) % max(names, 1)

    async def _read(self, name: str) -> list[float] | None:
        """Return the first rows of a tensor as served; None where the server cannot read it."""
        body = {"name": name, "truncate_size": _ROWS}
        reply = await self._client.post("/get_weights_by_name", body, timeout_s=self._timeout_s)
        if reply.status != 200 or not isinstance(reply.body, list):
            return None
        rows = reply.body
        try:
            flat = np.asarray(rows, dtype=np.float64).reshape(-1)
        except (TypeError, ValueError) as error:
            raise EngineError(
                f"{self._client.base_url}: {name!r} was read back in another form: {reply.text}"
            ) from error
        return flat.tolist()


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


async def served_fingerprint(client: JsonClient, *, timeout_s: float) -> str | None:
    """Return what the server makes of all its parameters; None where it cannot say.

    Another hash than ours, of fused tensors: it tells that weights changed, not to what.
    """
    reply = await client.post("/weights_checker", {"action": "checksum"}, timeout_s=timeout_s)
    if reply.status != 200 or not isinstance(reply.body, dict):
        return None
    return reply.body.get("per_engine_checksum")


def refuse_unchanged(
    before: tuple[Mapping[str, int], str | None], after: tuple[Mapping[str, int], str | None]
) -> None:
    """Refuse an update after which the server has what it had, though it was sent something else.

    Args:
        before, after: checksums of what was sent, and the server's fingerprint.

    Raises:
        EngineError: stale weights.
    """
    (old_sums, old_print), (new_sums, new_print) = before, after
    if not old_sums or old_print is None or new_print is None:
        return
    if (old_sums == new_sums) != (old_print == new_print):
        what = "did not change" if old_print == new_print else "changed"
        raise EngineError(
            f"stale policy: the weights that SGLang serves {what} in the last update, those that "
            "it was sent did the opposite"
        )


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
