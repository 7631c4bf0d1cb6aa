"""What comes in the middle of something else: an abort, a close, an error that nobody expects."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.errors import EngineError, EngineLost
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.serving.replica_set import ReplicaSet
from agentrl.testing.fake_replica import FakeReplica
from agentrl.types import GenerateRequest, Generation, StopReason
from agentrl.weights.served import ServedWeights

from .stage import WEIGHTS, request, settle, stage

pytestmark = pytest.mark.timeout(60)


def ask(replicas: ReplicaSet, asked: GenerateRequest) -> asyncio.Task[Generation]:
    return asyncio.create_task(replicas.generate(asked))


@pytest.mark.parametrize("turns_of_the_loop", range(12))
def test_an_abort_ends_a_turn_that_is_given_its_place_in_that_moment(
    turns_of_the_loop: int,
) -> None:
    async def main() -> None:
        async with stage(1, max_requests=1) as s:
            running, waiting = ask(s.set, request("a", max_tokens=1)), ask(s.set, request("b"))
            await settle()
            s.tick()  # the place is free
            for _ in range(turns_of_the_loop):
                await asyncio.sleep(0)
            assert await s.set.abort("b") == 1
            await settle()
            assert running.done() and waiting.done(), "nobody told the engine"
            assert waiting.result().stop_reason is StopReason.ABORT

    asyncio.run(main())


def test_an_abort_ends_a_turn_whose_session_is_moving() -> None:
    told, go = asyncio.Event(), asyncio.Event()

    class Slow(FakeReplica):
        async def end_session(self, session_id: str) -> None:
            told.set()
            await go.wait()
            await super().end_session(session_id)

    async def main() -> None:
        async with stage(2, make=Slow, affinity_slack=0) as s:
            await s.run(ask(s.set, request("moves")))
            other = ask(s.set, request("stays"))
            await settle()
            moving = ask(s.set, request("moves"))
            await told.wait()  # its former replica is asked to forget it
            assert await s.set.abort("moves") == 1
            go.set()
            await settle()
            assert moving.result().stop_reason is StopReason.ABORT and not moving.result().ids
            await s.run(other)

    asyncio.run(main())


def test_a_replica_that_cannot_be_put_to_sleep_is_started_again() -> None:
    starting, go = asyncio.Event(), asyncio.Event()

    class Late(FakeReplica):
        async def start(self) -> None:
            if len(lives) == 3:
                starting.set()
                await go.wait()
            await super().start()

        async def sleep(self, level: int = 1) -> None:
            if len(lives) == 3 and lives[2] is self:
                raise EngineError("it cannot sleep")
            await super().sleep(level)

    lives: list[FakeReplica] = []

    def make(number: int) -> FakeReplica:
        lives.append(Late(number))
        return lives[-1]

    async def main() -> None:
        async with stage(2, make=make) as s:
            task = ask(s.set, request("a"))
            await settle()
            lives[0].kill()
            await starting.wait()
            await s.run(task)
            await s.set.sleep()
            go.set()
            await settle()
            await s.set.wake()
            await settle()
            assert len(lives) == 4 and s.set.metrics()["serving/replicas"] == 2

    asyncio.run(main())


def test_a_replica_that_is_lost_while_it_is_given_weights_is_replaced_once() -> None:
    made: list[FakeReplica] = []
    arming, go_on, starting, start = (asyncio.Event() for _ in range(4))

    class Late(FakeReplica):
        async def start(self) -> None:
            if len(made) == 4:
                starting.set()
                await start.wait()
            await super().start()

    def make(number: int) -> FakeReplica:
        made.append(Late(number))
        return made[-1]

    async def republish(engine: RolloutEngine) -> ServedWeights:
        if engine is made[2]:
            arming.set()
            await go_on.wait()
            raise EngineError("it was closed")
        return await engine.update_weights(WEIGHTS, 1)

    async def main() -> None:
        async with stage(2, make=make, republish=republish, health_interval_s=0.001) as s:
            await s.set.update_weights(WEIGHTS, 1)
            made[0].kill()
            await arming.wait()
            made[2].kill(silently=True)  # found by the health check
            await starting.wait()
            go_on.set()
            await settle()
            await s.set.update_weights(WEIGHTS, 2)
            start.set()
            await settle()
            assert len(made) == 4 and s.set.metrics()["serving/restarts"] == 2

    asyncio.run(main())


def test_a_replica_that_never_starts_again_is_given_up_however_often_that_may_be_tried() -> None:
    lives: list[FakeReplica] = []

    def make(number: int) -> FakeReplica:
        lives.append(FakeReplica(number))
        lives[-1].start_error = OSError("no memory") if len(lives) > 1 else None
        return lives[-1]

    async def main() -> None:
        async with stage(1, make=make, max_restarts=1100) as s:
            task = ask(s.set, request("a"))
            await settle()
            lives[0].kill()
            with pytest.raises(EngineLost, match="every replica is gone, after .*=1100 restarts"):
                await task

    asyncio.run(main())


def test_a_health_check_that_breaks_does_not_end_the_health_checks() -> None:
    class Odd(FakeReplica):
        broke = False

        async def check_health(self) -> None:
            if not self.broke:
                self.broke = True
                raise RuntimeError("no such key")
            await super().check_health()

    async def main() -> None:
        async with stage(1, make=Odd, health_interval_s=0.001) as s:
            s.spawned[0].kill(silently=True)
            async with asyncio.timeout(30):
                while len(s.spawned) < 2:
                    await asyncio.sleep(0.001)

    asyncio.run(main())


def test_an_engine_that_is_being_closed_when_the_set_is_closed_to_its_end() -> None:
    closing, go = asyncio.Event(), asyncio.Event()

    class Slow(FakeReplica):
        is_gone = False

        async def close(self) -> None:
            if self.closed:  # once, as engines do
                return
            self.closed = True
            closing.set()
            await go.wait()
            self.is_gone = True  # its process is killed here

    async def main() -> None:
        async with stage(1, make=Slow) as s:
            engine = s.spawned[0]
            assert isinstance(engine, Slow)
            engine.kill()
            with pytest.raises(EngineLost):
                await engine.check_health()
            task = ask(s.set, request("a"))
            await closing.wait()
            leaving = asyncio.create_task(s.set.close())
            await settle()
            go.set()
            await leaving
            assert engine.is_gone
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
