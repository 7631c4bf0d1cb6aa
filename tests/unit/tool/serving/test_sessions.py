"""Sessions: state per trajectory, whose they are, and that they end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.testing import FakeSandboxes
from agentrl.tool.binding import Toolbox
from agentrl.tool.serving.config import ServerLimits
from agentrl.tool.serving.metrics import ServerMetrics
from agentrl.tool.serving.sessions import NotYourSession, SessionStore, TooManySessions
from agentrl.types import ToolCall, ToolStatus

IMPL = """
import asyncio
CLOSED = []
class Counter:
    async def open(self, context):
        self.n, self.name = context.state.get("start", 0), context.state.get("name")
    async def call(self, by=1):
        if by == 99: await asyncio.sleep(60)
        if by == 98: return "é" * 10_000
        self.n += by
        return str(self.n)
    async def close(self): CLOSED.append((self.name, self.n))
"""
YAML = """
name: counter
description: Count.
parameters: {type: object, properties: {by: {type: integer}}}
python: ./impl.py:Counter
limits: {timeout_s: 5, max_output_tokens: 8}
"""


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Store:
    """A store over one tool, with a clock to set."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        (folder / "impl.py").write_text(IMPL)
        (folder / "counter.yaml").write_text(YAML)
        self.clock = Clock()
        self.metrics = ServerMetrics()
        toolbox = Toolbox([str(folder / "counter.yaml")])
        self.closed: list[Any] = toolbox.bindings["counter"].make().call.__globals__["CLOSED"]  # type: ignore[attr-defined]
        self.store = SessionStore(
            toolbox,
            sandboxes=FakeSandboxes(),
            limits=ServerLimits(**limits),
            metrics=self.metrics,
            clock=self.clock,
        )


def count(by: int = 1) -> ToolCall:
    return ToolCall(name="counter", arguments={"by": by})


def test_each_session_keeps_a_state_of_its_own_and_closes_it(tmp_path: Path):
    bench = Store(tmp_path)

    async def main() -> list[str]:
        store = bench.store
        first = store.open("me", state={"start": 10, "name": "first"})
        second = store.open("me", state={"name": "second"})
        said = [
            (await store.call(session, count())).content
            for session in (first, second, first, second)
        ]
        await store.close(first, reason="client")
        await store.close(first, reason="client")
        return said

    assert asyncio.run(main()) == ["11", "1", "12", "2"]
    assert bench.closed == [("first", 12)]
    assert bench.metrics.sessions_closed == {"client": 1}


def test_ids_are_unguessable_and_of_use_to_their_owner_only(tmp_path: Path):
    store = Store(tmp_path).store
    sessions = [store.open("me") for _ in range(100)]
    assert len({session.id[:20] for session in sessions}) == 100
    assert all(len(session.id) >= 43 for session in sessions)  # 256 bits
    assert store.find(sessions[0].id, "me") is sessions[0]
    with pytest.raises(NotYourSession) as foreign:
        store.find(sessions[0].id, "you")
    with pytest.raises(NotYourSession) as unknown:
        store.find("x" * 43, "you")
    assert str(foreign.value) == str(unknown.value)  # a guess tells nothing
    assert (foreign.value.reason, unknown.value.reason) == ("foreign_session", "unknown_session")


def test_idle_sessions_are_closed_and_busy_ones_are_not(tmp_path: Path):
    bench = Store(tmp_path, session_ttl_s=100.0)

    async def main() -> None:
        store, clock = bench.store, bench.clock
        idle, used, busy = (store.open("me", state={"name": name}) for name in "abc")
        await store.call(idle, count())
        running = asyncio.create_task(store.call(busy, count(99)))
        clock.now_s = 60.0
        await store.call(used, count())
        clock.now_s = 100.0
        await store.close_idle()
        assert [s.id for s in (used, busy)] == [store.find(s.id, "me").id for s in (used, busy)]
        with pytest.raises(NotYourSession):
            store.find(idle.id, "me")
        running.cancel()

    asyncio.run(main())
    assert bench.closed == [("a", 1)]
    assert bench.metrics.sessions_closed == {"idle": 1}


def test_no_more_sessions_than_allowed_and_none_once_it_stops(tmp_path: Path):
    bench = Store(tmp_path, max_sessions=2)

    async def main() -> None:
        store = bench.store
        for _ in range(2):
            await store.call(store.open("me"), count())
        with pytest.raises(TooManySessions, match="--max-sessions"):
            store.open("me")
        await store.close_all()
        with pytest.raises(TooManySessions, match="stopping"):
            store.open("me")

    asyncio.run(main())
    assert len(bench.closed) == 2 and len(bench.store) == 0


def test_a_deadline_of_the_caller_counts_where_it_is_nearer(tmp_path: Path):
    bench = Store(tmp_path)

    async def main() -> Any:
        return await bench.store.call(bench.store.open("me"), count(99), timeout_s=0.05)

    result = asyncio.run(asyncio.wait_for(main(), 4))
    assert result.status is ToolStatus.TIMEOUT
    assert 'calls_total{tool="counter",status="timeout"} 1' in bench.metrics.text(
        num_sessions=1, num_requests=0
    )


def test_long_answers_are_cut_by_characters_for_the_caller_to_cut_by_tokens(tmp_path: Path):
    bench = Store(tmp_path)

    async def main() -> Any:
        return await bench.store.call(bench.store.open("me"), count(98))

    result = asyncio.run(main())
    assert set(result.content) == {"é"}
    assert len(result.content) + result.truncated_tokens == 10_000
