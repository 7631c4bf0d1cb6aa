"""A tool server that fails in every way, under real rollouts with a scripted engine.

What must hold: no trajectory waits past its deadline, failures of the server leave the baseline and
are counted, and rollouts go on when it is back.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tool_servers import ToolServerProcess

from agentrl import Episode, Score, register_env
from agentrl.agent.renderer import Renderer
from agentrl.env.config import EnvConfig
from agentrl.env.entries import environments
from agentrl.errors import ToolUnavailable
from agentrl.rollout.config import FailureConfig, FailurePolicy, RolloutConfig
from agentrl.rollout.groups import GroupPlan, GroupRunner, is_trainable
from agentrl.rollout.stage import open_stage
from agentrl.rollout.tasks import Dispatch
from agentrl.telemetry.metrics import rollout_metrics
from agentrl.testing import EchoEnv, FakeSandboxes, ScriptedEngine, call_text, make_tokenizer
from agentrl.tool.binding import Toolbox
from agentrl.tool.breaker import BreakerConfig
from agentrl.types import StopReason, Task, Trajectory, TrajectoryGroup

pytestmark = pytest.mark.timeout(120)
RENDERER = Renderer(make_tokenizer())
TRAJECTORY_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 0.5
SPEC = """
name: wait
description: Wait.
parameters: {{type: object, properties: {{seconds: {{type: number}}}}}}
server: {{url: {url}, tool: {tool}}}
idempotent: true
limits: {{timeout_s: {timeout_s}, retries: {retries}}}
"""


class Says:
    def score(self, episode: Episode) -> Score:
        said = [m["content"] for m in episode.messages if m["role"] == "assistant"]
        return Score(reward=0.0, success=said[-1] == "yes")  # the environment pays


@register_env("chaos_echo")
class ChaosEcho(EchoEnv):
    rubric = Says()


class Rollouts:
    """Groups of episodes that call ``wait`` once and then say yes.

    Args:
        folder: for the spec.
        url: of the tool server.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        *,
        tool: str = "wait",
        seconds: float = 0.0,
        timeout_s: float = CALL_TIMEOUT_S,
        retries: int = 0,
        policy: FailurePolicy = FailurePolicy.min_group,
        breaker: BreakerConfig | None = None,
    ) -> None:
        spec = folder / "wait.yaml"
        text = SPEC.format(url=url, tool=tool, timeout_s=timeout_s, retries=retries)
        spec.write_text(text)
        self.toolbox = Toolbox([str(spec)], breaker=breaker)
        self.failure = FailureConfig(policy=policy, k=1)
        self._script = [call_text("wait", seconds=seconds), "yes"]

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Callable[[int], Coroutine[Any, Any, TrajectoryGroup]]]:
        """Give a function that samples the group of an index."""
        engine: Any = ScriptedEngine(RENDERER, self._script)
        async with open_stage(
            entry=environments(EnvConfig(id="chaos_echo", kwargs={"num_turns": 2}))[0],
            toolbox=self.toolbox,
            rollout=RolloutConfig(
                max_response_tokens=200, trajectory_timeout_s=TRAJECTORY_TIMEOUT_S
            ),
            renderer=RENDERER,
            engine=engine,
            sandboxes=FakeSandboxes(),
            tool_parser="hermes",
        ) as stage:
            runner = GroupRunner(
                stage.play,
                GroupPlan(purpose="train", num_samples=4, temperature=1.0),
                env_id="chaos_echo",
                failure=self.failure,
                seed=0,
                concurrency=asyncio.Semaphore(16),
                policy_version=lambda: 0,
            )

            async def sample(index: int) -> TrajectoryGroup:
                task = Task(id=f"t{index}", data={"word": "yes"})
                return await runner.run(Dispatch(index=index, epoch=0, task=task, env="chaos_echo"))

            yield sample

    def sample(self, *indices: int) -> list[TrajectoryGroup]:
        """Sample groups one after the other."""

        async def main() -> list[TrajectoryGroup]:
            async with self.opened() as sample:
                return [await sample(index) for index in indices]

        return asyncio.run(asyncio.wait_for(main(), 100))


