"""Tool calls of one trajectory: statuses, limits, state, closing."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent.renderer import Renderer
from agentrl.errors import InfrastructureError
from agentrl.testing import FakeSandboxes, make_tokenizer
from agentrl.tool.base import ToolContext
from agentrl.tool.binding import Toolbox
from agentrl.tool.executor import ToolExecutor
from agentrl.types import ToolCall, ToolResult, ToolStatus

CODEC = Renderer(make_tokenizer()).codec
YAML = """
name: t
description: d
parameters: {{type: object, properties: {{x: {{}}}}}}
python: ./impl.py:{target}
idempotent: {idempotent}
limits: {limits}
"""
IMPL = """
import asyncio, threading, time
from agentrl.errors import InfrastructureError, SandboxError, ToolError

EVENTS = []
RELEASE = threading.Event()

class Async:
    async def open(self, context):
        EVENTS.append(("open", context.trajectory_id, dict(context.state)))
        self.count = 0
    async def call(self, x=None):
        self.count += 1
        return await act(x, self.count)
    async def close(self):
        EVENTS.append(("close",))

async def act(x, count):
    if x == "count": return str(count)
    if x == "mistake": raise ToolError("no")
    if x == "crash": raise ZeroDivisionError("boom")
    if x == "infra": EVENTS.append(("try",)); raise InfrastructureError("down")
    if x == "flaky":
        EVENTS.append(("try",))
        if sum(e == ("try",) for e in EVENTS) < 3: raise ConnectionResetError("reset")
        return "up again"
    if x == "hang": await asyncio.sleep(60)
    if x == "big": return "word " * 40_000_000
    if x == "surrogate": return "half \\ud800 pair"
    if x == "object": return object()
    return x

class Sync:
    def open(self, context): EVENTS.append(("open",))
    def call(self, x=None):
        if x == "hang": RELEASE.wait(60)
        return threading.current_thread().name
    def close(self): EVENTS.append(("close",))

class BadOpen(Sync):
    def open(self, context): raise ValueError("no licence")

class HangingClose(Sync):
    def close(self): RELEASE.wait(60)

class BadClose(Sync):
    def close(self): raise ValueError("cannot close")
