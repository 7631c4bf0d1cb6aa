"""Ranks send straight into workers; what is served is what was trained, also by a replaced one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from agentrl.dist import rollout_pool
from agentrl.dist.rollout_pool import RolloutPool
from agentrl.dist.weight_sync.direct import DirectChannel
from agentrl.dist.weight_sync.place import Place, Target
from agentrl.dist.weight_sync.sender import OneRank
from agentrl.errors import ChannelOutdated, EngineError, WorkerLost
from agentrl.rollout.tasks import Dispatch
from agentrl.testing.table_engine import TableEngine
from agentrl.testing.weight_sink import TensorSink
from agentrl.types import Task, TrajectoryGroup
from agentrl.weights.channels.base import Address
from agentrl.weights.plan import BucketPlan
from agentrl.weights.served import WeightSpec

pytestmark = pytest.mark.timeout(60)
SPECS = [WeightSpec(name="table", shape=(5,), dtype="bfloat16")]


class Worker(TensorSink):
    """A rollout worker that plays at once, and dies when it is told to."""

    def __init__(self, index: int, specs: list[WeightSpec] = SPECS) -> None:
        super().__init__(specs)
        self.index = index
        self.dies_in = ""
        self.dead = self.outdated = False
        self.connected = 0

    def _alive(self, method: str) -> None:
        self.dead = self.dead or self.dies_in == method
        if self.dead:
            raise WorkerLost(f"worker {self.index} is gone")

    async def start(self) -> dict[str, str]:
        return {"table": "bfloat16"}

    async def run_group(self, purpose: str, dispatch: Dispatch) -> TrajectoryGroup:
        self._alive("run_group")
        return TrajectoryGroup(
            id=purpose,
            task=dispatch.task,
            env_id="e",
            trajectories=[],
            policy_version=self.version,
        )

    async def weight_target(self) -> Target:
        self._alive("weight_target")
        place = Place.of_this_process(on_gpu=False)
        return Target(place=place, num_receivers=1, num_gpus=0, specs=tuple(self.weight_specs()))

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        self.outdated = False
        self.connected += 1
        await super().connect(plan, address)

    async def begin_update(self) -> None:
        if self.outdated:
            raise ChannelOutdated("an engine was replaced")

    async def load_bucket(self, index: int) -> None:
        self._alive("load_bucket")
        await super().load_bucket(index)

    async def close(self) -> None:
        pass

    async def metrics(self) -> dict[str, float]:
        return {}

    async def cut(self, purpose: str, dispatch: Dispatch) -> None: ...
    async def load(self, shipment: Any) -> Any: ...
    async def sleep(self, level: int = 1) -> None: ...
    async def wake(self) -> None: ...


class Run:
    """A pool, the workers that it made, and the engine they hear from."""

    def __init__(self, transport: str = "shm", timeout_s: float = 20.0) -> None:
        self.trainer = TableEngine([1.0, 2.0, 3.0, 4.0, 5.0])
        self.made: list[Worker] = []
        self.pool = RolloutPool(
            self.spawn, num_workers=2, max_groups=4, max_restarts=2, start_timeout_s=5.0
        )
        self.channel = DirectChannel(
            OneRank(self.trainer), transport=transport, bucket_bytes=64, timeout_s=timeout_s
        )

    def spawn(self, index: int) -> Any:
        self.made.append(Worker(index))
        return self.made[-1]

    def train(self) -> None:
        with torch.no_grad():
            self.trainer.table += 1.0

    def serves(self, worker: Worker) -> bool:
        return torch.equal(worker.weights["table"], self.trainer.table.detach().bfloat16())


def run(body: Any, **given: Any) -> None:
    async def main() -> None:
        it = Run(**given)
        await it.pool.start()
        try:
            await asyncio.wait_for(body(it), 30.0)
        finally:
            await it.pool.close()

    asyncio.run(main())


def play(it: Run, index: int) -> Any:
    return it.pool.run_group("train", Dispatch(index=index, epoch=0, task=Task(id="t", data={})))


@pytest.mark.parametrize("transport", ["shm", "gloo", "auto"])
def test_every_worker_serves_each_version_in_its_dtype(transport: str) -> None:
    async def body(it: Run) -> None:
        for version in (1, 2, 3):
            it.train()
            await it.pool.update(it.channel, version)
            assert all(it.serves(worker) and worker.version == version for worker in it.made)
        assert it.channel.num_bytes == 10

    run(body, transport=transport)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_worker_that_dies_in_an_update_is_replaced_and_the_others_are_updated(
    transport: str,
) -> None:
    async def body(it: Run) -> None:
        await it.pool.update(it.channel, 1)
        it.train()
        it.made[0].dies_in = "load_bucket"
        await it.pool.update(it.channel, 2)
        assert it.serves(it.made[1]) and it.made[1].version == 2
        while len(it.pool._living()) < 2:
            await asyncio.sleep(0.01)
        assert it.serves(it.made[2]) and it.made[2].version == 2
        it.train()
        await it.pool.update(it.channel, 3)
        assert [w.version for w in it.made[1:]] == [3, 3] and all(map(it.serves, it.made[1:]))

    run(body, transport=transport, timeout_s=5.0)


def test_a_worker_lost_between_updates_comes_back_with_the_version_published_last() -> None:
    async def body(it: Run) -> None:
        await it.pool.update(it.channel, 1)
        it.made[0].dies_in = "run_group"
        assert (await play(it, 0)).policy_version == 1
        while len(it.pool._living()) < 2:
            await asyncio.sleep(0.01)
        assert it.made[2].version == 1 and it.serves(it.made[2])
        assert it.pool.num_restarts == 1

    run(body)


def test_a_replaced_worker_plays_nothing_until_it_has_the_same_weights_as_the_others() -> None:
    async def body(it: Run) -> None:
        await it.pool.update(it.channel, 1)
        it.train()  # what was published last is not there any more
        it.made[0].dies_in = "run_group"
        await play(it, 0)
        while len(it.pool._living()) < 2:
            await asyncio.sleep(0.01)
        it.made[1].dies_in = ""
        it.made[2].dies_in = "run_group"  # to be noticed if it were asked
        groups = await asyncio.gather(*(play(it, i) for i in range(4)))
        assert {group.policy_version for group in groups} == {1} and not it.made[2].dead
        it.made[2].dies_in = ""
        await it.pool.update(it.channel, 2)
        assert it.made[2].version == 2 and it.serves(it.made[2])
        it.made[1].dies_in = "run_group"
        assert (await play(it, 9)).policy_version == 2  # now it plays

    run(body)


def test_workers_that_serve_something_else_are_refused_at_the_first_update() -> None:
    async def body(it: Run) -> None:
        it.made[1]._specs = [WeightSpec(name="table", shape=(5,), dtype="float32")]
        with pytest.raises(EngineError, match="different weights: 'table'"):
            await it.pool.update(it.channel, 1)

    run(body)


def test_other_names_than_are_trained_are_refused_at_the_first_update() -> None:
    async def body(it: Run) -> None:
        for worker in it.made:
            worker._specs = [*SPECS, WeightSpec(name="head", shape=(5,), dtype="float32")]
        with pytest.raises(EngineError, match=r"served but not trained \['head'\]"):
            await it.pool.update(it.channel, 1)

    run(body)


def test_a_scrambled_worker_ends_the_update_with_the_tensors_name() -> None:
    async def body(it: Run) -> None:
        load = it.made[1].load_bucket

        async def spoilt(index: int) -> None:
            await load(index)
            it.made[1].weights["table"].view(torch.int16)[2] ^= 1

        it.made[1].load_bucket = spoilt  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="scrambled.*rollout worker 1.*'table'"):
            await it.pool.update(it.channel, 1)

    run(body)


def test_a_worker_that_does_not_answer_ends_the_update_in_time() -> None:
    async def body(it: Run) -> None:
        async def never(index: int) -> None:
            await asyncio.Event().wait()

        it.made[0].load_bucket = never  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="have not arrived after 0.5 s"):
            await it.pool.update(it.channel, 1)

    run(body, timeout_s=0.5)


def test_workers_connect_again_where_an_engine_of_one_was_replaced() -> None:
    async def body(it: Run) -> None:
        await it.pool.update(it.channel, 1)
        it.made[1].outdated = True
        it.train()
        await it.pool.update(it.channel, 2)
        assert all(it.serves(worker) and worker.version == 2 for worker in it.made)
        assert [worker.connected for worker in it.made] == [2, 2] and it.pool.num_restarts == 0

    run(body, transport="gloo")


def test_a_worker_that_hangs_does_not_hold_up_the_news_that_an_update_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_pool, "ANSWER_TIMEOUT_S", 0.01)

    async def body(it: Run) -> None:
        await it.pool.update(it.channel, 1)  # which knows where the workers are from here on

        async def never(*_: object) -> Any:
            await asyncio.Event().wait()

        it.made[0].load_bucket = it.made[0].weight_target = never  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="have not arrived after 0.2 s"):
            await it.pool.update(it.channel, 2)

    run(body, timeout_s=0.2)


def test_a_worker_that_cannot_connect_ends_the_connecting_of_the_others() -> None:
    async def body(it: Run) -> None:
        opening, ended = asyncio.Event(), asyncio.Event()

        async def refuses(plan: BucketPlan, address: Address) -> None:
            await opening.wait()
            raise EngineError("no shared memory")

        async def slow(plan: BucketPlan, address: Address) -> None:
            opening.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        it.made[0].connect, it.made[1].connect = refuses, slow  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="no shared memory"):
            await it.pool.update(it.channel, 1)
        assert ended.is_set(), "it would open the old channel in place of the next one"

    run(body)