def all_of(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def assert_ours(trajectories: Sequence[Trajectory]) -> None:
    """Each failed by the tool server's fault: without a reward, and before its own deadline."""
    for trajectory in trajectories:
        assert trajectory.stop_reason is StopReason.TOOL_INFRA_ERROR, trajectory.error
        assert trajectory.failed and trajectory.score is None


# ----------------------------------------------------------------------------- hostile servers

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answer(status: str, body: bytes, length: int | None = None) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
    return (
        f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body
    )


async def fails_with_500(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer("500 -", b'{"detail": "boom"}'))


async def fails_with_503(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer("503 -", b"no capacity"))


async def sends_garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(bytes(range(256)) * 40)


async def sends_another_type(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer("200 OK", b'{"status": "ok", "content": {"not": "text"}}'))


async def sends_no_json(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer("200 OK", b"<html>hello</html>"))


async def sends_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer("200 OK", b"", length=1000))
    for _ in range(1000):
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


async def never_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        await writer.drain()


async def never_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def closes_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer("200 OK", b'{"status": "o', length=500))
    await writer.drain()
    writer.write_eof()
    await asyncio.sleep(60)


async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def hostile(
    handler: Handler, affinities: dict[str, list[str]] | None = None
) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve sessions as a tool server does, and calls as ``handler`` does.

    Args:
        affinities: gets the paths that were asked for by the header that tells where to.
    """
    asked: list[str] = []
    affinities = {} if affinities is None else affinities

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while first := (await reader.readline()).decode():
                length, affinity = 0, ""
                while line := (await reader.readline()).decode().strip().lower():
                    if line.startswith("content-length:"):
                        length = int(line.partition(":")[2])
                    if line.startswith("agentrl-affinity:"):
                        affinity = line.partition(":")[2].strip()
                await reader.readexactly(length)
                method, path = first.split()[:2]
                asked.append(f"{method} {path}")
                affinities.setdefault(affinity, []).append(path)
                if path == "/v1/sessions":
                    writer.write(answer("201 -", b'{"session": "abc"}'))
                elif path.endswith("/calls"):
                    await handler(reader, writer)
                    await writer.drain()
                    if writer.is_closing():
                        return
                else:
                    writer.write(b"HTTP/1.1 204 -\r\n\r\n")
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()


@pytest.mark.parametrize(
    "handler",
    [
        fails_with_500,
        fails_with_503,
        sends_garbage,
        sends_another_type,
        sends_no_json,
        sends_slowly,
        never_ends,
        never_answers,
        closes_half,
        resets,
    ],
)
def test_a_server_that_fails_costs_its_trajectories_and_no_deadline(
    handler: Handler, tmp_path: Path
) -> None:
    async def main() -> tuple[TrajectoryGroup, list[str]]:
        async with hostile(handler) as (url, asked):
            bench = Rollouts(tmp_path, url)
            async with bench.opened() as sample:
                return await sample(0), asked

    group, asked = asyncio.run(asyncio.wait_for(main(), 60))
    assert sum(item.endswith("/calls") for item in asked) == 4  # it did fire
    assert_ours(group.trajectories)
    assert not is_trainable(group, FailureConfig(policy=FailurePolicy.min_group, k=1))
    metrics = rollout_metrics([group])
    assert metrics["tool/wait/infra_errors"] == 4
    assert metrics["stop_reason/tool_infra_error"] == 1.0
    assert metrics["trajectories/failed"] == 4 and "reward/mean" not in metrics


def test_a_failure_that_passes_is_called_again(tmp_path: Path) -> None:
    failures = 4

    async def recovers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal failures
        failures -= 1
        good = b'{"status": "ok", "content": "fine", "reward": 0.0, "cut_chars": 0}'
        writer.write(answer("200 OK", good) if failures < 0 else answer("502 -", b"{}"))

    async def main() -> TrajectoryGroup:
        async with (
            hostile(recovers) as (url, _),
            Rollouts(tmp_path, url, retries=3).opened() as sample,
        ):
            return await sample(0)

    group = asyncio.run(asyncio.wait_for(main(), 60))
    assert [t.stop_reason for t in group.trajectories] == [StopReason.TERMINATED] * 4
    metrics = rollout_metrics([group])
    assert metrics["tool/wait/retries"] == 4
    assert metrics["tool/wait/infra_errors"] == 0
    assert metrics["reward/mean"] == 1.0


def test_all_requests_of_a_session_can_be_sent_to_one_process(tmp_path: Path) -> None:
    affinities: dict[str, list[str]] = {}

    async def main() -> None:
        async with (
            hostile(fails_with_500, affinities) as (url, _),
            Rollouts(tmp_path, url).opened() as sample,
        ):
            await sample(0)

    asyncio.run(asyncio.wait_for(main(), 60))
    about_tools = affinities.pop("", [])  # the list of tools belongs to no session
    assert about_tools == ["/v1/tools"] * len(about_tools)
    assert len(affinities) == 4
    for paths in affinities.values():
        assert paths[0] == "/v1/sessions" and paths[-1] == "/v1/sessions/abc"
        assert "/v1/sessions/abc/calls" in paths


def test_a_port_where_nobody_listens(tmp_path: Path) -> None:
    async def main() -> TrajectoryGroup:
        async with hostile(never_answers) as (url, _):
            pass
        async with Rollouts(tmp_path, url).opened() as sample:
            return await sample(0)

    assert_ours(asyncio.run(asyncio.wait_for(main(), 60)).trajectories)


# ----------------------------------------------------------------------------- a real server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ToolServerProcess]:
    folder = tmp_path / "server"
    folder.mkdir()
    started = ToolServerProcess(folder)
    started.start()
    yield started
    started.kill()


def test_a_server_killed_in_the_middle_of_calls_and_started_again(
    server: ToolServerProcess, tmp_path: Path
) -> None:
    """Killed: its trajectories fail at once and the breaker opens. Back: rollouts go on."""
    config = BreakerConfig(max_failures=4, cooldown_s=1.0, give_up_s=300.0)
    bench = Rollouts(tmp_path, server.url, seconds=3.0, timeout_s=30.0, breaker=config)
    breaker = bench.toolbox.bindings["wait"].breaker

    async def main() -> tuple[TrajectoryGroup, TrajectoryGroup, TrajectoryGroup]:
        async with bench.opened() as sample:
            in_flight = asyncio.create_task(sample(0))
            await asyncio.sleep(1.0)
            assert not in_flight.done()
            server.kill()
            lost = await in_flight
            refused = await sample(1)
            await asyncio.to_thread(server.start)
            back = lost
            for index in range(2, 22):
                back = await sample(index)
                if not any(t.failed for t in back.trajectories):
                    break
            return lost, refused, back

    lost, refused, back = asyncio.run(asyncio.wait_for(main(), 100))
    assert_ours([*lost.trajectories, *refused.trajectories])
    assert breaker.num_opened == 1
    metrics = rollout_metrics([lost, refused])
    assert metrics["tool/wait/infra_errors"] == 8
    assert metrics["tool/wait/breaker_open"] >= 3  # all but the one that tried
    assert [t.stop_reason for t in back.trajectories] == [StopReason.TERMINATED] * 4
    assert rollout_metrics([back])["reward/mean"] == 1.0


def test_a_server_that_stays_away_stops_the_run_with_its_name(tmp_path: Path) -> None:
    config = BreakerConfig(max_failures=2, cooldown_s=0.05, give_up_s=0.2)

    async def main() -> None:
        async with hostile(fails_with_500) as (url, _):
            bench = Rollouts(tmp_path, url, breaker=config)
            async with bench.opened() as sample:
                for index in range(100):
                    await sample(index)

    with pytest.raises(BaseException) as caught:
        asyncio.run(asyncio.wait_for(main(), 60))
    error = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ToolUnavailable)
    assert "tool 'wait' has not answered" in str(error) and "answered 500: " in str(error)


def test_a_tool_that_blocks_the_servers_event_loop(
    server: ToolServerProcess, tmp_path: Path
) -> None:
    """Nobody answers, not even to say that a tool is late: our failure, in time."""
    (group,) = Rollouts(tmp_path, server.url, tool="block", seconds=5.0).sample(0)
    blocked = [t for t in group.trajectories if t.failed]
    assert blocked
    assert_ours(blocked)


def test_a_late_tool_is_the_models_and_stays_in_the_baseline(
    server: ToolServerProcess, tmp_path: Path
) -> None:
    (group,) = Rollouts(tmp_path, server.url, seconds=60.0).sample(0)
    assert [t.stop_reason for t in group.trajectories] == [StopReason.TERMINATED] * 4
    assert all(t.wall_clock_limited for t in group.trajectories)
    metrics = rollout_metrics([group])
    assert (metrics["tool/wait/timeouts"], metrics["tool/wait/infra_errors"]) == (4, 0)
