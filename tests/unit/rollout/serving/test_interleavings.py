"""Whatever happens in whatever order: no token is lost or doubled, no version falls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from agentrl.errors import EngineError
from agentrl.rollout.engine import RolloutEngine
from agentrl.testing.fake_replica import FakeReplica, expected_ids
from agentrl.types import GenerateRequest, Generation, StopReason
from agentrl.weights.served import ServedWeights

from .stage import WEIGHTS, Stage, request, settle, stage

pytestmark = pytest.mark.timeout(120)

OPERATIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 40)),
    st.tuples(st.just("tick"), st.integers(1, 4)),
    st.tuples(st.just("kill"), st.integers(0, 2)),
    st.tuples(st.just("update"), st.booleans()),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("settle"), st.just(0)),
)


class Run:
    """Does what hypothesis says, and remembers what was asked for."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.asked: list[tuple[GenerateRequest, asyncio.Task[Generation]]] = []
        self.aborted: set[str] = set()
        self.updates: list[asyncio.Task[ServedWeights]] = []

    async def do(self, name: str, value: int) -> None:
        match name:
            case "ask":
                asked = request(f"s{len(self.asked)}", seed=value, max_tokens=9)
                self.asked.append((asked, asyncio.create_task(self.stage.set.generate(asked))))
            case "tick":
                self.stage.tick(value)
            case "kill" if value < len(self.stage.spawned):
                self.stage.spawned[-1 - value].kill()
            case "update":
                version = len(self.updates) + 1
                update = self.stage.set.update_weights(WEIGHTS, version, interrupt=bool(value))
                self.updates.append(asyncio.create_task(update))
            case "abort" if value < len(self.asked):
                self.aborted.add(f"s{value}")
                await self.stage.set.abort(f"s{value}")
            case "cancel" if value < len(self.asked):
                self.asked[value][1].cancel()
            case _:
                await settle()

    async def finish(self) -> None:
        for _ in range(400):
            await settle()
            if all(task.done() for task in [*self.updates, *(task for _, task in self.asked)]):
                return
            self.stage.tick()
        raise AssertionError("something never ended")


@settings(max_examples=120, deadline=None)
@given(
    operations=st.lists(OPERATIONS, max_size=25),
    streams=st.booleans(),
    abort_ticks=st.integers(0, 2),
    max_requests=st.integers(1, 4),
)
def test_any_interleaving(
    operations: Sequence[tuple[str, int]], streams: bool, abort_ticks: int, max_requests: int
) -> None:
    async def main() -> None:
        def make(number: int) -> FakeReplica:
            return FakeReplica(number, streams=streams, abort_ticks=abort_ticks)

        async def republish(engine: RolloutEngine) -> ServedWeights:
            return await engine.update_weights(WEIGHTS, current.stage.set.policy_version)

        async with stage(
            2,
            make=make,
            republish=republish,
            max_requests=max_requests,
            max_restarts=1000,
            max_replays=1000,
        ) as found:
            current = Run(found)
            for name, value in operations:
                await current.do(name, value)
            await current.finish()
            check(current)

    asyncio.run(main())


def check(run: Run) -> None:
    lost_updates = [task for task in run.updates if task.exception() is not None]
    for task in lost_updates:  # every replica died in the middle of it: said, not hidden
        assert "lost" in str(task.exception()) or "no replica" in str(task.exception())
    for asked, task in run.asked:
        if task.cancelled():
            continue
        error = task.exception()
        if error is not None:
            assert isinstance(error, EngineError) and lost_updates, error
            continue
        result = task.result()
        whole = expected_ids(asked)
        event(str(result.stop_reason))
        if result.stop_reason is StopReason.ABORT:
            assert asked.session_id in run.aborted
            assert result.ids == whole[: len(result.ids)]
        else:
            assert result.ids == whole
        assert result.logprobs == [-float(token) for token in result.ids]
        assert result.policy_version == sorted(result.policy_version)
        assert len(set(result.policy_version)) <= len(run.updates) + 1
