"""Weights of one version on their way through an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from agentrl.weights.buckets import Bucket, pack


@dataclass(slots=True, frozen=True, kw_only=True)
class Shipment:
    """All weights of one version."""

    version: int
    buckets: tuple[Any, ...]
    """References to :class:`~agentrl.weights.buckets.Bucket` in an object store, or the
    buckets themselves."""
    sums: Mapping[str, int]
    """Name -> checksum of the tensor in the dtype that is served."""
    num_bytes: int


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
        params, bucket_bytes, dtypes: see :func:`~agentrl.weights.buckets.pack`.
        put: stores a bucket and returns what receivers find it by.
    """
    sums: dict[str, int] = {}
    references, num_bytes = [], 0
    for bucket in pack(params, bucket_bytes=bucket_bytes, dtypes=dtypes, sums=sums):
        num_bytes += bucket.data.nbytes
        references.append(put(bucket))
    return Shipment(version=version, buckets=tuple(references), sums=sums, num_bytes=num_bytes)
