"""A model in an object store, so that the ranks of a group can open it.

Rank 0 reads the weights; the others build what has shapes and no storage, and get their shards from
rank 0. No rank has to see the model's own files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from agentrl.dist.weight_sync.shipment import Shipment, ship
from agentrl.model.blueprint import Blueprint
from agentrl.model.load import LoadedModel
from agentrl.weights.buckets import Bucket, unpack

_BUCKET_BYTES = 256 << 20


@dataclass(slots=True, frozen=True, kw_only=True)
class StoredModel:
    """Architecture, tokenizer, and where the weights are. Can be pickled."""

    blueprint: Blueprint
    weights: Shipment
    fetch: Callable[[Any], Bucket]
    """Reference of a bucket -> the bucket."""

    def open(self, *, device: str) -> LoadedModel:
        """Return the model that was stored.

        Raises:
            ModelError: it cannot be built in this process.
        """
        model = self.blueprint.build(device="cpu")
        own = dict(model.model.named_parameters()) | dict(model.model.named_buffers())
        with torch.no_grad():
            for reference in self.weights.buckets:
                for name, value in unpack([self.fetch(reference)]):
                    own[name].copy_(value)
        model.model.to(device)
        return model

    def outline(self) -> LoadedModel:
        """Return the model on torch's meta device.

        Raises:
            ModelError: it cannot be built in this process.
        """
        return self.blueprint.build(device="meta")


def store_model(
    model: LoadedModel, *, put: Callable[[Bucket], Any], fetch: Callable[[Any], Bucket]
) -> StoredModel:
    """Put a model's weights into a store.

    Args:
        put: stores a bucket and returns its reference.
        fetch: undoes ``put``, in another process; can be pickled.
    """
    seen: set[int] = set()
    named = []
    for name, value in model.model.state_dict(keep_vars=True).items():
        if id(value) not in seen:  # tied ones once
            seen.add(id(value))
            named.append((name, value))
    weights = ship(named, version=0, bucket_bytes=_BUCKET_BYTES, dtypes={}, put=put)
    return StoredModel(blueprint=Blueprint.of(model), weights=weights, fetch=fetch)
