"""Weights of one version on their way to rollout workers, and what arrived of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from agentrl.dist.weight_sync.buckets import Bucket, pack
from agentrl.dist.weight_sync.checksum import differences
from agentrl.errors import EngineError


@dataclass(slots=True, frozen=True, kw_only=True)
class Shipment:
    """All weights of one version."""

    version: int
    buckets: tuple[Any, ...]
    """References to :class:`~agentrl.dist.weight_sync.buckets.Bucket` in an object store, or the
    buckets themselves."""
    sums: Mapping[str, int]
    """Name -> checksum of the tensor in the dtype that is served."""
    num_bytes: int


@dataclass(slots=True, frozen=True, kw_only=True)
class ServedWeights:
    """What an engine says that it samples from."""

    version: int
    sums: Mapping[str, int]
    """Name -> checksum of the tensor as it is served."""


def ship(
    params: Iterable[tuple[str, Tensor]],
    *,
    version: int,
    bucket_bytes: int,
    dtypes: Mapping[str, str],
    put: Callable[[Bucket], Any],
) -> Shipment:
    """Pack a stream of tensors and hand each bucket to ``put`` as soon as it is full.

    Args:
        params, bucket_bytes, dtypes: see :func:`~agentrl.dist.weight_sync.buckets.pack`.
        put: stores a bucket and returns what receivers find it by.
    """
    sums: dict[str, int] = {}
    references, num_bytes = [], 0
    for bucket in pack(params, bucket_bytes=bucket_bytes, dtypes=dtypes, sums=sums):
        num_bytes += bucket.data.nbytes
        references.append(put(bucket))
    return Shipment(version=version, buckets=tuple(references), sums=sums, num_bytes=num_bytes)


def refuse_other_weights(sent: Shipment, served: ServedWeights, *, where: str) -> None:
    """Refuse to sample from anything but what was sent.

    Args:
        where: names the engine.

    Raises:
        EngineError: its weights are of another version, or differ.
    """
    if served.version != sent.version:
        raise EngineError(
            f"stale policy: after publishing version {sent.version} {where} says it samples "
            f"version {served.version}"
        )
    if wrong := differences(sent.sums, served.sums):
        raise EngineError(
            f"scrambled policy: after publishing version {sent.version}, {len(wrong)} of "
            f"{len(sent.sums)} tensors are served by {where} otherwise than they were sent, the "
            f"first {wrong[0]!r}; sampling from them would train another policy"
        )
