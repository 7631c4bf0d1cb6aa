"""The workspace of an episode: one for all tools, ended after them, however the episode ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent.loop import AgentLoop, EpisodeRequest, LoopLimits
from agentrl.agent.renderer import Renderer
from agentrl.env.config import EnvConfig
from agentrl.env.host import EnvHosts
from agentrl.errors import SandboxError
from agentrl.sandbox.base import ExecResult, SandboxLimits, SandboxStatus
from agentrl.testing import EchoEnv, FakeSandboxes, ScriptedEngine, call_text, make_tokenizer
from agentrl.testing.sandboxes import FakeSandbox
from agentrl.tool.binding import Toolbox
from agentrl.types import StopReason, Task, Trajectory

RENDERER = Renderer(make_tokenizer())
SPEC = """
name: {name}
description: Works in the workspace.
parameters: {{type: object, properties: {{wait: {{type: boolean}}}}}}
python: ./impl.py:Works
kwargs: {{memory_mb: {memory_mb}}}
"""
IMPL = """
import asyncio
from agentrl.sandbox.base import SandboxLimits

BOXES_AT_CLOSE = []

class Works:
    def __init__(self, *, memory_mb):
        self.workspace_limits = SandboxLimits(memory_mb=memory_mb)
        self.box = None

    async def open(self, context):
        self.box = await context.workspace()

    async def call(self, wait=False):
        if wait:
            await self.box.run_code("waiting")
            await asyncio.sleep(60)
        return str(id(self.box))

    async def close(self):
        if self.box is not None:
            await self.box.run_code("closing")  # raises where the box is closed already
"""


@pytest.fixture
def tools(tmp_path: Path) -> list[str]:
    (tmp_path / "impl.py").write_text(IMPL)
    for name, memory_mb in (("small", 64), ("large", 512)):
        (tmp_path / f"{name}.yaml").write_text(SPEC.format(name=name, memory_mb=memory_mb))
    return [str(tmp_path / f"{name}.yaml") for name in ("small", "large")]


async def play(
    tools: list[str],
    script: list[str],
    sandboxes: FakeSandboxes,
    *,
    env: type[EchoEnv] = EchoEnv,
    cancel_when_waiting: bool = False,
) -> Trajectory | None:
    loop = AgentLoop(
        generate=ScriptedEngine(RENDERER, script).generate,
        renderer=RENDERER,
        toolbox=Toolbox(tools),
        sandboxes=sandboxes,
        limits=LoopLimits(),
    )
    hosts = EnvHosts(EnvConfig(id="e", kwargs={"num_turns": 3}), cls=env)
    request = EpisodeRequest(env_id="e", task=Task(id="t", data={"word": "yes"}), seed=1)
    running = asyncio.ensure_future(loop.run(await hosts.open(), request))
    try:
        async with asyncio.timeout(30):
            if not cancel_when_waiting:
                return await running
            while not any("waiting" in box.cells for box in sandboxes.opened):
                await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.wait([running])
            assert running.cancelled()
            return None
    finally:
        await hosts.close()


def test_tools_share_one_box_with_the_largest_limits_that_ends_after_them(tools: list[str]):
    sandboxes = FakeSandboxes()
    script = [call_text("small"), call_text("large"), "yes"]
    trajectory = asyncio.run(play(tools, script, sandboxes))
    assert trajectory is not None and trajectory.stop_reason is StopReason.TERMINATED
    answers = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert len(answers) == 2 and len(set(answers)) == 1
    (box,) = sandboxes.opened
    assert box.limits == SandboxLimits(memory_mb=512)
    assert box.cells == ["closing", "closing"] and box.closed


def test_an_episode_that_is_cancelled_ends_it_after_the_tools(tools: list[str]):
    sandboxes = FakeSandboxes()
    script = [call_text("small", wait=True), "yes"]
    asyncio.run(play(tools, script, sandboxes, cancel_when_waiting=True))
    (box,) = sandboxes.opened
    assert box.cells == ["waiting", "closing"] and box.closed


def test_without_a_call_there_is_none(tools: list[str]):
    sandboxes = FakeSandboxes()
    asyncio.run(play(tools, ["yes", "yes", "yes"], sandboxes))
    assert sandboxes.opened == []


def test_a_box_that_cannot_be_had_is_no_fault_of_the_model(tools: list[str]):
    trajectory = asyncio.run(play(tools, [call_text("small")], FakeSandboxes(fails=True)))
    assert trajectory is not None and trajectory.stop_reason is StopReason.SANDBOX_ERROR


def test_files_that_are_none_are_a_fault_of_the_environment(tools: list[str]):
    class Env(EchoEnv):
        def tool_state(self, tool: str) -> Mapping[str, Any]:
            return {"files": ["a.txt"]} if tool == "workspace" else {}

    sandboxes = FakeSandboxes()
    trajectory = asyncio.run(play(tools, [call_text("small")], sandboxes, env=Env))
    assert trajectory is not None and "mapping of paths" in (trajectory.error or "")
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert [box.closed for box in sandboxes.opened] == [True]


def test_a_box_that_cannot_be_closed_keeps_nothing_else_open(tools: list[str]):
    closed: list[str] = []

    class Env(EchoEnv):
        def close(self) -> None:
            closed.append("env")

    class Unclosable(FakeSandbox):
        async def close(self) -> None:
            raise SandboxError("its server could not be told")

    class Sandboxes(FakeSandboxes):
        async def acquire(self, limits: SandboxLimits | None = None) -> FakeSandbox:
            return Unclosable(lambda code: ExecResult(status=SandboxStatus.OK), limits)

    trajectory = asyncio.run(play(tools, [call_text("small"), "yes"], Sandboxes(), env=Env))
    assert trajectory is not None and trajectory.stop_reason is StopReason.SANDBOX_ERROR
    assert closed == ["env"]
