"""Whatever goes wrong on the way is noticed at that update, with the tensor's name."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.errors import EngineError, EngineLost
from agentrl.testing.weight_sink import TensorSink
from agentrl.weights.channels import open_sender
from agentrl.weights.plan import BucketPlan
from agentrl.weights.push import StreamSource, WeightSink, push
from agentrl.weights.served import ServedWeights

from .some_weights import PLAN, SPECS, as_served, trained

pytestmark = pytest.mark.timeout(60)
Params = list[tuple[str, Tensor]]


class Broken(TensorSink):
    """A sink that does something else at one bucket, or at the end."""

    def __init__(self, at: int = -1, does: Callable[[Broken, int], Any] | None = None) -> None:
        super().__init__(SPECS)
        self._at, self._does = at, does

    async def load_bucket(self, index: int) -> None:
        if index == self._at and self._does is not None:
            if asyncio.iscoroutine(waiting := self._does(self, index)):
                await waiting
            return
        await super().load_bucket(index)


class Stale(TensorSink):
    async def finish_update(self, version: int) -> ServedWeights:
        return await super().finish_update(version - 1)


def pushed(params: Params, *sinks: WeightSink, version: int = 7, timeout_s: float = 30.0) -> Any:
    async def main() -> list[ServedWeights]:
        sender = open_sender("shm", PLAN, device="cpu", num_receivers=len(sinks))
        for sink in sinks:
            await sink.connect(PLAN, sender.address)
        try:
            source = StreamSource(params, sender)
            return await push(source, sinks, plan=PLAN, version=version, timeout_s=timeout_s)
        finally:
            sender.close()

    return asyncio.run(main())


def test_every_sink_serves_the_weights_in_its_dtypes() -> None:
    sinks = [TensorSink(SPECS), TensorSink(SPECS)]
    served = pushed(trained(1), *sinks)
    assert all(found.sums == as_served(trained(1)) and found.version == 7 for found in served)
    for sink in sinks:
        for name, value in trained(1):
            assert torch.equal(sink.weights[name], value.to(sink.weights[name].dtype))


@pytest.mark.parametrize("seed", range(3))
def test_tensors_may_come_in_any_order(seed: int) -> None:
    order = torch.randperm(len(SPECS), generator=torch.Generator().manual_seed(seed)).tolist()
    params = trained(1)
    (served,) = pushed([params[i] for i in order], TensorSink(SPECS))
    assert served.sums == as_served(params)


def _flip_a_bit_in_flight(sink: Broken, index: int) -> Any:
    async def load() -> None:
        await TensorSink.load_bucket(sink, index)
        sink.weights["other.weight"].view(torch.int32)[3, 5] ^= 1

    return load()


def test_a_bit_that_changed_in_flight_is_noticed() -> None:
    with pytest.raises(EngineError, match="scrambled.*1 of 6 .*engine 1.*'other.weight'"):
        pushed(trained(1), TensorSink(SPECS), Broken(2, _flip_a_bit_in_flight))


def test_a_bucket_that_was_not_loaded_is_noticed() -> None:
    with pytest.raises(EngineError, match="scrambled.*first 'head'"):
        pushed(trained(1), Broken(3, lambda sink, index: None))


def test_a_name_that_an_engine_drops_is_noticed() -> None:
    class Dropping(TensorSink):
        async def finish_update(self, version: int) -> ServedWeights:
            found = await super().finish_update(version)
            sums = {name: value for name, value in found.sums.items() if name != "scale"}
            return ServedWeights(version=version, sums=sums)

    with pytest.raises(EngineError, match="scrambled.*first 'scale'"):
        pushed(trained(1), Dropping(SPECS))


def test_a_stale_version_is_noticed() -> None:
    with pytest.raises(EngineError, match="stale.*version 7 engine 0.*version 6"):
        pushed(trained(1), Stale(SPECS))


def _dropped(params: Params) -> Params:
    return [item for item in params if item[0] != "layer.bias"]


def _reshaped(params: Params) -> Params:
    return [(n, v.t() if n == "layer.weight" else v) for n, v in params]


def _renamed(params: Params) -> Params:
    return [("unheard.of" if n == "scale" else n, v) for n, v in params]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_dropped, "1 tensors missing, the first 'layer.bias'"),
        (_reshaped, r"'layer.weight' has shape \(8, 16\), expected \(16, 8\)"),
        (_renamed, "'unheard.of' is unknown"),
        (lambda params: [*params, ("late", torch.zeros(3))], "'late' is unknown"),
        (lambda params: [*params, params[0]], "'embed' came twice"),
    ],
)
def test_other_tensors_than_are_served_are_refused(
    change: Callable[[Params], Params], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        pushed(change(trained(1)), TensorSink(SPECS))


def test_an_engine_that_hangs_ends_the_update_and_the_others() -> None:
    ended: list[str] = []

    def hang(sink: Broken, index: int) -> Any:
        async def load() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")

        return load()

    with pytest.raises(EngineError, match="version 7 have not arrived after 0.3 s.*bucket 2 of 4"):
        pushed(trained(1), TensorSink(SPECS), Broken(1, hang), timeout_s=0.3)
    assert ended == ["cancelled"]


def test_what_an_engine_raises_is_what_is_raised() -> None:
    def refuse(sink: Broken, index: int) -> None:
        raise EngineError("values are not finite")

    with pytest.raises(EngineError, match="not finite"):
        pushed(trained(1), TensorSink(SPECS), Broken(2, refuse))


def test_a_bucket_is_packed_while_the_one_before_is_loaded() -> None:
    """The order is what makes it fast: bucket k + 1 is sent before k is loaded."""
    events: list[str] = []

    class Source:
        async def send(self, index: int) -> None:
            events.append(f"send {index}")
            await asyncio.sleep(0)  # lets loading begin
            events.append(f"sent {index}")

        async def finish(self) -> dict[str, int]:
            return {}

    class Sink(TensorSink):
        async def load_bucket(self, index: int) -> None:
            events.append(f"load {index}")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            events.append(f"loaded {index}")

        async def finish_update(self, version: int) -> ServedWeights:
            return ServedWeights(version=version, sums={})

    plan = BucketPlan.of(SPECS, bucket_bytes=700)
    asyncio.run(push(Source(), [Sink(SPECS)], plan=plan, version=1))

    def place(name: str) -> int:
        return events.index(name)

    for k in range(3):
        assert place(f"sent {k}") < place(f"load {k}")
        assert place(f"send {k + 1}") < place(f"loaded {k}")
    for k in range(2):  # its slot is filled again
        assert place(f"loaded {k}") < place(f"send {k + 2}")


def test_sinks_are_told_from_engines_that_take_weights_whole() -> None:
    def accepts(value: object) -> bool:
        return isinstance(value, WeightSink)

    assert accepts(TensorSink(SPECS))
    assert not accepts(object())
    sequence: Sequence[WeightSink] = [TensorSink(SPECS)]
    assert len(sequence) == 1


@pytest.mark.parametrize("fails_in", ["send", "finish", "load"])
def test_sinks_are_told_why_no_more_comes(fails_in: str) -> None:
    told: list[tuple[int, str]] = []

    class Source:
        async def send(self, index: int) -> None:
            if fails_in == "send" and index == 1:
                raise EngineError("a rank is gone")

        async def finish(self) -> Any:
            raise EngineError("a rank is gone")

    class Sink(TensorSink):
        def __init__(self, number: int) -> None:
            super().__init__(SPECS)
            self.number = number

        async def load_bucket(self, index: int) -> None:
            if fails_in == "load" and self.number == 0:
                raise EngineError("a rank is gone")

        async def give_up_update(self, reason: str) -> None:
            told.append((self.number, reason))
            if self.number == 0:
                raise EngineLost("so am I")

    plan = BucketPlan.of(SPECS, bucket_bytes=700)
    assert len(plan.buckets) > 1
    with pytest.raises(EngineError, match="a rank is gone"):
        asyncio.run(push(Source(), [Sink(0), Sink(1)], plan=plan, version=1))
    assert [number for number, _ in told] == [0, 1]
    assert all("EngineError: a rank is gone" in reason for _, reason in told)


def test_a_sink_and_a_source_that_fail_together_leave_no_error_that_nobody_saw() -> None:
    refused = asyncio.Event()

    async def refuse(sink: Broken, index: int) -> None:
        refused.set()
        raise EngineError("the sink refused")

    class Source(StreamSource):
        async def send(self, index: int) -> None:
            if index == 1:
                await refused.wait()
                for _ in range(20):  # until the task of the loading has ended
                    await asyncio.sleep(0)
                raise EngineError("the source failed")
            await super().send(index)

    unseen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unseen.append(context["message"]))
        sender = open_sender("shm", PLAN, device="cpu", num_receivers=1)
        sink = Broken(at=0, does=refuse)
        await sink.connect(PLAN, sender.address)
        with pytest.raises(EngineError, match="the source failed"):
            await push(Source(trained(1), sender), [sink], plan=PLAN, version=7)
        sender.close()
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert not unseen
