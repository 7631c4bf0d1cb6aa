"""Tools that pay the call they answer."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent.loop import AgentLoop, EpisodeRequest, LoopLimits
from agentrl.agent.renderer import Renderer
from agentrl.env.config import EnvConfig
from agentrl.env.host import EnvHosts
from agentrl.telemetry.metrics import trajectory_metrics
from agentrl.telemetry.trajectory_io import read_trajectories, write_trajectories
from agentrl.testing import EchoEnv, FakeSandboxes, ScriptedEngine, call_text, make_tokenizer
from agentrl.tool.binding import Toolbox
from agentrl.types import StopReason, Task, ToolStatus, Trajectory

RENDERER = Renderer(make_tokenizer())
YAML = """
name: shop
description: Pays.
parameters: {type: object, properties: {what: {type: string}}, required: [what]}
python: ./impl.py:shop
idempotent: true
limits: {retries: 2}
"""
IMPL = """
import math
from agentrl import ToolError, ToolReply

CALLS = []

def shop(what):
    CALLS.append(what)
    if what == "plain": return "no reward"
    if what == "mistake": raise ToolError("sold out")
    if what == "nan": return ToolReply(content="x", reward=math.nan)
    if what == "bool": return ToolReply(content="x", reward=True)
    if what == "text": return ToolReply(content="x", reward="1.0")
    if what == "late": return ToolReply(content="out of time", cut_short=True)
    if what == "object": return ToolReply(content=object(), reward=1.0)
    return ToolReply(content={"sold": what}, reward=0.25)
"""


def play(folder: Path, *calls: str, limits: str = "retries: 2") -> Trajectory:
    (folder / "impl.py").write_text(IMPL)
    (folder / "shop.yaml").write_text(YAML.replace("retries: 2", limits))

    async def main() -> Trajectory:
        engine = ScriptedEngine(RENDERER, [call_text("shop", what=what) for what in calls])
        loop = AgentLoop(
            generate=engine.generate,
            renderer=RENDERER,
            toolbox=Toolbox([str(folder / "shop.yaml")]),
            sandboxes=FakeSandboxes(),
            limits=LoopLimits(),
        )
        hosts = EnvHosts(EnvConfig(id="e", kwargs={"num_turns": len(calls)}), cls=EchoEnv)
        request = EpisodeRequest(env_id="e", task=Task(id="t", data={}), seed=1)
        try:
            return await loop.run(await hosts.open(), request)
        finally:
            await hosts.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_what_a_tool_pays_is_recorded_with_its_answer(tmp_path: Path):
    trajectory = play(tmp_path, "apple", "plain", "mistake")
    results = [turn.tool_results[0] for turn in trajectory.turns]
    assert [result.reward for result in results] == [0.25, 0.0, 0.0]
    assert [result.content for result in results] == [
        '{"sold": "apple"}', "no reward", "error: sold out",
    ]  # fmt: skip
    assert results[2].status is ToolStatus.ERROR
    assert "0.25" not in str(trajectory.messages)  # the model does not see what it was paid


def test_an_answer_that_a_limit_cut_short_is_an_answer_that_says_so(tmp_path: Path):
    trajectory = play(tmp_path, "apple", "late")
    results = [turn.tool_results[0] for turn in trajectory.turns]
    assert [result.cut_short for result in results] == [False, True]
    assert (results[1].status, results[1].content) == (ToolStatus.OK, "out of time")


def test_a_bonus_per_call_is_bounded_by_the_limit_of_calls_and_farming_it_is_seen(tmp_path: Path):
    farmed = play(tmp_path, *["apple"] * 6, limits="max_calls: 3")
    refused = play(tmp_path, "", "mistake", "nothing", limits="max_calls: 1")
    assert farmed.total_reward == pytest.approx(3 * 0.25)
    assert refused.total_reward == pytest.approx(0.25)  # only the first was run at all
    assert {r.status for t in farmed.turns[3:] for r in t.tool_results} == {ToolStatus.ERROR}
    metrics = trajectory_metrics([farmed])
    assert metrics["tool/shop/repeated"] == 5


def test_what_a_tool_paid_is_stored_and_read_back(tmp_path: Path):
    trajectory = play(tmp_path, "apple")
    path = tmp_path / "step_000000.jsonl"
    write_trajectories(path, [trajectory])
    [back] = read_trajectories(path)
    assert back.turns[0].tool_results == trajectory.turns[0].tool_results
    assert back.turns[0].tool_results[0].reward == 0.25


@pytest.mark.parametrize("what", ["nan", "bool", "text"])
def test_a_tool_that_pays_no_finite_number_fails_the_episode_by_name(tmp_path: Path, what: str):
    trajectory = play(tmp_path, what, "apple")
    assert trajectory.stop_reason is StopReason.REWARD_ERROR
    assert trajectory.error is not None and "tool 'shop'" in trajectory.error
    assert trajectory.score is None
    assert trajectory.turns[0].tool_results[0].reward == 0.0
    toolbox: Any = Toolbox([str(tmp_path / "shop.yaml")])
    calls = toolbox.bindings["shop"].make().call.__globals__["CALLS"]
    assert calls == [what]  # asking again would pay the same


def test_content_that_a_model_cannot_be_shown_is_infrastructure(tmp_path: Path):
    assert play(tmp_path, "object").stop_reason is StopReason.TOOL_INFRA_ERROR
    assert math.isfinite(play(tmp_path, "apple").total_reward)
