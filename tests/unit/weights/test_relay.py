"""Several engines of one place get weights that came there once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.errors import EngineError
from agentrl.testing.weight_sink import ProcessSink, process_sinks
from agentrl.weights.channels import open_sender
from agentrl.weights.channels.base import Address
from agentrl.weights.plan import BucketPlan
from agentrl.weights.push import StreamSource, call_all, push
from agentrl.weights.relay import RelaySink
from agentrl.weights.served import ServedWeights, WeightSpec

from .some_weights import PLAN, SPECS, as_served, trained

pytestmark = pytest.mark.timeout(120)


class Several:
    """Engines behind one sink, as replicas are."""

    def __init__(self, sinks: list[ProcessSink]) -> None:
        self.sinks, self.num_receivers = sinks, len(sinks)

    def weight_specs(self) -> Sequence[WeightSpec]:
        return self.sinks[0].weight_specs()

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        await self._all("connect", plan, address)

    async def begin_update(self) -> None:
        await self._all("begin_update")

    async def load_bucket(self, index: int) -> None:
        await self._all("load_bucket", index)

    async def finish_update(self, version: int) -> ServedWeights:
        first, second = await self._all("finish_update", version)
        assert first == second
        return first

    async def give_up_update(self, reason: str) -> None:
        await self._all("give_up_update", reason)

    async def _all(self, name: str, *args: Any) -> list[Any]:
        return await call_all([lambda s=s: getattr(s, name)(*args) for s in self.sinks])


def test_two_engines_serve_what_one_process_received() -> None:
    async def main(sinks: list[ProcessSink]) -> None:
        relay = RelaySink(Several(sinks), device="cpu")
        assert relay.num_receivers == 1 and tuple(relay.weight_specs()) == tuple(SPECS)
        for _ in range(2):  # a second channel takes the place of the first
            sender = open_sender("gloo", PLAN, device="cpu", num_receivers=1)
            await relay.connect(PLAN, sender.address)
            for version in (1, 2, 3):
                source = StreamSource(trained(version), sender)
                (served,) = await push(source, [relay], plan=PLAN, version=version)
                assert served.sums == as_served(trained(version))
            sender.close()
        relay.close()

    with process_sinks(SPECS, 2) as sinks:
        asyncio.run(main(sinks))


def test_a_bucket_before_a_channel_is_an_error() -> None:
    with process_sinks(SPECS, 2) as sinks, pytest.raises(EngineError, match="before the engines"):
        asyncio.run(RelaySink(Several(sinks), device="cpu").load_bucket(0))


def test_memory_that_engines_map_is_kept_until_they_have_connected_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class End:
        """One side of a channel."""

        def __init__(self) -> None:
            self.address = Address(transport="gloo", timeout_s=1.0, details={})
            self.is_open = True

        def close(self) -> None:
            self.is_open = False

    ends: list[End] = []
    open_at_connect: list[list[bool]] = []

    def open_end(*args: Any, **how: Any) -> End:
        ends.append(End())
        return ends[-1]

    class Engines(Several):
        async def connect(self, plan: BucketPlan, address: Address) -> None:
            open_at_connect.append([end.is_open for end in ends])

    async def main() -> None:
        relay = RelaySink(Engines([]), device="cpu")
        for _ in range(2):
            await relay.connect(PLAN, End().address)
        assert [end.is_open for end in ends] == [False, False, True, True]
        relay.close()
        relay.close()

    monkeypatch.setattr("agentrl.weights.relay.open_sender", open_end)
    monkeypatch.setattr("agentrl.weights.relay.open_receiver", open_end)
    asyncio.run(main())
    assert open_at_connect == [[True] * 2, [True] * 4]
    assert not any(end.is_open for end in ends)