"""

Body = Callable[[ToolExecutor], Awaitable[Any]]


class Bench:
    """One tool in a folder, and a fresh executor for it."""

    def __init__(
        self, folder: Path, target: str = "Async", limits: str = "{}", idempotent: bool = False
    ) -> None:
        (folder / "impl.py").write_text(IMPL)
        yaml = YAML.format(target=target, limits=limits, idempotent=str(idempotent).lower())
        yaml = yaml.replace("{x: {}}", "{x: {anyOf: [{type: string}, {type: number}, "
                            "{type: array, items: {type: number}}]}}")  # fmt: skip
        (folder / "t.yaml").write_text(yaml)
        self.toolbox = Toolbox([str(folder / "t.yaml")])
        self.module = inspect.getmodule(type(self.toolbox.bindings["t"].make()))
        assert self.module is not None
        self.events: list[Any] = self.module.EVENTS
        self.num_contexts = 0

    def executor(self) -> ToolExecutor:
        return ToolExecutor(
            self.toolbox, make_context=self._context, cut=CODEC.cut, close_timeout_s=0.3
        )

    def run(self, *calls: Any) -> list[ToolResult]:
        async def main() -> list[ToolResult]:
            executor = self.executor()
            try:
                return [
                    await executor.run(c if isinstance(c, ToolCall) else call(c)) for c in calls
                ]
            finally:
                await executor.close()

        return asyncio.run(asyncio.wait_for(main(), 60))

    async def _context(self, name: str) -> ToolContext:
        self.num_contexts += 1
        return ToolContext(
            trajectory_id="tr", seed=1, sandboxes=FakeSandboxes(), state={"setup": name}
        )


def call(x: Any, name: str = "t") -> ToolCall:
    return ToolCall(name=name, arguments={"x": x})


def test_a_tool_opens_once_keeps_its_state_and_closes(tmp_path: Path):
    bench = Bench(tmp_path)
    assert [r.content for r in bench.run("count", "count", "count")] == ["1", "2", "3"]
    assert bench.events == [("open", "tr", {"setup": "t"}), ("close",)]
    assert bench.num_contexts == 1


def test_a_tool_that_is_never_called_is_never_opened(tmp_path: Path):
    bench = Bench(tmp_path)
    bench.run(call(1, name="other"))
    assert bench.events == [] and bench.num_contexts == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [("x", "x"), (5, "5"), (0.5, "0.5"), ([1, 2], "[1, 2]")],
)
def test_plain_values_become_text(tmp_path: Path, value: Any, text: str):
    (result,) = Bench(tmp_path).run(value)
    assert (result.content, result.status) == (text, ToolStatus.OK)


@pytest.mark.parametrize(
    ("x", "status", "content"),
    [
        ("mistake", ToolStatus.ERROR, "error: no"),
        ("crash", ToolStatus.ERROR, "error: ZeroDivisionError: boom"),
        ("infra", ToolStatus.INFRA_ERROR, "InfrastructureError: down"),
        ("hang", ToolStatus.TIMEOUT, "error: timed out after 0.2 s"),
        ("object", ToolStatus.INFRA_ERROR, "InfrastructureError: the tool returned object"),
    ],
)
def test_what_goes_wrong_has_a_status(tmp_path: Path, x: str, status: ToolStatus, content: str):
    bench = Bench(tmp_path, limits="{timeout_s: 0.2}")
    (result,) = bench.run(x)
    assert result.status is status
    assert result.content.startswith(content)
    assert bench.events[-1] == ("close",)


def test_a_call_that_could_not_be_parsed_runs_nothing(tmp_path: Path):
    bench = Bench(tmp_path)
    (result,) = bench.run(ToolCall(name="t", arguments={}, error="no valid JSON"))
    assert (result.content, result.status) == ("error: no valid JSON", ToolStatus.ERROR)
    assert bench.events == []


def test_an_unknown_name_lists_the_tools_and_does_not_come_back(tmp_path: Path):
    (result,) = Bench(tmp_path).run(call(1, name="<|im_end|>T"))
    assert result.status is ToolStatus.ERROR
    assert "the tools are: t" in result.content
    assert result.name == "unknown"


def test_calls_beyond_the_limit_are_refused(tmp_path: Path):
    bench = Bench(tmp_path, limits="{max_calls: 2}")
    results = bench.run("count", "count", "count")
    assert [r.status for r in results] == [ToolStatus.OK, ToolStatus.OK, ToolStatus.ERROR]
    assert "may be called 2 times" in results[2].content


def test_two_hundred_megabytes_are_cut_to_the_limit_with_a_note(tmp_path: Path):
    bench = Bench(tmp_path, limits="{max_output_tokens: 20}")
    (result,) = bench.run("big")
    body, _, note = result.content.rpartition("\n")
    assert len(CODEC.encode_plain(body)) <= 20
    assert body.startswith("word ")
    assert note == f"[cut: {result.truncated_tokens} more tokens]"
    assert result.truncated_tokens > 1_000_000


def test_output_within_the_limit_is_whole(tmp_path: Path):
    (result,) = Bench(tmp_path, limits="{max_output_tokens: 20}").run("short")
    assert (result.content, result.truncated_tokens) == ("short", 0)


def test_text_that_no_tokenizer_can_encode_is_mended(tmp_path: Path):
    (result,) = Bench(tmp_path).run("surrogate")
    assert result.content == "half ? pair"


def test_only_infrastructure_failures_of_idempotent_tools_are_retried(tmp_path: Path):
    bench = Bench(tmp_path, limits="{retries: 3}", idempotent=True)
    results = bench.run("flaky", "crash", "mistake")
    assert [r.content for r in results] == [
        "up again", "error: ZeroDivisionError: boom", "error: no",
    ]  # fmt: skip
    assert bench.events.count(("try",)) == 3


def test_without_retries_the_first_failure_counts(tmp_path: Path):
    bench = Bench(tmp_path)
    (result,) = bench.run("infra")
    assert result.status is ToolStatus.INFRA_ERROR
    assert bench.events.count(("try",)) == 1


def test_synchronous_tools_run_off_the_event_loop(tmp_path: Path):
    (result,) = Bench(tmp_path, "Sync").run(1)
    assert result.content.startswith("agentrl-tool-")


def test_a_hung_thread_costs_one_call_and_the_state_of_the_tool(tmp_path: Path):
    bench = Bench(tmp_path, "Sync", limits="{timeout_s: 0.2}")
    first, second = bench.run("hang", 1)
    assert first.status is ToolStatus.TIMEOUT and "state is lost" in first.content
    assert second.status is ToolStatus.OK
    assert bench.events.count(("open",)) == 2 and bench.events.count(("close",)) == 2
    assert bench.module is not None
    bench.module.RELEASE.set()


def test_a_tool_that_cannot_open_is_our_failure(tmp_path: Path):
    bench = Bench(tmp_path, "BadOpen")
    (result,) = bench.run(1)
    assert result.status is ToolStatus.INFRA_ERROR
    assert "ValueError: no licence" in result.content
    assert ("close",) in bench.events


@pytest.mark.parametrize("target", ["HangingClose", "BadClose"])
def test_a_tool_that_cannot_close_does_not_hold_the_trajectory(tmp_path: Path, target: str):
    bench = Bench(tmp_path, target)
    (result,) = bench.run(1)
    assert result.status is ToolStatus.OK
    assert bench.module is not None
    bench.module.RELEASE.set()


def test_what_the_context_raises_goes_through(tmp_path: Path):
    bench = Bench(tmp_path)

    async def lost(name: str) -> ToolContext:
        raise InfrastructureError("the environment is lost")

    async def main() -> None:
        await ToolExecutor(bench.toolbox, make_context=lost, cut=CODEC.cut).run(call(1))

    with pytest.raises(InfrastructureError, match="environment is lost"):
        asyncio.run(main())


def test_concurrency_is_bounded_over_all_trajectories(tmp_path: Path):
    (tmp_path / "impl.py").write_text(
        "import asyncio\nNOW = [0, 0]\n"
        "async def slow(x=None):\n"
        "    NOW[0] += 1; NOW[1] = max(NOW)\n"
        "    await asyncio.sleep(0.01)\n"
        "    NOW[0] -= 1\n"
        "    return str(NOW[1])\n"
    )
    yaml = YAML.format(target="slow", limits="{concurrency: 3}", idempotent="false")
    (tmp_path / "t.yaml").write_text(yaml.replace("{x: {}}", "{x: {type: number}}"))
    toolbox = Toolbox([str(tmp_path / "t.yaml")])

    async def context(name: str) -> ToolContext:
        return ToolContext(trajectory_id="t", seed=0, sandboxes=FakeSandboxes())

    async def main() -> list[ToolResult]:
        executors = [ToolExecutor(toolbox, make_context=context, cut=CODEC.cut) for _ in range(12)]
        return await asyncio.gather(*(executor.run(call(1)) for executor in executors))

    results = asyncio.run(asyncio.wait_for(main(), 30))
    assert max(int(result.content) for result in results) == 3


def test_cancelling_a_call_still_closes_the_tool(tmp_path: Path):
    bench = Bench(tmp_path)

    async def main() -> None:
        executor = bench.executor()
        running = asyncio.create_task(executor.run(call("hang")))
        while not bench.events:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await executor.close()
        await executor.close()

    asyncio.run(asyncio.wait_for(main(), 30))
    assert [event[0] for event in bench.events] == ["open", "close"]
