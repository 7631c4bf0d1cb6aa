"""The work of ``vllm_engine.py`` as agent loops do it: what they ask for, turn by turn."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from vllm_work import Session

from agentrl.agent.loop import AgentLoop, EpisodeRequest, LoopLimits
from agentrl.agent.renderer import Renderer
from agentrl.env.config import EnvConfig
from agentrl.env.host import EnvHosts
from agentrl.testing import FakeSandboxes, make_tokenizer
from agentrl.tool.binding import Toolbox
from agentrl.types import Action, GenerateRequest, Generation, StopReason, Task


class AnsweringEnv:
    """Begins with a text and answers every turn at once."""

    tools = ()
    rubric = None
    opening = answer = ""

    def tasks(self, split: str) -> list[Task]:
        return []

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict]:
        return f"{seed} {self.opening}", {}

    async def step(self, action: Action) -> tuple[str, float, bool, bool, dict]:
        return self.answer, 0.0, False, False, {}

    async def tool_state(self, tool: str) -> dict[str, Any]:
        return {}

    async def anchor(self) -> None:
        return None

    async def close(self) -> None:
        return None


class LoopWork:
    """Agent loops over something that generates."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        # Bytes alone: no random turn spells a tool call, which the loop would answer.
        self.renderer = Renderer(make_tokenizer(vocab_size=260))
        AnsweringEnv.opening = "x " * (options.prompt_tokens // 2)
        AnsweringEnv.answer = "y " * (options.answer_tokens // 2)

    async def run(self, generate: Any) -> None:
        """Play every session once; ``generate`` gets each turn's request."""
        hosts = EnvHosts(EnvConfig(id="answering"), cls=AnsweringEnv)
        big = 10**9
        limits = LoopLimits(
            max_turns=self.options.turns,
            max_turn_tokens=self.options.turn_tokens,
            max_response_tokens=big,
            max_context_tokens=big,
            trajectory_timeout_s=3600.0,
        )

        loop = AgentLoop(  # one for all episodes, as in a run
            generate=generate,
            renderer=self.renderer,
            toolbox=Toolbox([]),
            sandboxes=FakeSandboxes(),
            limits=limits,
        )

        async def one(index: int) -> None:
            request = EpisodeRequest(
                env_id="answering", task=Task(id="t", data={}), seed=index, group_id=str(index)
            )
            trajectory = await loop.run(await hosts.open(), request)
            assert len(trajectory.turns) == self.options.turns, trajectory.error

        await asyncio.gather(*(one(index) for index in range(self.options.sessions)))
        await hosts.close()

    def sessions(self) -> dict[str, Session]:
        """Return what the loops ask for, recorded with a generator that says nothing of its own."""
        stop = self.renderer.stop_token_ids[0]
        seen: dict[str, list[list[int]]] = {}

        async def generate(request: GenerateRequest) -> Generation:
            seen.setdefault(request.session_id, []).append(list(request.prompt_ids))
            ids = [*[200] * (self.options.turn_tokens - 1), stop]
            return generation(ids, request)

        asyncio.run(self.run(generate))
        found = {}
        for number, prompts in enumerate(seen.values()):
            pairs = zip(prompts, prompts[1:], strict=False)
            found[f"s{number}"] = Session(
                prompt=prompts[0],
                answers=[new[len(old) + self.options.turn_tokens :] for old, new in pairs],
                num_sampled=self.options.turn_tokens,
                stop_id=stop,
                seed=1000 * number,
            )
        return found


def generation(ids: list[int], request: GenerateRequest) -> Generation:
    """Return a turn that the loop takes for one that the model ended."""
    ids = [*ids[:-1], request.sampling.stop_token_ids[0]]
    count = len(ids)
    return Generation(
        ids=ids,
        logprobs=[-1.0] * count,
        policy_version=[0] * count,
        stop_reason=StopReason.STOP,
    )
