"""Demonstrations that were written down, played for real: environment, tools, rubric, renderer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from agentrl_sandboxes.local import LocalBackend

from agentrl.agent.loop import AgentLoop, EpisodeRequest, LoopLimits
from agentrl.agent.renderer import Renderer
from agentrl.env.base import Demonstration, ScriptedTurn
from agentrl.env.config import EnvConfig
from agentrl.env.host import EnvHosts
from agentrl.env.registry import make_env
from agentrl.sandbox.base import SandboxProvider
from agentrl.sandbox.pool import SandboxPool
from agentrl.testing import FakeSandboxes, make_tokenizer
from agentrl.tool.binding import Toolbox
from agentrl.types import GenerateRequest, Generation, Message, StopReason, ToolCall, Trajectory

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "custom_env" / "env.py"


class Replayed:
    """Says the assistant turns of a written demonstration."""

    def __init__(self, demonstration: Demonstration) -> None:
        messages = demonstration.messages or ()
        self._turns = iter([m for m in messages if m["role"] == "assistant"])

    def __call__(self, messages: Sequence[Message]) -> ScriptedTurn:
        message = next(self._turns)
        functions = [call["function"] for call in message.get("tool_calls", [])]
        calls = [ToolCall(name=f["name"], arguments=dict(f["arguments"])) for f in functions]
        return ScriptedTurn(content=message["content"], tool_calls=calls)


async def no_engine(request: GenerateRequest) -> Generation:
    raise AssertionError("a scripted episode needs no engine")


async def play(env_id: str, demos: list[Demonstration], *, sandboxed: bool) -> list[Trajectory]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(120))
        sandboxes: SandboxProvider = FakeSandboxes(fails=True)
        if sandboxed:
            sandboxes = await stack.enter_async_context(SandboxPool(LocalBackend()))
        hosts = EnvHosts(EnvConfig(id=env_id))
        stack.push_async_callback(hosts.close)
        loop = AgentLoop(
            generate=no_engine,
            renderer=Renderer(make_tokenizer()),
            toolbox=Toolbox(make_env(env_id).tools),
            sandboxes=sandboxes,
            limits=LoopLimits(max_turns=8),
            strict=True,
        )
        return [
            await loop.run(
                await hosts.open(),
                EpisodeRequest(env_id=env_id, task=demo.task, seed=index, group_id=str(index)),
                policy=Replayed(demo),
            )
            for index, demo in enumerate(demos)
        ]


@pytest.mark.parametrize(
    ("env_id", "sandboxed"),
    [
        ("guess_number", False),
        ("calculator", False),
        ("qa", False),
        ("code_sandbox", True),
        (f"{EXAMPLE}:HideAndSeek", False),
        (f"{EXAMPLES}/graded_files/env.py:WriteProgram", True),
        (f"{EXAMPLES}/tools/env.py:FillTheGap", True),
    ],
)
def test_a_written_demonstration_is_what_really_happens(env_id: str, sandboxed: bool) -> None:
    demos = list(itertools.islice(make_env(env_id).demonstrations("val", 1), 24))  # type: ignore[union-attr]
    trajectories = asyncio.run(play(env_id, demos, sandboxed=sandboxed))
    outcomes = set()
    for demo, trajectory in zip(demos, trajectories, strict=True):
        assert trajectory.stop_reason is StopReason.TERMINATED, trajectory.error
        spoken = [m for m in demo.messages or () if m["role"] != "system"]
        played = [m for m in trajectory.messages if m["role"] != "system"]
        assert [(m["role"], m["content"]) for m in played[: len(spoken)]] == [
            (m["role"], m["content"]) for m in spoken
        ]
        assert trajectory.score is not None
        outcomes.add(trajectory.score.success)
        if "success" in demo.metadata:
            assert trajectory.score.success == demo.metadata["success"]
    assert outcomes == {True, False}
