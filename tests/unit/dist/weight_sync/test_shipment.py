"""Anything but what was sent is refused, by name."""

from __future__ import annotations

import pytest
import torch

from agentrl.dist.weight_sync.shipment import Shipment, ship
from agentrl.errors import EngineError
from agentrl.weights.buckets import unpack
from agentrl.weights.checksum import checksums
from agentrl.weights.served import ServedWeights, refuse_other_weights

PARAMS = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(5))]


def shipped() -> Shipment:
    return ship(PARAMS, version=3, bucket_bytes=32, dtypes={}, put=lambda bucket: bucket)


def test_what_was_shipped_is_accepted() -> None:
    sent = shipped()
    assert len(sent.buckets) == 2 and sent.num_bytes == 44
    served = ServedWeights(version=3, sums=checksums(unpack(sent.buckets)))
    refuse_other_weights(sent, served, where="worker 0")


@pytest.mark.parametrize(
    ("version", "names", "message"),
    [
        (2, {"a": 0, "b": 0}, "stale policy: after publishing version 3 worker 1 says it samples"),
        (3, {"a": 1, "b": 0}, "1 of 2 tensors are served by worker 1 .* the first 'a'"),
        (3, {"a": 0}, "the first 'b'"),
        (3, {"a": 0, "b": 0, "c": 0}, "the first 'c'"),
    ],
)
def test_other_weights_are_refused(version: int, names: dict[str, int], message: str) -> None:
    sent = shipped()
    sums = {name: sent.sums.get(name, 0) + change for name, change in names.items()}
    with pytest.raises(EngineError, match=message):
        refuse_other_weights(sent, ServedWeights(version=version, sums=sums), where="worker 1")
