"""Weights in buckets: one sender for all replicas, and a set that takes buckets itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from agentrl.errors import EngineError, EngineLost
from agentrl.testing.fake_replica import FakeReplica, expected_ids
from agentrl.weights.channels import open_receiver, open_sender
from agentrl.weights.channels.base import Address, Receiver, Sender
from agentrl.weights.checksum import checksums
from agentrl.weights.plan import BucketPlan
from agentrl.weights.push import StreamSource, WeightSink, push
from agentrl.weights.served import ServedWeights, WeightSpec

from .stage import Stage, request, settle, stage

pytestmark = pytest.mark.timeout(60)
WEIGHTS = [(f"layer.{i}", torch.arange(6.0) + i) for i in range(4)]
PLAN = BucketPlan.of(
    [WeightSpec(name=name, shape=(6,), dtype="float32") for name, _ in WEIGHTS], bucket_bytes=128
)


class Sink(FakeReplica):
    """A replica that takes buckets.

    Attributes:
        dies_at: bucket under which it is killed.
        addresses: of the channels that it opened.
    """

    num_receivers = 1

    def __init__(self, number: int = 0, *, version: int = -1) -> None:
        super().__init__(number, version=version)
        self.dies_at: int | None = None
        self.addresses: list[Address] = []
        self.held: dict[str, torch.Tensor] = {}
        self.given_up: list[str] = []
        self.plan = PLAN
        self._receiver: Receiver | None = None

    def weight_specs(self) -> list[WeightSpec]:
        return [WeightSpec(name=name, shape=(6,), dtype="float32") for name, _ in WEIGHTS]

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        self.plan, self.addresses = plan, [*self.addresses, address]
        self._receiver = open_receiver(address, plan, "cpu")

    async def begin_update(self) -> None:
        self._alive()
        assert not self._jobs, "weights change under requests"
        self.held = {}

    async def load_bucket(self, index: int) -> None:
        if index == self.dies_at:
            self.kill()
        self._alive()
        assert self._receiver is not None
        bucket = self.plan.buckets[index]
        views = bucket.views(self._receiver.receive(index))
        self.held |= {
            piece.name: view.clone() for piece, view in zip(bucket.slices, views, strict=True)
        }

    async def finish_update(self, version: int) -> ServedWeights:
        self._alive()
        self.policy_version = version
        return ServedWeights(version=version, sums=checksums(self.held.items()))

    async def give_up_update(self, reason: str) -> None:
        self.given_up.append(reason)


def sinks(stage: Stage) -> list[Sink]:
    return [replica for replica in stage.spawned if isinstance(replica, Sink)]


def sender_of(plan: BucketPlan = PLAN) -> Sender:
    return open_sender("shm", plan, device="cpu", num_receivers=2)


def test_one_channel_serves_all_replicas_for_the_life_of_the_set() -> None:
    async def main() -> None:
        async with stage(3, make=Sink) as s:
            for version in (1, 2):
                served = await s.set.update_weights(iter(WEIGHTS), version)
                assert served.sums == checksums(WEIGHTS)
            found = sinks(s)
            assert len({id(item.addresses[0]) for item in found}) == 1
            assert all(len(item.addresses) == 1 and item.policy_version == 2 for item in found)
            found[0].kill()
            await s.run(asyncio.create_task(s.set.generate(request("a"))))
            await s.set.update_weights(WEIGHTS, 3)
            assert [len(item.addresses) for item in sinks(s)] == [1, 1, 1, 1]
            assert sinks(s)[3].policy_version == 3

    asyncio.run(main())


@pytest.mark.parametrize("bucket", [0, 1])
def test_a_replica_that_dies_under_a_bucket_does_not_keep_others_from_theirs(bucket: int) -> None:
    async def main() -> None:
        async with stage(2, make=Sink) as s:
            sinks(s)[0].dies_at = bucket
            await s.set.update_weights(WEIGHTS, 1)
            assert sinks(s)[0].faults and sinks(s)[1].policy_version == 1
            task = asyncio.create_task(s.set.generate(request("a")))
            await s.run(task)
            assert task.result().ids == expected_ids(request("a"))

    asyncio.run(main())


def test_a_replica_that_is_back_before_the_update_ends_is_not_taken_for_the_lost_one() -> None:
    made: list[Sink] = []
    replaced = asyncio.Event()

    class Waiting(Sink):
        async def start(self) -> None:
            await super().start()
            if len(made) == 3:
                replaced.set()

        async def load_bucket(self, index: int) -> None:
            await super().load_bucket(index)
            if index == 1 and self is made[1] and self.policy_version < 1:
                await replaced.wait()

    def make(number: int) -> Sink:
        made.append(Waiting(number))
        return made[-1]

    async def main() -> None:
        async with stage(2, make=make, health_interval_s=0.001) as s:
            made[0].dies_at = 0
            await s.set.update_weights(WEIGHTS, 1)
            await settle()
            assert len(made) == 3 and s.set.metrics()["serving/restarts"] == 1
            await s.set.update_weights(WEIGHTS, 2)
            assert made[2].policy_version == 2

    asyncio.run(main())


def test_no_replica_left_is_said_and_the_next_update_finds_the_restarted_ones() -> None:
    async def main() -> None:
        async with stage(2, make=Sink) as s:
            for item in sinks(s):
                item.dies_at = 1
            with pytest.raises(EngineLost, match="every replica was lost while it loaded"):
                await s.set.update_weights(WEIGHTS, 1)
            await s.set.update_weights(WEIGHTS, 1)
            assert [item.policy_version for item in sinks(s)] == [-1, -1, 1, 1]

    asyncio.run(main())


def test_a_set_is_itself_a_sink_and_interrupts_turns_for_an_update() -> None:
    async def main() -> None:
        async with stage(2, make=Sink, interrupt_updates=True) as s:
            assert isinstance(s.set, WeightSink) and s.set.num_receivers == 2
            sender = sender_of()
            await s.set.connect(PLAN, sender.address)
            for version in (1, 2, 3):
                tasks = [asyncio.create_task(s.set.generate(request(f"s{i}"))) for i in range(3)]
                if version == 1:  # nobody serves yet
                    assert all(isinstance(found, EngineError) for found in await gathered(tasks))
                await settle()
                s.tick(3)
                (served,) = await push(
                    StreamSource(WEIGHTS, sender), [s.set], plan=PLAN, version=version
                )
                assert served.sums == checksums(WEIGHTS) and s.set.policy_version == version
                if version > 1:
                    await s.run(*tasks)
                    for task in tasks:
                        assert task.result().ids == expected_ids(request("s"))
                        assert set(task.result().policy_version) == {version - 1, version}
            sender.close()

    asyncio.run(main())


async def gathered(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_a_replaced_replica_joins_the_channel_with_the_next_update() -> None:
    async def main() -> None:
        async with stage(2, make=Sink) as s:
            sender = sender_of()
            await s.set.connect(PLAN, sender.address)
            await push(StreamSource(WEIGHTS, sender), [s.set], plan=PLAN, version=1)
            sinks(s)[1].kill()
            sinks(s)[0].kill()
            await s.set.check_health()
            tasks = [asyncio.create_task(s.set.generate(request("a")))]
            await settle()
            assert isinstance((await gathered(tasks))[0], EngineError)
            await push(StreamSource(WEIGHTS, sender), [s.set], plan=PLAN, version=2)
            # One that nobody had talked to is found dead by the update, and waits for the next.
            assert s.set.policy_version == 2
            await settle()
            await push(StreamSource(WEIGHTS, sender), [s.set], plan=PLAN, version=3)
            assert s.set.metrics()["serving/replicas"] == 2
            sender.close()

    asyncio.run(main())


def test_a_broadcast_that_a_replaced_replica_cannot_join_is_refused_with_the_fix() -> None:
    async def main() -> None:
        async with stage(2, make=Sink) as s:
            sender = sender_of()
            address = Address(transport="shm", timeout_s=1.0, details=dict(sender.address.details))
            await s.set.connect(PLAN, address)
            object.__setattr__(address, "transport", "nccl")
            await s.set.begin_update()
            await s.set.load_bucket(0)
            sinks(s)[0].kill()
            await s.set.load_bucket(1)
            await s.set.finish_update(1)
            await settle()
            with pytest.raises(EngineError, match="replaced.*connect again"):
                await s.set.begin_update()
            sender.close()

    asyncio.run(main())


@pytest.mark.parametrize("spoil", ["load", "finish"])
def test_an_update_that_fails_half_way_lets_the_next_one_in(spoil: str) -> None:
    class Spoilt(Sink):
        async def load_bucket(self, index: int) -> None:
            if spoiling and spoil == "load":
                raise EngineError("the bucket is bad")
            await super().load_bucket(index)

        async def finish_update(self, version: int) -> ServedWeights:
            if spoiling and spoil == "finish":
                raise EngineError("the bucket is bad")
            return await super().finish_update(version)

    spoiling = [True]

    async def main() -> None:
        async with stage(2, make=Spoilt) as s:
            sender = sender_of()
            await s.set.connect(PLAN, sender.address)
            waiting: list[asyncio.Task[Any]] = []
            with pytest.raises(EngineError, match="bucket is bad"):
                await push(StreamSource(WEIGHTS, sender), [s.set], plan=PLAN, version=1)
            with pytest.raises(EngineError, match="update.* failed.*bucket is bad"):
                await s.set.generate(request("a"))
            spoiling.clear()
            await push(StreamSource(WEIGHTS, sender), [s.set], plan=PLAN, version=1)
            waiting.append(asyncio.create_task(s.set.generate(request("b"))))
            await s.run(*waiting)
            sender.close()

    asyncio.run(main())


def test_engines_that_take_no_buckets_are_told_apart() -> None:
    async def main() -> None:
        async with stage(1) as s:
            assert s.set.num_receivers == 0
            sender = sender_of()
            with pytest.raises(EngineError, match="FakeReplica takes no buckets"):
                await s.set.connect(PLAN, sender.address)
            sender.close()

    asyncio.run(main())


def test_buckets_are_as_large_as_the_owner_says() -> None:
    async def main() -> None:
        for size, expected in ((128, 2), (1 << 20, 1)):
            async with stage(2, make=Sink, bucket_bytes=size) as s:
                await s.set.update_weights(WEIGHTS, 1)
                assert [len(item.plan.buckets) for item in sinks(s)] == [expected] * 2

    asyncio.run(main())


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("kind", [FakeReplica, Sink])
def test_an_update_that_hangs_ends_at_its_deadline_which_the_error_names(
    num_replicas: int, kind: type[FakeReplica]
) -> None:
    class Hanging(kind):  # type: ignore[misc, valid-type]
        async def update_weights(self, params: Any, version: int) -> ServedWeights:
            await asyncio.Event().wait()
            raise AssertionError

        async def load_bucket(self, index: int) -> None:
            await asyncio.Event().wait()

    async def main() -> None:
        async with stage(num_replicas, make=Hanging, update_timeout_s=0.05) as s:
            with pytest.raises(EngineError, match="rollout.serving.update_timeout_s"):
                await s.set.update_weights(WEIGHTS, 1)
            with pytest.raises(EngineError, match="update to version 1 failed"):
                await s.set.generate(request("a"))

    asyncio.run(main())


class OwnChannel(Sink):
    """A sink that takes whole updates through a channel of its own, in place of any other."""

    async def update_weights(self, params: Any, version: int) -> ServedWeights:
        sender = sender_of()
        await self.connect(PLAN, sender.address)
        (served,) = await push(StreamSource(params, sender), [self], plan=PLAN, version=version)
        sender.close()
        return served


def of_version(version: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, value + version) for name, value in WEIGHTS]


def test_a_replica_that_was_updated_alone_connects_again_when_there_are_more() -> None:
    made: list[Sink] = []
    starting, go = asyncio.Event(), asyncio.Event()

    class Late(OwnChannel):
        async def start(self) -> None:
            if len(made) == 3:
                starting.set()
                await go.wait()
            await super().start()

    def make(number: int) -> Sink:
        made.append(Late(number))
        return made[-1]

    async def main() -> None:
        async with stage(2, make=make) as s:
            await s.set.update_weights(of_version(1), 1)
            made[0].kill()
            task = asyncio.create_task(s.set.generate(request("a")))
            await starting.wait()
            await s.run(task)
            await s.set.update_weights(of_version(2), 2)
            assert [item.policy_version for item in made] == [1, 2, -1]
            go.set()
            await settle()
            served = await s.set.update_weights(of_version(3), 3)
            assert served.sums == checksums(of_version(3))
            assert [item.policy_version for item in made] == [1, 3, 3]

    asyncio.run(main())


def test_whole_updates_and_a_channel_from_outside_take_turns() -> None:
    async def main() -> None:
        async with stage(2, make=OwnChannel) as s:
            sender = sender_of()
            await s.set.connect(PLAN, sender.address)
            for version in (1, 3):
                source = StreamSource(of_version(version), sender)
                await push(source, [s.set], plan=PLAN, version=version)
                served = await s.set.update_weights(of_version(version + 1), version + 1)
                assert served.sums == checksums(of_version(version + 1))
            sender.close()

    asyncio.run(main())


def test_an_engine_that_does_not_open_the_channel_ends_the_update_and_the_others_opening() -> None:
    ended: list[int] = []

    class Hanging(Sink):
        async def connect(self, plan: BucketPlan, address: Address) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(self.number)

    async def main() -> None:
        async with stage(2, make=Hanging, update_timeout_s=0.05) as s:
            with pytest.raises(EngineError, match="rollout.serving.update_timeout_s"):
                await s.set.update_weights(WEIGHTS, 1)
            assert sorted(ended) == [0, 1]

    asyncio.run(main())


def test_who_waits_for_an_update_is_told_at_once_that_its_source_failed() -> None:
    class Source(StreamSource):
        async def send(self, index: int) -> None:
            if index == 1:
                raise EngineError("a rank is gone")
            await super().send(index)

    async def main() -> None:
        async with stage(2, make=Sink) as s:
            sender = sender_of()
            await s.set.connect(PLAN, sender.address)
            await push(StreamSource(WEIGHTS, sender), [s.set], plan=PLAN, version=1)
            failing = push(Source(WEIGHTS, sender), [s.set], plan=PLAN, version=2)
            with pytest.raises(EngineError, match="a rank is gone"):
                await failing
            assert all(len(item.given_up) == 1 for item in sinks(s))
            async with asyncio.timeout(5.0):  # the gate is open: nobody waits for a deadline
                with pytest.raises(EngineError, match="update.* failed.*a rank is gone"):
                    await s.set.generate(request("a"))
            await push(StreamSource(WEIGHTS, sender), [s.set], plan=PLAN, version=2)
            task = asyncio.create_task(s.set.generate(request("b")))
            await s.run(task)
            assert task.result().ids == expected_ids(request("b"))
            await s.set.give_up_update("late news")  # none is under way: all serve on
            assert s.set.metrics()["serving/replicas"] == 2
            sender.close()

    asyncio.run(main())
