"""Groups go to the least loaded worker; a lost worker costs time, never a group or a wrong one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from agentrl.dist import rollout_pool
from agentrl.dist.rollout_pool import RolloutPool
from agentrl.dist.weight_sync.place import Target
from agentrl.dist.weight_sync.shipment import Shipment
from agentrl.errors import ConfigError, EngineError, TrainingError, WorkerLost, WorkerTimeout
from agentrl.rollout.tasks import Dispatch
from agentrl.types import Task, TrajectoryGroup
from agentrl.weights.channels.base import Address
from agentrl.weights.plan import BucketPlan
from agentrl.weights.served import ServedWeights

pytestmark = pytest.mark.timeout(30)


class Fake:
    """A worker that plays when it is let to, and dies when it is told to."""

    def __init__(self, index: int, serial: int) -> None:
        self.index, self.serial = index, serial
        self.playing: list[int] = []
        self.cuts: list[tuple[str, int]] = []
        self.version: int | None = None
        self.asleep = self.closed = False
        self.go = asyncio.Event()
        self.dead = asyncio.Event()
        self.start_error: Exception | None = None
        self.play_error: Exception | None = None
        self.corrupt = 0
        self.stuck = False

    async def start(self) -> dict[str, str]:
        if self.stuck:
            await asyncio.Event().wait()
        if self.start_error:
            raise self.start_error
        return {"w": "float32"}

    async def run_group(self, purpose: str, dispatch: Dispatch) -> TrajectoryGroup:
        self.playing.append(dispatch.index)
        ended = [asyncio.ensure_future(event.wait()) for event in (self.go, self.dead)]
        try:
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ended:
                task.cancel()
        if self.dead.is_set():
            raise WorkerLost(f"worker {self.index} is gone")
        if self.play_error:
            raise self.play_error
        assert self.version is not None
        return TrajectoryGroup(
            id=f"{purpose}-{dispatch.index}",
            task=dispatch.task,
            env_id="echo",
            trajectories=[],
            policy_version=self.version,
            index=dispatch.index,
        )

    async def cut(self, purpose: str, dispatch: Dispatch) -> None:
        if self.dead.is_set():
            raise WorkerLost(f"worker {self.index} is gone")
        self.cuts.append((purpose, dispatch.index))
        self.go.set()

    async def metrics(self) -> dict[str, float]:
        return {"serving/turns": float(self.index)}

    async def load(self, shipment: Shipment) -> ServedWeights:
        if self.stuck:
            await asyncio.Event().wait()
        if self.dead.is_set():
            raise WorkerLost(f"worker {self.index} is gone")
        self.version = shipment.version
        sums = {name: value + self.corrupt for name, value in shipment.sums.items()}
        return ServedWeights(version=shipment.version, sums=sums)

    async def weight_target(self) -> Target:
        raise AssertionError("weights come as shipments here")

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        raise AssertionError("weights come as shipments here")

    async def begin_update(self) -> None:
        raise AssertionError("weights come as shipments here")

    async def load_bucket(self, index: int) -> None:
        raise AssertionError("weights come as shipments here")

    async def finish_update(self, version: int) -> ServedWeights:
        raise AssertionError("weights come as shipments here")

    async def give_up_update(self, reason: str) -> None:
        raise AssertionError("weights come as shipments here")

    async def sleep(self, level: int = 1) -> None:
        self.asleep = bool(level)

    async def wake(self) -> None:
        self.asleep = False

    async def close(self) -> None:
        self.closed = True


class Crew:
    """Makes the workers of a pool, and remembers them in order."""

    def __init__(self) -> None:
        self.made: list[Fake] = []
        self.prepare = lambda worker: None

    def spawn(self, index: int) -> Fake:
        worker = Fake(index, len(self.made))
        self.prepare(worker)
        self.made.append(worker)
        return worker

    def pool(self, num_workers: int = 2, **changes: Any) -> RolloutPool:
        given = {"max_groups": 100, "max_restarts": 2, "start_timeout_s": 5.0} | changes
        return RolloutPool(self.spawn, num_workers=num_workers, **given)


def dispatch(index: int) -> Dispatch:
    return Dispatch(index=index, epoch=0, task=Task(id=f"t{index}", data={}))


def shipment(version: int) -> Shipment:
    return Shipment(version=version, buckets=(), sums={"w": 7}, num_bytes=4)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_groups_go_to_the_least_loaded_worker_up_to_its_limit() -> None:
    async def main() -> None:
        crew = Crew()
        pool = crew.pool(max_groups=2)
        await pool.start()
        await pool.load(shipment(0), timeout_s=5)
        groups = [asyncio.ensure_future(pool.run_group("train", dispatch(i))) for i in range(6)]
        await settle()
        assert [worker.playing for worker in crew.made] == [[0, 2], [1, 3]]  # 4 and 5 wait
        crew.made[1].go.set()
        await settle()
        assert crew.made[0].playing == [0, 2] and sorted(crew.made[1].playing) == [1, 3, 4, 5]
        crew.made[0].go.set()
        assert [group.index for group in await asyncio.gather(*groups)] == list(range(6))
        await pool.close()
        assert all(worker.closed for worker in crew.made)

    run(main())


def test_a_cut_reaches_the_worker_that_plays_the_group_and_no_other() -> None:
    async def main() -> None:
        crew = Crew()
        pool = crew.pool()
        await pool.start()
        await pool.load(shipment(0), timeout_s=5)
        groups = [asyncio.ensure_future(pool.run_group("train", dispatch(i))) for i in range(2)]
        await settle()
        await pool.cut("train", dispatch(1))
        await pool.cut("train", dispatch(7))  # of nobody: it may have ended meanwhile
        assert [worker.cuts for worker in crew.made] == [[], [("train", 1)]]
        assert (await groups[1]).index == 1 and not groups[0].done()
        crew.made[0].dead.set()
        await settle()
        crew.made[2].go.set()
        assert (await groups[0]).index == 0
        await pool.cut("train", dispatch(0))
        await pool.close()

    run(main())


def test_a_worker_that_hangs_does_not_keep_others_from_being_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_pool, "ANSWER_TIMEOUT_S", 0.01)

    async def main() -> None:
        crew = Crew()
        pool = crew.pool(1)
        await pool.start()
        await pool.load(shipment(1), timeout_s=5)
        playing = asyncio.ensure_future(pool.run_group("train", dispatch(0)))
        await settle()

        async def never(*_: object) -> None:
            await asyncio.Event().wait()

        crew.made[0].cut = never  # type: ignore[method-assign]
        async with asyncio.timeout(20):
            await pool.cut("train", dispatch(0))
        assert not playing.done() and pool.num_restarts == 0
        crew.made[0].go.set()
        await playing
        await pool.close()

    run(main())


def test_the_groups_of_a_lost_worker_are_played_elsewhere_and_it_is_replaced() -> None:
    async def main() -> None:
        crew = Crew()
        pool = crew.pool()
        await pool.start()
        await pool.load(shipment(4), timeout_s=5)
        groups = [asyncio.ensure_future(pool.run_group("train", dispatch(i))) for i in range(4)]
        await settle()
        crew.made[0].dead.set()
        await settle()
        assert pool.num_restarts == 1 and pool.num_replayed == 2
        assert len(crew.made) == 3 and crew.made[0].closed
        assert crew.made[2].index == 0 and crew.made[2].version == 4, "it has the current weights"
        for worker in crew.made:
            worker.go.set()
        assert [group.index for group in await asyncio.gather(*groups)] == list(range(4))
        await pool.load(shipment(5), timeout_s=5)
        assert [worker.version for worker in crew.made] == [4, 5, 5]
        await pool.close()

    run(main())


def test_a_worker_that_is_lost_while_it_loads_comes_back_with_those_weights() -> None:
    async def main() -> None:
        crew = Crew()
        pool = crew.pool()
        await pool.start()
        crew.made[1].dead.set()
        await pool.load(shipment(1), timeout_s=5)
        await settle()
        assert pool.num_restarts == 1
        assert [worker.version for worker in crew.made] == [1, None, 1]
        await pool.close()

    run(main())


def test_a_replacement_is_not_started_on_a_device_that_training_has() -> None:
    async def main() -> None:
        crew = Crew()
        pool = crew.pool(1)
        await pool.start()
        await pool.load(shipment(1), timeout_s=5)
        crew.made[0].dead.set()
        group = asyncio.ensure_future(pool.run_group("train", dispatch(0)))
        await pool.sleep()
        await settle()
        assert len(crew.made) == 1 and crew.made[0].closed
        await pool.wake()
        crew.prepare = lambda worker: worker.go.set()
        assert (await group).policy_version == 1
        await pool.close()

    run(main())


def test_a_replacement_that_was_starting_sleeps_while_training_has_the_device() -> None:
    async def main() -> None:
        crew = Crew()
        pool = crew.pool(1)
        await pool.start()
        await pool.load(shipment(1), timeout_s=5)
        starting, go = asyncio.Event(), asyncio.Event()

        def slowly(worker: Fake) -> None:
            async def start() -> dict[str, str]:
                starting.set()
                await go.wait()
                return {"w": "float32"}

            worker.start = start  # type: ignore[method-assign]

        crew.prepare = slowly
        crew.made[0].dead.set()
        group = asyncio.ensure_future(pool.run_group("train", dispatch(0)))
        await starting.wait()
        await pool.sleep()
        go.set()
        await settle()
        assert crew.made[1].asleep
        await pool.wake()
        assert not crew.made[1].asleep
        crew.made[1].go.set()
        assert (await group).policy_version == 1
        await pool.close()

    run(main())


def test_too_many_lost_workers_end_the_run_for_everyone_who_waits() -> None:
    async def main() -> None:
        crew = Crew()
        pool = crew.pool(1, max_restarts=2)
        crew.prepare = lambda worker: worker.dead.set()
        await pool.start()
        results = await asyncio.gather(
            *(pool.run_group("train", dispatch(i)) for i in range(5)), return_exceptions=True
        )
        assert all(isinstance(result, WorkerLost) for result in results)
        assert "cluster.max_restarts=2" in str(results[0]) and "resumed" in str(results[0])
        assert len(crew.made) == 3 and pool.num_restarts == 2
        with pytest.raises(WorkerLost):
            await pool.load(shipment(1), timeout_s=5)
        await pool.close()
        assert all(worker.closed for worker in crew.made)

    run(main())


def test_a_replacement_that_cannot_be_opened_ends_the_run() -> None:
    async def main() -> None:
        crew = Crew()
        pool = crew.pool(1)
        await pool.start()

        def fail(worker: Fake) -> None:
            worker.start_error = ConfigError("the sandbox is gone")

        crew.prepare = fail
        crew.made[0].dead.set()
        with pytest.raises(ConfigError, match="the sandbox is gone"):
            await pool.run_group("train", dispatch(0))
        await pool.close()

    run(main())


def test_a_start_that_fails_closes_the_others() -> None:
    async def main() -> None:
        crew = Crew()

        def second(worker: Fake) -> None:
            worker.start_error = ConfigError("no such environment") if worker.index else None

        crew.prepare = second
        with pytest.raises(ConfigError, match="no such environment"):
            await crew.pool().start()
        assert all(worker.closed for worker in crew.made)

    run(main())


def test_a_worker_that_never_opens_is_named_with_the_setting() -> None:
    async def main() -> None:
        crew = Crew()
        crew.prepare = lambda worker: setattr(worker, "stuck", worker.index == 1)
        with pytest.raises(WorkerTimeout, match="rollout worker 1 did not open.*start_timeout_s"):
            await crew.pool(start_timeout_s=0.05).start()
        assert all(worker.closed for worker in crew.made)

    run(main())


@pytest.mark.parametrize("hangs_in", ["load", "sleep"])
def test_a_replacement_that_hangs_before_it_plays_ends_the_run(hangs_in: str) -> None:
    async def main() -> None:
        crew = Crew()
        pool = crew.pool(1, start_timeout_s=0.5)
        await pool.start()
        await pool.load(shipment(1), timeout_s=5)
        starting, asleep = asyncio.Event(), asyncio.Event()

        async def never(*_: object) -> Any:
            await asyncio.Event().wait()

        async def start() -> dict[str, str]:
            starting.set()
            await asleep.wait()
            return {"w": "float32"}

        def hang(worker: Fake) -> None:
            worker.start = start  # type: ignore[method-assign]
            setattr(worker, hangs_in, never)

        crew.prepare = hang
        crew.made[0].dead.set()
        async with asyncio.timeout(20):
            group = asyncio.ensure_future(pool.run_group("train", dispatch(0)))
            await starting.wait()
            await pool.sleep()
            asleep.set()
            with pytest.raises(WorkerTimeout, match="worker 0 was replaced.*start_timeout_s=0.5"):
                await group
            with pytest.raises(WorkerTimeout):  # which it would have held up
                await pool.load(shipment(2), timeout_s=5)
        await pool.close()
        assert all(worker.closed for worker in crew.made)

    run(main())


@pytest.mark.parametrize("method", ["sleep", "wake"])
def test_a_device_that_never_changes_hands_ends_the_run(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_pool, "DEVICE_TIMEOUT_S", 0.05)

    async def main() -> None:
        crew = Crew()
        pool = crew.pool()
        await pool.start()

        async def never(*_: object) -> None:
            await asyncio.Event().wait()

        setattr(crew.made[1], method, never)
        async with asyncio.timeout(20):
            with pytest.raises(WorkerTimeout, match="not every rollout worker has .* its device"):
                await getattr(pool, method)()
        await pool.close()

    run(main())


@pytest.mark.parametrize(("corrupt", "stuck"), [(1, False), (0, True)])
def test_wrong_or_missing_weights_are_an_error_of_the_sync(corrupt: int, stuck: bool) -> None:
    async def main() -> None:
        crew = Crew()
        pool = crew.pool()
        await pool.start()
        crew.made[1].corrupt, crew.made[1].stuck = corrupt, stuck
        message = "weight_sync.timeout_s" if stuck else "scrambled policy.*rollout worker 1"
        with pytest.raises(EngineError, match=message):
            await pool.load(shipment(2), timeout_s=0.05)
        await pool.close()

    run(main())


def test_what_ends_a_run_comes_out_of_the_call() -> None:
    async def main() -> None:
        crew = Crew()
        pool = crew.pool(1)
        await pool.start()
        crew.made[0].play_error = TrainingError("fail_fast")
        crew.made[0].go.set()
        with pytest.raises(TrainingError, match="fail_fast"):
            await pool.run_group("train", dispatch(0))
        assert pool.num_restarts == 0
        await pool.close()
        with pytest.raises(EngineError, match="closed"):
            await pool.run_group("train", dispatch(1))

    run(main())


def test_metrics_come_from_the_living_and_a_silent_worker_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_pool, "METRICS_TIMEOUT_S", 0.01)

    async def main() -> None:
        crew = Crew()
        pool = crew.pool(num_workers=3)
        await pool.start()

        async def silent() -> dict[str, float]:
            await asyncio.Event().wait()
            return {}

        async def gone() -> dict[str, float]:
            raise WorkerLost("gone")

        crew.made[0].metrics, crew.made[1].metrics = silent, gone
        assert await pool.metrics() == [{"serving/turns": 2.0}]
        await settle()
        assert pool.num_restarts == 1
        await pool.close()

    run(main())
