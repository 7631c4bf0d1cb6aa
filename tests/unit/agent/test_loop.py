"""The agent loop on scripted engines: what is recorded, and every way to end."""

from __future__ import annotations

import asyncio

from agentrl.agent.loop import AgentLoop, EpisodeRequest, LoopLimits
from agentrl.agent.renderer import Renderer
from agentrl.env.config import EnvConfig
from agentrl.env.host import EnvHosts
from agentrl.testing import EchoEnv, FakeSandboxes, ScriptedEngine, call_text, make_tokenizer
from agentrl.tool.binding import Toolbox
from agentrl.types import StopReason, Task, Trajectory

RENDERER = Renderer(make_tokenizer())
TASK = Task(id="t", data={"word": "yes"})


def play(script, *, env=EchoEnv, kwargs=None, tools=(), limits=None, seed=1) -> Trajectory:
    async def main() -> Trajectory:
        engine = ScriptedEngine(RENDERER, script)
        loop = AgentLoop(
            generate=engine.generate,
            renderer=RENDERER,
            toolbox=Toolbox(tools),
            sandboxes=FakeSandboxes(),
            limits=limits or LoopLimits(),
            end_session=engine.end_session,
            strict=True,
        )
        hosts = EnvHosts(EnvConfig(id="echo", kwargs=kwargs or {}), cls=env)
        try:
            hosted = await hosts.open()
            return await loop.run(hosted, EpisodeRequest(env_id="echo", task=TASK, seed=seed))
        finally:
            await hosts.close()

    return asyncio.run(main())


def test_a_tool_call_is_answered_and_the_next_turn_sees_it():
    script = [call_text("calculator", expression="6 * 7"), "yes"]
    kwargs = {"num_turns": 2, "tools": ["calculator"]}
    trajectory = play(script, kwargs=kwargs, tools=["calculator"])
    assert trajectory.stop_reason is StopReason.TERMINATED
    assert trajectory.turns[0].tool_results[0].content == "42"
    assert trajectory.total_reward == 1.0
    assert trajectory.drift == 0
    segment = trajectory.segments[0]
    text = RENDERER.decode(segment.ids.tolist())
    assert "<|im_start|>tool\n42<|im_end|>" in text
    assert RENDERER.decode(segment.ids[segment.loss_mask].tolist()) == "".join(
        f"{said}<|im_end|>" for said in script
    )
