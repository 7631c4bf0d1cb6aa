"""The engine on the token clock, against a simulation that makes every step of every token."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import EngineError, EngineLost
from agentrl.testing.decode_time import EngineCost
from agentrl.testing.tables import Table
from agentrl.testing.token_clock import ClockEngine, ClockSettings
from agentrl.testing.virtual_time import run_virtual
from agentrl.types import GenerateRequest, Generation, SamplingParams, StopReason

COST = EngineCost()
STOP_ID = 2


def request(
    num_prompt: int, num_tokens: int, *, session: str = "s", max_tokens: int = 10**6, first: int = 0
) -> GenerateRequest:
    sampling = SamplingParams(
        max_tokens=max_tokens, seed=num_tokens, stop_token_ids=(STOP_ID,), first_index=first
    )
    return GenerateRequest(prompt_ids=[7] * num_prompt, sampling=sampling, session_id=session)


async def started(**changes: object) -> ClockEngine:
    """An engine whose answers are as long as the seed says."""
    lengths = Table(range(4096))
    engine = ClockEngine(replace(ClockSettings(cost=COST, lengths=lengths), **changes))  # type: ignore[arg-type]
    await engine.start()
    return engine


def now_s() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Job:
    arrival_s: float
    num_prompt: int
    num_tokens: int


def step_by_step(jobs: list[Job], num_slots: int) -> list[float]:
    """When each job ends, found by making one decode step after the other."""
    ends = [0.0] * len(jobs)
    now = 0.0
    coming = sorted(range(len(jobs)), key=lambda index: jobs[index].arrival_s)
    batch: dict[int, int] = {}  # job -> tokens decoded
    while coming or batch:
        if not batch:
            now = max(now, jobs[coming[0]].arrival_s)
        while coming and len(batch) < num_slots and jobs[coming[0]].arrival_s <= now:
            index = coming.pop(0)
            now += COST.prefill_s(jobs[index].num_prompt)
            batch[index] = 0
        context = sum(jobs[index].num_prompt + done for index, done in batch.items())
        now += COST.step_s(len(batch), context)
        for index in list(batch):
            batch[index] += 1
            if batch[index] == jobs[index].num_tokens:
                ends[index] = now
                del batch[index]
    return ends


jobs_strategy = st.lists(
    st.builds(
        Job,
        arrival_s=st.integers(0, 50_000).map(lambda micros: micros / 1e6),
        num_prompt=st.integers(1, 2000),
        num_tokens=st.integers(1, 200),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda job: job.arrival_s,  # who is first among those that come at once is open
)


@settings(deadline=None, max_examples=60)
@given(jobs=jobs_strategy, num_slots=st.integers(1, 6))
def test_requests_end_when_a_step_by_step_simulation_says(jobs: list[Job], num_slots: int) -> None:
    jobs.sort(key=lambda job: job.arrival_s)

    async def main() -> list[float]:
        engine = await started(num_slots=num_slots)

        async def play(number: int, job: Job) -> float:
            await asyncio.sleep(job.arrival_s)
            asked = request(job.num_prompt, job.num_tokens, session=str(number))
            generation = await engine.generate(asked)
            assert len(generation.ids) == job.num_tokens
            return now_s()

        return list(await asyncio.gather(*(play(i, job) for i, job in enumerate(jobs))))

    assert run_virtual(main()) == pytest.approx(step_by_step(jobs, num_slots), rel=1e-6)


def test_an_event_costs_the_same_however_long_the_answers_are() -> None:
    def events(scale: int) -> int:
        async def main() -> int:
            engine = await started(num_slots=64, lengths=Table([scale * n for n in range(1, 65)]))
            await asyncio.gather(
                *(engine.generate(request(10, n, session=str(n))) for n in range(256))
            )
            return engine.counts.events

        return run_virtual(main())

    assert events(scale=100) == events(scale=1)


def test_the_length_is_that_of_the_seed_within_the_limit() -> None:
    async def main() -> None:
        engine = await started()
        whole = await engine.generate(request(10, 50))
        assert len(whole.ids) == 50 and whole.ids[-1] == STOP_ID
        assert whole.stop_reason is StopReason.STOP
        cut = await engine.generate(request(10, 50, max_tokens=20))
        assert len(cut.ids) == 20 and STOP_ID not in cut.ids
        assert cut.stop_reason is StopReason.LENGTH

    run_virtual(main())


def test_a_session_is_read_once_until_the_weights_change() -> None:
    async def main() -> list[int | None]:
        engine = await started()
        cached = []
        for num_prompt in (100, 200, 300):
            cached.append((await engine.generate(request(num_prompt, 50))).num_cached_tokens)
        await engine.update_weights((), version=1)
        cached.append((await engine.generate(request(400, 50))).num_cached_tokens)
        await engine.end_session("s")
        cached.append((await engine.generate(request(500, 50))).num_cached_tokens)
        return cached

    assert run_virtual(main()) == [0, 150, 250, 0, 0]


def test_an_abort_returns_the_tokens_so_far_and_the_rest_can_follow() -> None:
    async def main() -> tuple[Generation, Generation, float]:
        engine = await started(sync_s=0.5)
        running = asyncio.create_task(engine.generate(request(100, 1000)))
        await asyncio.sleep(0.1)
        assert await engine.abort() == 1
        first = await running
        await engine.update_weights((), version=1)
        updated_s = now_s()
        num = len(first.ids)
        rest = await engine.generate(request(100 + num, 1000, first=num))
        return first, rest, updated_s

    first, rest, updated_s = run_virtual(main())
    assert first.stop_reason is StopReason.ABORT and rest.stop_reason is StopReason.STOP
    assert len(first.ids) + len(rest.ids) == 1000
    in_time = COST.steps_until(0.1 - COST.prefill_s(100), 1, 100, most=1000)
    assert len(first.ids) == in_time
    assert set(first.policy_version) == {0} and set(rest.policy_version) == {1}
    assert updated_s == pytest.approx(0.6, abs=1e-3)


def test_a_request_that_waits_for_a_slot_can_be_aborted() -> None:
    async def main() -> list[int]:
        engine = await started(num_slots=1)
        running = [
            asyncio.create_task(engine.generate(request(10, 500, session=name))) for name in "ab"
        ]
        await asyncio.sleep(0.01)
        await engine.abort("b")
        return [len((await task).ids) for task in running]

    assert run_virtual(main()) == [500, 0]


def test_a_cancelled_request_frees_its_slot_and_its_share_of_the_steps() -> None:
    async def main() -> float:
        engine = await started(num_slots=1)
        first = asyncio.create_task(engine.generate(request(10, 4000, session="a")))
        second = asyncio.create_task(engine.generate(request(10, 10, session="b")))
        await asyncio.sleep(0.05)
        first.cancel()
        assert len((await second).ids) == 10
        assert engine.num_unfinished == 0
        return now_s()

    assert run_virtual(main()) < 0.06


def test_an_update_waits_for_what_is_unfinished() -> None:
    async def main() -> None:
        engine = await started(sync_s=0.25)
        running = asyncio.create_task(engine.generate(request(10, 1000)))
        await asyncio.sleep(0)
        served = await engine.update_weights((), version=3)
        assert running.done() and served.version == engine.policy_version == 3
        assert now_s() == pytest.approx(0.25 + COST.prefill_s(10) + COST.steps_s(1000, 1, 10))

    run_virtual(main())


def test_an_update_gives_up_at_its_deadline() -> None:
    async def main() -> None:
        engine = await started(drain_timeout_s=0.01)
        running = asyncio.create_task(engine.generate(request(10, 4000)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="1 requests were unfinished"):
            await engine.update_weights((), version=1)
        running.cancel()

    run_virtual(main())


def test_sleep_is_refused_with_requests_and_serves_nothing() -> None:
    async def main() -> None:
        engine = await started()
        running = asyncio.create_task(engine.generate(request(10, 100)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="1 requests"):
            await engine.sleep()
        await running
        await engine.sleep()
        with pytest.raises(EngineError, match="wake"):
            await engine.generate(request(10, 10))
        await engine.wake()
        assert (await engine.generate(request(200, 10))).num_cached_tokens == 0

    run_virtual(main())


def test_a_killed_engine_loses_its_requests_for_good() -> None:
    async def main() -> None:
        engine = await started()
        running = asyncio.create_task(engine.generate(request(10, 1000)))
        await asyncio.sleep(0.01)
        await engine.check_health()
        engine.kill()
        for lost in (running, engine.generate(request(1, 1)), engine.check_health()):
            with pytest.raises(EngineLost):
                await lost

    run_virtual(main())


def test_ids_may_stand_for_many_tokens_of_the_clock() -> None:
    async def main(scale: int) -> tuple[int, float]:
        engine = await started(tokens_per_id=scale)
        generation = await engine.generate(request(640 // scale, 640))
        return len(generation.ids), now_s()

    (many, slow), (few, fast) = run_virtual(main(1)), run_virtual(main(64))
    assert (many, few) == (640, 10)
    assert fast == pytest.approx(slow)
