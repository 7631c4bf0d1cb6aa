"""Weights through Ray's object store: put there once, read by every rollout worker where they lie.

Memory: one copy of the weights in the store of every node with rollout workers, until the next
version has replaced them everywhere. A worker that is replaced loads from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from agentrl.dist.engine import TrainEngine
from agentrl.dist.group_engine import GroupEngine
from agentrl.dist.weight_sync.shipment import Shipment, ship
from agentrl.weights.buckets import Bucket


def ship_to_store(
    actor: TrainEngine, *, version: int, bucket_bytes: int, dtypes: Mapping[str, str]
) -> Shipment:
    """Put the weights of a training engine into the store, bucket by bucket.

    Those of a group go there from its rank 0, which gathers them; the driver sees references only.

    Args:
        version: of the weights.
        bucket_bytes, dtypes: see :func:`~agentrl.weights.buckets.pack`.
    """
    given = {"version": version, "bucket_bytes": bucket_bytes, "dtypes": dict(dtypes)}
    if isinstance(actor, GroupEngine):
        return actor.ship(**given, put=put_bucket)
    return ship(actor.export_params(), **given, put=put_bucket)


def put_bucket(bucket: Bucket) -> Any:
    """Store a bucket; returns Ray's reference to it."""
    return ray.put(bucket)
