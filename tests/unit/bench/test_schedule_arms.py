"""What waits for what under each schedule, and what no schedule can beat."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.bench.schedule_arms import Schedule, generate_by
from agentrl.bench.schedule_floor import WorkDone
from agentrl.errors import EngineError
from agentrl.testing.run_data import make_trajectory
from agentrl.testing.token_clock import ClockSettings
from agentrl.testing.virtual_time import run_virtual
from agentrl.types import GenerateRequest, Generation, SamplingParams, StopReason

SECONDS = {"a": 1.0, "b": 5.0, "c": 2.0, "d": 3.0}


async def generate(request: GenerateRequest) -> Generation:
    """Takes as long as the session's name says."""
    if request.session_id not in SECONDS:
        raise EngineError("lost")
    await asyncio.sleep(SECONDS[request.session_id])
    return Generation(ids=[1], logprobs=[0.0], policy_version=[0], stop_reason=StopReason.STOP)


def ends(schedule: Schedule, names: str = "abcd") -> dict[str, list[float]]:
    """When the two turns of each session ended."""

    async def main() -> dict[str, list[float]]:
        ask = generate_by(schedule, generate, batch=2, parties=len(names))
        found: dict[str, list[float]] = {name: [] for name in names}

        async def play(name: str) -> None:
            request = GenerateRequest(
                prompt_ids=[1], sampling=SamplingParams(max_tokens=1), session_id=name
            )
            for _ in range(2):
                await ask(request)
                found[name].append(asyncio.get_running_loop().time())

        await asyncio.gather(*map(play, names))
        return found

    return run_virtual(main())


def test_each_session_by_itself_waits_for_nobody() -> None:
    assert ends(Schedule.ASYNC) == {name: [s, 2 * s] for name, s in SECONDS.items()}


def test_a_barrier_begins_a_turn_when_the_one_before_has_ended_for_all() -> None:
    assert ends(Schedule.BARRIER) == {name: [s, 5.0 + s] for name, s in SECONDS.items()}


def test_fixed_batches_end_with_their_longest_answer() -> None:
    assert ends(Schedule.BATCH) == {"a": [5, 13], "b": [5, 13], "c": [8, 16], "d": [8, 16]}


def test_an_engine_that_fails_fails_every_session_of_the_turn() -> None:
    with pytest.raises(EngineError, match="lost"):
        ends(Schedule.BATCH, "abx")


def test_the_longest_episode_is_a_floor_where_devices_abound_and_updates_are_another() -> None:
    work = WorkDone(ClockSettings(), lambda seed, turn: 100.0)
    trajectory = make_trajectory(seed=3)
    work.add([trajectory])
    alone = work.optimum_s(num_replicas=1000)
    assert alone == work.longest_s > 100.0 * len(trajectory.turns)
    assert work.sampled_tokens == trajectory.num_sampled_tokens
    work.add([make_trajectory(seed=4)] * 9)
    assert work.num_trajectories == 10
    assert work.optimum_s(num_replicas=1000, updates_s=[1000.0, 2000.0]) == 3000.0


def test_work_adds_up_and_is_shared_by_replicas() -> None:
    work = WorkDone(ClockSettings(), lambda seed, turn: 0.0)
    work.add([make_trajectory(seed=3)] * 3000)
    assert work.optimum_s(num_replicas=1) == pytest.approx(2 * work.optimum_s(num_replicas=2))
