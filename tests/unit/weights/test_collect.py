"""Buckets for an engine that takes weights whole."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from torch import Tensor

from agentrl.weights import collect
from agentrl.weights.channels import open_receiver, open_sender
from agentrl.weights.checksum import checksums
from agentrl.weights.collect import CollectingSink
from agentrl.weights.push import StreamSource, push
from agentrl.weights.served import ServedWeights, WeightSpec

from .some_weights import PLAN, SPECS, as_served, trained

pytestmark = pytest.mark.timeout(60)


class Whole:
    """Takes all weights at once."""

    def weight_specs(self) -> Sequence[WeightSpec]:
        return SPECS

    async def update_weights(
        self, params: Iterable[tuple[str, Tensor]], version: int
    ) -> ServedWeights:
        return ServedWeights(version=version, sums=checksums(params))


def test_who_waits_for_a_sender_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    served = threading.Event()

    def slow(*given: Any) -> Any:
        assert served.wait(20.0), "the event loop waits for the sender"
        return open_receiver(*given)

    monkeypatch.setattr(collect, "open_receiver", slow)

    async def main() -> None:
        sender = open_sender("shm", PLAN, device="cpu", num_receivers=1)
        sink = CollectingSink(Whole(), device="cpu")
        asyncio.get_running_loop().call_soon(served.set)
        await sink.connect(PLAN, sender.address)
        params = trained(1)
        (found,) = await push(StreamSource(params, sender), [sink], plan=PLAN, version=3)
        assert found.sums == as_served(params)
        sink.close()
        sender.close()

    asyncio.run(main())
