"""CPU time the agent loop adds to a turn, and whether it grows with the conversation.

Arms, in one process on one core:

* ``loop``: AgentLoop with a fake engine, a no-op tool and an environment that answers every turn.
* ``loop-threads``: the same with a synchronous environment and tool, which run on other threads.
* ``re-render``: what a loop pays that renders and tokenizes the whole history before every turn.
* ``floor``: the fake engine alone, awaited as the loop awaits it.

Run: ``python benchmarks/agent_loop.py [--turns 128] [--episodes 8] [--json]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl.agent.loop import AgentLoop, EpisodeRequest, LoopLimits
from agentrl.agent.renderer import Renderer
from agentrl.env.base import Env
from agentrl.env.config import EnvConfig
from agentrl.env.host import EnvHosts
from agentrl.testing import FakeSandboxes, call_text, make_tokenizer
from agentrl.tool.binding import Toolbox
from agentrl.types import Action, GenerateRequest, Generation, SamplingParams, StopReason, Task

BUCKETS = ((0, 16), (16, 32), (32, 64), (64, 96), (96, 128))

SPEC = """
name: noop
description: Does nothing.
parameters: {type: object, properties: {x: {type: string}}, required: [x]}
python: ./impl.py:noop
limits: {max_calls: 1000000}
"""
IMPL = "async def noop(x):\n    return 'done'\ndef noop_sync(x):\n    return 'done'\n"


class AnsweringEnv:
    """An asynchronous environment that never ends by itself."""

    tools = ("noop",)
    rubric = None

    def tasks(self, split: str) -> list[Task]:
        return []

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict]:
        return "Call noop until I say stop.", {}

    async def step(self, action: Action) -> tuple[str, float, bool, bool, dict]:
        return "Go on.", 0.0, False, False, {}

    async def tool_state(self, tool: str) -> dict[str, Any]:
        return {}

    async def anchor(self) -> None:
        return None

    async def close(self) -> None:
        return None


class SyncAnsweringEnv(Env):
    """The same, synchronous: hosted on a thread."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict]:
        return "Call noop until I say stop.", {}

    def step(self, action: Action) -> tuple[str, float, bool, bool, dict]:
        return "Go on.", 0.0, False, False, {}


class CannedEngine:
    """Returns one turn, always the same; notes the CPU clock at every call."""

    def __init__(self, renderer: Renderer) -> None:
        text = call_text("noop", x="hello")
        self._ids = [*renderer.codec.encode_assistant(text), renderer.stop_token_ids[0]]
        self.clock: list[float] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        self.clock.append(time.process_time())
        num = len(self._ids)
        return Generation(
            ids=list(self._ids),
            logprobs=[-0.1] * num,
            policy_version=[0] * num,
            stop_reason=StopReason.STOP,
        )


def limits(num_turns: int) -> LoopLimits:
    big = 10_000_000
    return LoopLimits(
        max_turns=num_turns,
        max_turn_tokens=512,
        max_response_tokens=big,
        max_context_tokens=big,
        trajectory_timeout_s=600.0,
    )


async def loop_arm(
    renderer: Renderer, spec: Path, num_turns: int, episodes: int, env: type = AnsweringEnv
) -> list[list[float]]:
    """Return per episode the CPU seconds of every turn, all threads together."""
    hosts = EnvHosts(EnvConfig(id="answering"), cls=env)
    rows: list[list[float]] = []
    for episode in range(episodes + 1):
        engine = CannedEngine(renderer)
        loop = AgentLoop(
            generate=engine.generate,
            renderer=renderer,
            toolbox=Toolbox([str(spec)]),
            sandboxes=FakeSandboxes(),
            limits=limits(num_turns + 1),
        )
        request = EpisodeRequest(
            env_id="answering", task=Task(id="t", data={}), seed=episode, group_id=str(episode)
        )
        trajectory = await loop.run(await hosts.open(), request)
        assert len(trajectory.turns) == num_turns + 1 and trajectory.drift == 0
        rows.append([b - a for a, b in zip(engine.clock, engine.clock[1:], strict=False)])
    await hosts.close()
    return rows[1:]  # the first one fills caches


def rerender_arm(renderer: Renderer, tokenizer: Any, tools: list, num_turns: int) -> list[float]:
    text = call_text("noop", x="hello")
    messages: list[dict] = [{"role": "user", "content": "Call noop until I say stop."}]
    seconds: list[float] = []
    for _ in range(num_turns):
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "tool", "content": "done", "name": "noop"})
        messages.append({"role": "user", "content": "Go on."})
        start = time.process_time()
        tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False
        )
        seconds.append(time.process_time() - start)
    return seconds


async def floor_arm(renderer: Renderer, num_turns: int) -> list[float]:
    engine = CannedEngine(renderer)
    request = GenerateRequest(
        prompt_ids=[0], sampling=SamplingParams(max_tokens=512), session_id="s"
    )
    for _ in range(num_turns + 1):
        await engine.generate(request)
    return [b - a for a, b in zip(engine.clock, engine.clock[1:], strict=False)]


def by_bucket(rows: list[list[float]]) -> dict[str, float]:
    """Median over turns and episodes, in milliseconds."""
    table: dict[str, float] = {}
    for low, high in BUCKETS:
        values = [value for row in rows for value in row[low:high]]
        if values:
            table[f"{low + 1}-{high}"] = round(1e3 * statistics.median(values), 4)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time the agent loop adds to a turn")
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    renderer = Renderer(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "noop.yaml")
        spec.write_text(SPEC)
        Path(folder, "impl.py").write_text(IMPL)
        sync_spec = Path(folder, "noop_sync.yaml")
        sync_spec.write_text(SPEC.replace("impl.py:noop", "impl.py:noop_sync"))
        size = (arguments.turns, arguments.episodes)
        rows = asyncio.run(loop_arm(renderer, spec, *size))
        sync_rows = asyncio.run(loop_arm(renderer, sync_spec, *size, env=SyncAnsweringEnv))
        schemas = Toolbox([str(spec)]).schemas
    table = {
        "loop": by_bucket(rows),
        "loop-threads": by_bucket(sync_rows),
        "re-render": by_bucket([rerender_arm(renderer, tokenizer, schemas, arguments.turns)]),
        "floor": by_bucket([asyncio.run(floor_arm(renderer, arguments.turns))]),
    }
    if arguments.json:
        print(json.dumps({"unit": "ms CPU per turn, median", "arms": table}))
        return
    print("CPU ms per turn (median), by turn of the conversation")
    names = list(table["loop"])
    print(f"{'arm':<14}" + "".join(f"{name:>10}" for name in names))
    for arm, values in table.items():
        print(f"{arm:<14}" + "".join(f"{values[name]:>10.4f}" for name in names))


if __name__ == "__main__":
    main()
