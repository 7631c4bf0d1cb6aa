"""Tool calls of one trajectory: statuses, limits, state, closing."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent.renderer import Renderer
from agentrl.errors import (
    ConfigError,
    EnvError,
    InfrastructureError,
    SandboxUnavailable,
    ToolUnavailable,
)
from agentrl.testing import FakeSandboxes, make_tokenizer
from agentrl.tool.base import ToolContext
from agentrl.tool.binding import Toolbox
from agentrl.tool.breaker import BreakerConfig
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
import asyncio, sys, threading
from agentrl.tool.base import ToolReply
from agentrl.errors import (
    ConfigError, EnvError, InfrastructureError, SandboxError, SandboxUnavailable, ToolError,
)

EVENTS = []
RELEASE = threading.Event()

class Futures(dict):
    def __missing__(self, key):
        self[key] = asyncio.get_running_loop().create_future()
        return self[key]

WAITING = Futures()

async def function(x=None):
    return await act(x, 0)

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
    if x == "exit": sys.exit(3)
    if x == "cancelled": raise asyncio.CancelledError
    if x == "setting": raise ConfigError("refused")
    if x == "files": raise EnvError("no file")
    if x == "nowhere": raise SandboxUnavailable("no bwrap")
    if x == "infra": EVENTS.append(("try",)); raise InfrastructureError("down")
    if x == "flaky":
        EVENTS.append(("try",))
        if sum(e == ("try",) for e in EVENTS) < 3: raise ConnectionResetError("reset")
        return "up again"
    if x == "hang": await asyncio.sleep(60)
    if x == "big": return "word " * 40_000_000
    if x == "surrogate": return "half \\ud800 pair"
    if x == "object": return object()
    if x == "rows": return {"rows": [["cell"] * 1000] * 40_000, "more": "x" * 200_000_000}
    if x == "nested": return {"a": [1, None, True, 0.5], "b": {"c": 'q"'}, "d": ()}
    if x == "paid": return ToolReply(content="seen", cut_chars=9_000)
    if isinstance(x, str) and x.startswith("at "):
        EVENTS.append(("begin", x)); await asyncio.sleep(0); await asyncio.sleep(0)
        EVENTS.append(("end", x))
    if isinstance(x, str) and x.startswith("wait"):
        EVENTS.append(("begin", x))
        await WAITING[x]
    return x

class Sync:
    def open(self, context): EVENTS.append(("open",))
    def call(self, x=None):
        if x == "hang": RELEASE.wait(60)
        if x == "exit": sys.exit(3)
        if x == "cancelled": raise asyncio.CancelledError
        return threading.current_thread().name
    def close(self): EVENTS.append(("close",))

class SlowOpen(Sync):
    async def open(self, context):
        EVENTS.append(("open",))
        self.held = None
        await WAITING["open"]
        self.held = "a sandbox"
    async def call(self, x=None): return self.held
    async def close(self): EVENTS.append(("close", self.held))

class SlowClose(Sync):
    async def close(self):
        EVENTS.append(("closing",))
        await WAITING["close"]
        EVENTS.append(("closed",))

class Exits(Sync):
    def __init__(self):
        if EVENTS: sys.exit(3)

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
        self,
        folder: Path,
        target: str = "Async",
        limits: str = "{}",
        idempotent: bool = False,
        close_timeout_s: float = 30.0,
        breaker: BreakerConfig | None = None,
    ) -> None:
        (folder / "impl.py").write_text(IMPL)
        yaml = YAML.format(target=target, limits=limits, idempotent=str(idempotent).lower())
        yaml = yaml.replace("{x: {}}", "{x: {anyOf: [{type: string}, {type: number}, "
                            "{type: array, items: {type: number}}]}}")  # fmt: skip
        (folder / "t.yaml").write_text(yaml)
        self.toolbox = Toolbox([str(folder / "t.yaml")], breaker=breaker)
        self._close_timeout_s = close_timeout_s
        made: Any = self.toolbox.bindings["t"].make()
        self.module = inspect.getmodule(made.call if target == "function" else type(made))
        assert self.module is not None
        self.events: list[Any] = self.module.EVENTS
        self.num_contexts = 0

    def executor(self) -> ToolExecutor:
        return ToolExecutor(
            self.toolbox,
            make_context=self._context,
            cut=CODEC.cut,
            close_timeout_s=self._close_timeout_s,
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

    def run_turn(self, *xs: Any) -> list[ToolResult]:
        async def main() -> list[ToolResult]:
            executor = self.executor()
            results: list[ToolResult] = []
            try:
                await executor.run_turn([call(x) for x in xs], results)
            finally:
                await executor.close()
            return results

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
    bench = Bench(tmp_path, target, close_timeout_s=0.2)
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


# ----------------------------------------------------------------------------- turns


def test_calls_of_one_turn_overlap_where_the_tool_is_a_function(tmp_path: Path):
    bench = Bench(tmp_path, "function")
    results = bench.run_turn("at 1", "at 2", "at 3")
    assert [r.content for r in results] == ["at 1", "at 2", "at 3"]
    assert [e[0] for e in bench.events] == ["begin"] * 3 + ["end"] * 3


def test_calls_of_one_turn_run_in_order_where_the_tool_keeps_state(tmp_path: Path):
    bench = Bench(tmp_path)
    results = bench.run_turn("at 1", "at 2", "count")
    assert [r.content for r in results] == ["at 1", "at 2", "3"]
    kept = [e for e in bench.events if e[0] in ("begin", "end")]
    assert kept == [("begin", "at 1"), ("end", "at 1"), ("begin", "at 2"), ("end", "at 2")]
    assert [e[0] for e in bench.events].count("open") == 1


def test_answers_keep_the_order_of_the_calls_whichever_ends_first(tmp_path: Path):
    bench = Bench(tmp_path, "function")

    async def main() -> list[ToolResult]:
        executor = bench.executor()
        results: list[ToolResult] = []
        turn = asyncio.create_task(
            executor.run_turn([call("wait 1"), call("wait 2"), call("mistake")], results)
        )
        while len(bench.events) < 2:
            await asyncio.sleep(0)
        assert bench.module is not None
        for name in ("wait 2", "wait 1"):
            bench.module.WAITING[name].set_result(None)
            await asyncio.sleep(0)
        await turn
        await executor.close()
        return results

    results = asyncio.run(asyncio.wait_for(main(), 30))
    assert [r.content for r in results] == ["wait 1", "wait 2", "error: no"]


def test_the_limit_of_calls_counts_in_the_order_of_the_turn(tmp_path: Path):
    bench = Bench(tmp_path, "function", limits="{max_calls: 2}")
    statuses = [r.status for r in bench.run_turn("at 1", "at 2", "at 3")]
    assert statuses == [ToolStatus.OK, ToolStatus.OK, ToolStatus.ERROR]


def test_an_infrastructure_failure_ends_the_turn_and_the_calls_beside_it(tmp_path: Path):
    bench = Bench(tmp_path, "function")
    results = bench.run_turn("at 1", "infra", "hang")  # in less than the 30 s of the third
    assert [r.status for r in results] == [ToolStatus.OK, ToolStatus.INFRA_ERROR]


def test_a_turn_that_is_cancelled_keeps_the_answers_that_were_there(tmp_path: Path):
    bench = Bench(tmp_path, "function")

    async def main() -> list[ToolResult]:
        executor = bench.executor()
        results: list[ToolResult] = []
        turn = asyncio.create_task(
            executor.run_turn([call("at 1"), call("wait"), call("at 3")], results)
        )
        while ("end", "at 3") not in bench.events:
            await asyncio.sleep(0)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        await executor.close()
        return results

    results = asyncio.run(asyncio.wait_for(main(), 30))
    assert [r.content for r in results] == ["at 1"]


# ----------------------------------------------------------------------------- our failures


def test_retries_are_told(tmp_path: Path):
    (result,) = Bench(tmp_path, limits="{retries: 3}", idempotent=True).run("flaky")
    assert (result.status, result.retries) == (ToolStatus.OK, 2)


def test_after_failures_in_a_row_calls_fail_at_once_in_every_trajectory(tmp_path: Path):
    bench = Bench(tmp_path, "function", breaker=BreakerConfig(max_failures=3, cooldown_s=60.0))
    for _ in range(3):
        (result,) = bench.run("infra")
        assert not result.breaker_open
    (result,) = bench.run("fine")
    assert result.status is ToolStatus.INFRA_ERROR and result.breaker_open
    assert "InfrastructureError: down" in result.content
    assert bench.events.count(("try",)) == 3


def test_mistakes_and_late_calls_do_not_open_the_breaker(tmp_path: Path):
    bench = Bench(tmp_path, "function", "{timeout_s: 0.05}", breaker=BreakerConfig(max_failures=1))
    for x in ("mistake", "crash", "hang"):
        bench.run(x)
    (result,) = bench.run("fine")
    assert result.status is ToolStatus.OK


def test_a_tool_that_cannot_be_opened_opens_the_breaker(tmp_path: Path):
    bench = Bench(tmp_path, "BadOpen", breaker=BreakerConfig(max_failures=2, cooldown_s=60.0))
    bench.run(1)
    bench.run(1)
    (result,) = bench.run(1)
    assert result.breaker_open


def test_episodes_that_wait_until_it_has_cooled_may_try(tmp_path: Path):
    bench = Bench(tmp_path, "function", breaker=BreakerConfig(max_failures=1, cooldown_s=0.2))
    bench.run("infra")
    (refused,) = bench.run("fine")
    asyncio.run(bench.toolbox.cooled())
    (tried,) = bench.run("fine")
    assert (refused.breaker_open, tried.breaker_open) == (True, False)
    assert tried.status is ToolStatus.OK
    asyncio.run(asyncio.wait_for(bench.toolbox.cooled(), 10))


def test_a_tool_that_stays_down_stops_the_run(tmp_path: Path):
    config = BreakerConfig(max_failures=1, cooldown_s=1e-9, give_up_s=1e-9)
    bench = Bench(tmp_path, "function", breaker=config)
    bench.run("infra")
    with pytest.raises(ToolUnavailable, match="tool 't' has not answered"):
        bench.run("infra")


# ----------------------------------------------------------------------------- long answers


def test_values_of_any_size_are_written_out_no_further_than_they_are_shown(tmp_path: Path):
    bench = Bench(tmp_path, limits="{max_output_tokens: 20}")
    (result,) = bench.run("rows")
    body, _, note = result.content.rpartition("\n")
    assert body.startswith('{"rows": [["cell", "cell"')
    assert len(CODEC.encode_plain(body)) <= 20
    assert note == f"[cut: {result.truncated_tokens} more tokens]"


def test_json_values_are_written_as_json(tmp_path: Path):
    (result,) = Bench(tmp_path).run("nested")
    assert json.loads(result.content) == {
        "a": [1, None, True, 0.5], "b": {"c": 'q"'}, "d": [],
    }  # fmt: skip


def test_what_a_tool_has_cut_already_is_noted(tmp_path: Path):
    (result,) = Bench(tmp_path).run("paid")
    assert result.content == f"seen\n[cut: {result.truncated_tokens} more tokens]"
    assert result.truncated_tokens > 0


def test_tools_that_are_closed_stay_closed(tmp_path: Path):
    bench = Bench(tmp_path)

    async def main() -> tuple[str | None, ToolResult]:
        executor = bench.executor()
        await executor.close()
        return await executor.open("t"), await executor.run(call(1))

    told, result = asyncio.run(main())
    assert told == "InfrastructureError: the tools are closed"
    assert (result.status, bench.events) == (ToolStatus.ERROR, [])


# ----------------------------------------------------------------------------- odd endings


@pytest.mark.parametrize("target", ["Async", "Sync", "function"])
@pytest.mark.parametrize(("x", "told"), [("exit", "SystemExit"), ("cancelled", "CancelledError")])
def test_a_tool_ends_neither_the_process_nor_its_episode(
    tmp_path: Path, target: str, x: str, told: str
):
    for result in (Bench(tmp_path, target).run(x)[0], Bench(tmp_path, target).run_turn(x)[0]):
        assert result.status is ToolStatus.ERROR and f"raised {told}" in result.content


def test_a_constructor_that_ends_the_process_is_a_tool_that_cannot_be_opened(tmp_path: Path):
    bench = Bench(tmp_path, "Exits")
    bench.events.append("bound")  # from here on it exits
    (result,) = bench.run(1)
    assert result.status is ToolStatus.INFRA_ERROR and "raised SystemExit" in result.content


@pytest.mark.parametrize(("x", "kind"), [("setting", ConfigError), ("files", EnvError)])
def test_an_error_of_ours_is_never_charged_to_the_model(tmp_path: Path, x: str, kind: type):
    bench = Bench(tmp_path, limits="{retries: 3}", idempotent=True)

    async def main() -> tuple[ToolResult, BaseException | None]:
        executor = bench.executor()
        result = await executor.run(call(x))
        await executor.close()
        return result, executor.failure

    result, failure = asyncio.run(main())
    assert (result.status, result.retries) == (ToolStatus.INFRA_ERROR, 0)
    assert isinstance(failure, kind)


def test_a_call_that_finds_no_sandbox_can_work_stops_the_run(tmp_path: Path):
    with pytest.raises(SandboxUnavailable, match="no bwrap"):
        Bench(tmp_path).run("nowhere")


def test_a_closing_that_is_cancelled_goes_on_and_is_waited_for(tmp_path: Path):
    bench = Bench(tmp_path, "SlowClose")

    async def main() -> list[Any]:
        executor = bench.executor()
        await executor.run(call(1))
        first = asyncio.ensure_future(executor.close())
        while ("closing",) not in bench.events:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.ensure_future(executor.close())
        await asyncio.sleep(0)
        early = list(bench.events)
        bench.module.WAITING["close"].set_result(None)  # type: ignore[union-attr]
        await second
        return early

    early = asyncio.run(asyncio.wait_for(main(), 30))
    assert early == [("open",), ("closing",)]
    assert bench.events == [("open",), ("closing",), ("closed",)]


def test_an_opening_that_is_cancelled_is_closed_and_the_next_call_opens_anew(tmp_path: Path):
    bench = Bench(tmp_path, "SlowOpen")

    async def main() -> ToolResult:
        executor = bench.executor()
        first = asyncio.ensure_future(executor.run(call(1)))
        while not bench.events:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        del bench.module.WAITING["open"]  # type: ignore[union-attr]
        bench.module.WAITING["open"].set_result(None)  # type: ignore[union-attr]
        result = await executor.run(call(1))
        await executor.close()
        return result

    result = asyncio.run(asyncio.wait_for(main(), 30))
    assert (result.status, result.content) == (ToolStatus.OK, "a sandbox")
    assert sorted(bench.events, key=str) == [
        ("close", "a sandbox"), ("close", None), ("open",), ("open",)
    ]  # fmt: skip


def test_a_tool_that_is_opening_as_all_are_closed_is_closed_once_it_is_open(tmp_path: Path):
    bench = Bench(tmp_path, "SlowOpen")

    async def main() -> str | None:
        executor = bench.executor()
        opening = asyncio.ensure_future(executor.open("t"))
        while not bench.events:
            await asyncio.sleep(0)
        await executor.close()
        bench.module.WAITING["open"].set_result(None)  # type: ignore[union-attr]
        return await opening

    told = asyncio.run(asyncio.wait_for(main(), 30))
    assert told == "InfrastructureError: the tools are closed"
    assert bench.events == [("open",), ("close", "a sandbox")]
