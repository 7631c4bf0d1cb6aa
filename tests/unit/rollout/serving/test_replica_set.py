"""Several engines behind the face of one: nothing is lost, whatever happens to them."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.errors import ConfigError, EngineError, EngineLost
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.serving.config import ServingConfig
from agentrl.rollout.serving.replica_set import ReplicaSet
from agentrl.testing.fake_replica import STOP_ID, FakeReplica, expected_ids
from agentrl.types import GenerateRequest, Generation, StopReason
from agentrl.weights.served import ServedWeights

from .stage import WEIGHTS, request, settle, stage

pytestmark = pytest.mark.timeout(60)


def ask(replicas: ReplicaSet, asked: GenerateRequest) -> asyncio.Task[Generation]:
    return asyncio.create_task(replicas.generate(asked))


async def give_weights(engine: RolloutEngine, version: int) -> ServedWeights:
    return await engine.update_weights(WEIGHTS, version)


def test_requests_are_spread_and_sessions_come_back() -> None:
    async def main() -> None:
        async with stage(2) as s:
            tasks = [ask(s.set, request(f"s{i}", seed=5 + i)) for i in range(4)]
            await settle()
            assert [replica.num_unfinished for replica in s.spawned] == [4, 0]  # one prompt
            await s.run(*tasks)
            longer = GenerateRequest(
                prompt_ids=[9, 9], sampling=request("x").sampling, session_id="x"
            )
            await s.run(ask(s.set, request("y")), ask(s.set, longer))
            assert "x" in {item.session_id for item in s.spawned[1].served}
            await s.run(ask(s.set, longer))
            assert s.set.metrics()["serving/affinity_kept"] == 5
            assert s.set.metrics()["serving/cache_hit_rate"] > 0

    asyncio.run(main())


def test_a_replica_works_at_so_many_requests_and_others_wait_in_order() -> None:
    async def main() -> None:
        async with stage(1, max_requests=2) as s:
            ended: list[str] = []

            async def one(name: str) -> None:
                await s.set.generate(request(name, seed=2))  # three tokens
                ended.append(name)

            tasks = [asyncio.create_task(one(f"s{i}")) for i in range(6)]
            await settle()
            assert s.spawned[0].num_unfinished == 2
            assert s.set.metrics()["serving/waiting"] == 4
            await s.run(*tasks)
            assert ended == [f"s{i}" for i in range(6)]

    asyncio.run(main())


def test_a_cancelled_request_frees_its_place_whether_it_waits_or_runs() -> None:
    async def main() -> None:
        async with stage(1, max_requests=1) as s:
            running, waiting, last = [ask(s.set, request(name)) for name in "abc"]
            await settle()
            waiting.cancel()
            running.cancel()
            await settle()
            assert running.cancelled() and waiting.cancelled()
            await s.run(last)
            assert last.result().ids == expected_ids(request("c"))
            assert [item.session_id for item in s.spawned[0].served] == ["a", "c"]
            assert s.set.metrics()["serving/running"] == 0

    asyncio.run(main())


def test_an_update_that_interrupts_goes_on_with_every_turn_under_the_new_weights() -> None:
    async def main() -> None:
        async with stage(2) as s:
            asked = [request(f"s{i}", seed=11) for i in range(3)]  # twelve tokens
            tasks = [ask(s.set, item) for item in asked]
            await settle()
            s.tick(4)
            served = await s.set.update_weights(WEIGHTS, 1, interrupt=True)
            assert served.version == s.set.policy_version == 1
            await s.run(*tasks)
            for item, task in zip(asked, tasks, strict=True):
                found = task.result()
                assert found.ids == expected_ids(item)
                assert found.policy_version == [0] * 4 + [1] * 8
                assert found.stop_reason is StopReason.STOP
            assert s.set.metrics()["serving/continuations"] == 3

    asyncio.run(main())


def test_an_update_waits_for_an_abort_that_takes_its_time() -> None:
    async def main() -> None:
        async with stage(1, make=lambda n: FakeReplica(n, abort_ticks=3)) as s:
            task, other = ask(s.set, request("a")), ask(s.set, request("b"))
            await settle()
            s.tick(2)
            other.cancel()  # the engine goes on with it for three steps
            update = asyncio.create_task(s.set.update_weights(WEIGHTS, 1, interrupt=True))
            await settle()
            assert not update.done() and s.spawned[0].policy_version == 0
            await s.run(update)
            await s.run(task)
            assert task.result().ids == expected_ids(request("a"))

    asyncio.run(main())


def test_an_update_that_drains_lets_turns_end_and_holds_new_ones_back() -> None:
    async def main() -> None:
        async with stage(1) as s:
            first = ask(s.set, request("a"))
            await settle()
            update = asyncio.create_task(s.set.update_weights(WEIGHTS, 1))
            await settle()
            second = ask(s.set, request("b"))
            await settle()
            assert [item.session_id for item in s.spawned[0].served] == ["a"]
            await s.run(first, update, second)
            assert set(first.result().policy_version) == {0}
            assert set(second.result().policy_version) == {1}

    asyncio.run(main())


def test_a_drain_has_a_deadline_and_the_old_weights_serve_on() -> None:
    async def main() -> None:
        async with stage(1, drain_timeout_s=0.02) as s:
            task = ask(s.set, request("a"))
            await settle()
            with pytest.raises(EngineError, match="drain_timeout_s=0.02"):
                await s.set.update_weights(WEIGHTS, 1)
            await s.run(task)
            assert set(task.result().policy_version) == {0}

    asyncio.run(main())


def test_an_abort_that_the_caller_asked_for_is_returned_with_the_tokens_so_far() -> None:
    async def main() -> None:
        async with stage(1, max_requests=1) as s:
            running, waiting = ask(s.set, request("a")), ask(s.set, request("b"))
            await settle()
            s.tick(3)
            assert await s.set.abort("a") == 1
            await settle()
            assert running.result().stop_reason is StopReason.ABORT
            assert running.result().ids == expected_ids(request("a"))[:3]
            assert await s.set.abort() == 1
            await settle()
            assert waiting.result().stop_reason is StopReason.ABORT

    asyncio.run(main())


def test_a_turn_that_waits_with_its_tokens_is_aborted_with_them() -> None:
    async def main() -> None:
        async with stage(1) as s:
            task = ask(s.set, request("a"))
            await settle()
            s.tick(5)
            async with s.set.no_requests(interrupt=True):
                await settle()
                assert not task.done()
                await s.set.abort("a")
                await settle()
                assert task.result().ids == expected_ids(request("a"))[:5]

    asyncio.run(main())


@pytest.mark.parametrize("streams", [False, True])
def test_a_turn_whose_engine_is_killed_goes_on_elsewhere(streams: bool) -> None:
    async def main() -> None:
        async with stage(2, make=lambda n: FakeReplica(n, streams=streams)) as s:
            tasks = [ask(s.set, request(f"s{i}")) for i in range(3)]
            await settle()
            s.tick(4)
            s.spawned[0].kill()
            await settle()
            assert s.spawned[0].faults == ["killed with 3 running"]
            firsts = {item.sampling.first_index for item in s.spawned[1].served}
            assert firsts == ({4} if streams else {0})
            await s.run(*tasks)
            assert all(t.result().ids == expected_ids(request("s")) for t in tasks)
            found = s.set.metrics()
            assert found["serving/replays"] == 3 and found["serving/restarts"] == 1
            assert found["serving/replicas"] == 2 and len(s.spawned) == 3

    asyncio.run(main())


def test_a_death_that_nobody_is_told_of_is_found_by_the_health_check() -> None:
    async def main() -> None:
        async with stage(2, health_interval_s=0.01) as s:
            task = ask(s.set, request("a"))
            await settle()
            s.spawned[0].kill(silently=True)
            async with asyncio.timeout(30):
                while not any(replica.served for replica in s.spawned[1:]):
                    await asyncio.sleep(0.01)
            await s.run(task)
            assert task.result().ids == expected_ids(request("a"))

    asyncio.run(main())


def test_a_replica_that_came_back_serves_only_with_the_weights_of_the_policy() -> None:
    async def main() -> None:
        async with stage(2) as s:
            await s.set.update_weights(WEIGHTS, 3)
            s.spawned[0].kill()
            task = ask(s.set, request("a"))
            await settle()
            assert len(s.spawned) == 3 and not s.spawned[2].served
            assert s.set.metrics()["serving/replicas"] == 1
            await s.run(task)
            await s.set.update_weights(WEIGHTS, 4)
            assert s.spawned[2].policy_version == 4
            assert s.set.metrics()["serving/replicas"] == 2

    asyncio.run(main())


def test_republished_weights_arm_a_replica_and_other_weights_do_not() -> None:
    versions = iter([2, 3])  # the owner is behind at first

    async def republish(engine: RolloutEngine) -> ServedWeights:
        return await give_weights(engine, next(versions))

    async def main() -> None:
        async with stage(2, republish=republish) as s:
            await s.set.update_weights(WEIGHTS, 3)
            for number, serving in ((0, 1), (1, 1)):
                s.spawned[number].kill()
                await settle()
                await s.run(ask(s.set, request(f"s{number}", seed=0)))
                await settle()
                assert s.set.metrics()["serving/replicas"] == serving
            assert [item.policy_version for item in s.spawned[2:]] == [2, 3]
            assert not s.spawned[2].served and s.spawned[3].served

    asyncio.run(main())


def test_the_last_replica_without_weights_is_said_not_waited_for() -> None:
    async def main() -> None:
        async with stage(1) as s:
            await s.set.update_weights(WEIGHTS, 1)
            task = ask(s.set, request("a"))
            await settle()
            s.spawned[0].kill()
            await settle()
            with pytest.raises(EngineError, match="no replica holds the policy's weights.*killed"):
                await task
            await s.set.check_health()  # an update can still help

    asyncio.run(main())


def test_restarts_are_bounded_and_then_everyone_is_told() -> None:
    async def main() -> None:
        async with stage(1, max_restarts=2, max_replays=9) as s:
            task = ask(s.set, request("a"))
            for life in range(3):
                await settle()
                s.spawned[life].kill()
            await settle()
            with pytest.raises(EngineLost, match="every replica is gone, after .*max_restarts=2"):
                await task
            with pytest.raises(EngineLost):
                await s.set.generate(request("b"))
            with pytest.raises(EngineLost):
                await s.set.check_health()
            assert len(s.spawned) == 3

    asyncio.run(main())


def test_a_request_that_ends_its_engines_is_given_up() -> None:
    async def main() -> None:
        async with stage(1, max_replays=1) as s:
            task = ask(s.set, request("poison"))
            for life in range(2):
                await settle()
                s.spawned[life].kill()
            with pytest.raises(EngineLost, match="2 replicas were lost under this request"):
                await task
            await settle()
            await s.run(ask(s.set, request("sound")))

    asyncio.run(main())


def test_a_replica_that_does_not_start_again_at_first_is_tried_again() -> None:
    lives: list[FakeReplica] = []

    def make(number: int) -> FakeReplica:
        replica = FakeReplica(number)
        if len(lives) == 1:
            replica.start_error = OSError("no memory yet")
        lives.append(replica)
        return replica

    async def main() -> None:
        async with stage(1, make=make) as s:
            s.spawned[0].kill()
            task = ask(s.set, request("a"))
            await s.run(task)
            assert len(s.spawned) == 3 and lives[1].closed

    asyncio.run(main())


def test_engines_without_weights_serve_after_the_first_update() -> None:
    async def main() -> None:
        async with stage(2, make=lambda n: FakeReplica(n, version=-1)) as s:
            with pytest.raises(EngineError, match="push them with update_weights"):
                await s.set.generate(request("a"))
            await s.set.update_weights(WEIGHTS, 0)
            await s.run(ask(s.set, request("a")))

    asyncio.run(main())


def test_nobody_serves_after_an_update_that_failed_until_one_succeeds() -> None:
    async def main() -> None:
        async with stage(2) as s:
            s.spawned[1].update_error = EngineError("'weight' holds values that are not finite")
            task = ask(s.set, request("a"))
            await settle()
            with pytest.raises(EngineError, match="not finite"):
                await s.set.update_weights(WEIGHTS, 1, interrupt=True)
            with pytest.raises(EngineError, match="update to version 1 failed.*not finite"):
                await task
            s.spawned[1].update_error = None
            await s.set.update_weights(WEIGHTS, 1)
            task = ask(s.set, request("a"))
            await s.run(task)
            assert set(task.result().policy_version) == {1}

    asyncio.run(main())


def test_replicas_that_serve_different_weights_are_refused() -> None:
    class Scrambled(FakeReplica):
        async def update_weights(self, params: object, version: int) -> ServedWeights:
            del params
            return ServedWeights(version=version, sums={"weight": self.number})

    async def main() -> None:
        async with stage(2, make=Scrambled) as s:
            with pytest.raises(EngineError, match="scrambled policy.*replica 1"):
                await s.set.update_weights(WEIGHTS, 1)

    asyncio.run(main())


def test_a_replica_that_dies_while_weights_are_loaded_does_not_keep_others_from_them() -> None:
    async def main() -> None:
        async with stage(2) as s:
            update = asyncio.create_task(s.set.update_weights(WEIGHTS, 1))
            for _ in range(50):
                await asyncio.sleep(0)
                if not s.spawned[0].faults:
                    s.spawned[0].kill()
            await update
            await settle()
            assert s.set.policy_version == 1
            await s.run(ask(s.set, request("a")))

    asyncio.run(main())


def test_sleep_is_a_barrier_and_refuses_requests() -> None:
    async def main() -> None:
        async with stage(2) as s:
            task = ask(s.set, request("a"))
            await settle()
            with pytest.raises(EngineError, match="1 requests are unfinished"):
                await s.set.sleep()
            await s.run(task)
            await s.set.sleep(2)
            assert all(replica.asleep for replica in s.spawned)
            with pytest.raises(EngineError, match="asleep; await wake"):
                await s.set.update_weights(WEIGHTS, 1)  # lost ones come back after the waking
            with pytest.raises(EngineError, match="asleep"):
                await s.set.generate(request("b"))
            await s.set.wake()
            with pytest.raises(EngineError, match="push them"):
                await s.set.generate(request("b"))  # level 2 may have forgotten the weights
            await s.set.update_weights(WEIGHTS, 1)
            await s.run(ask(s.set, request("b")))

    asyncio.run(main())


def test_a_replica_that_dies_asleep_is_started_after_the_others_have_woken() -> None:
    async def main() -> None:
        async with stage(2, health_interval_s=0.001) as s:
            await s.set.sleep()
            s.spawned[0].kill()
            for _ in range(20):
                await asyncio.sleep(0.001)  # in which the health check finds it
            assert s.set.metrics()["serving/replicas"] == 1
            assert len(s.spawned) == 2  # its memory is in use
            await s.set.wake()
            await settle()
            assert len(s.spawned) == 3
            assert s.set.metrics()["serving/replicas"] == 2

    asyncio.run(main())


def test_a_request_has_a_deadline() -> None:
    async def main() -> None:
        async with stage(1, request_timeout_s=0.02) as s:
            with pytest.raises(EngineError, match="0 of at most 50 tokens.*request_timeout_s=0.02"):
                await s.set.generate(request("a"))
            assert s.set.metrics()["serving/running"] == 0

    asyncio.run(main())


def test_a_refused_request_is_not_sent_elsewhere() -> None:
    class Refusing(FakeReplica):
        async def generate(self, request: GenerateRequest) -> Generation:
            raise EngineError("the prompt is too long")

    async def main() -> None:
        async with stage(2, make=Refusing) as s:
            with pytest.raises(EngineError, match="too long"):
                await s.set.generate(request("a"))
            assert s.set.metrics()["serving/replays"] == 0

    asyncio.run(main())


def test_close_fails_who_waits_and_who_runs() -> None:
    async def main() -> None:
        async with stage(1, max_requests=1) as s:
            running, waiting = ask(s.set, request("a")), ask(s.set, request("b"))
            await settle()
            await s.set.close()
            for task in (running, waiting):
                with pytest.raises(EngineError, match="closed"):
                    await task

    asyncio.run(main())


def test_a_start_that_fails_closes_what_had_started() -> None:
    made: list[FakeReplica] = []

    def make(number: int) -> FakeReplica:
        made.append(FakeReplica(number))
        if number == 1:
            made[-1].start_error = EngineError("no GPU left")
        return made[-1]

    async def main() -> None:
        with pytest.raises(EngineError, match="no GPU left"):
            await ReplicaSet(make, 2).start()
        assert all(replica.closed for replica in made)

    asyncio.run(main())


def test_metrics_are_offered_to_prometheus() -> None:
    async def main() -> None:
        async with stage(1) as s:
            await s.run(ask(s.set, request("a", seed=11)))
            from agentrl.rollout.serving.stats import MetricsEndpoint

            endpoint = MetricsEndpoint(0)
            await endpoint.open(s.set.metrics)
            reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            text = (await reader.read()).decode()
            writer.close()
            await endpoint.close()
            assert text.startswith("HTTP/1.1 200 OK")
            assert "# TYPE agentrl_serving_turns_total counter" in text
            assert "agentrl_serving_sampled_tokens_total 12\n" in text
            assert 'agentrl_serving_replica_running{replica="0"} 0\n' in text

    asyncio.run(main())


def test_settings_that_cannot_work_are_refused_together() -> None:
    config = ServingConfig(max_requests=0, request_timeout_s=float("nan"), metrics_port=70000)
    with pytest.raises(ConfigError) as found:
        ReplicaSet(FakeReplica, 0, config)
    for name in ("max_requests=0", "request_timeout_s=nan", "metrics_port=70000", "0 replicas"):
        assert name in str(found.value)


def test_the_stop_token_is_part_of_what_is_foretold() -> None:
    assert expected_ids(request("a", seed=2))[-1] == STOP_ID
