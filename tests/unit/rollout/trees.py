"""Groups that branch, sampled for real: environment, loop and record; only the model is missing."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.agent.limits import LoopLimits
from agentrl.agent.loop import AgentLoop
from agentrl.agent.renderer import Renderer
from agentrl.env.config import EnvConfig
from agentrl.env.entries import EnvEntry
from agentrl.env.host import EnvHosts
from agentrl.rollout.config import FailureConfig, TreeConfig
from agentrl.rollout.groups import GroupPlan, GroupRunner, Sample
from agentrl.rollout.stage import Stage
from agentrl.rollout.tasks import Dispatch
from agentrl.testing import FakeSandboxes, make_tokenizer
from agentrl.tool.binding import Toolbox
from agentrl.types import GenerateRequest, Generation, StopReason, Task, Trajectory, TrajectoryGroup

RENDERER = Renderer(make_tokenizer())
GUESS_TASK = Task(id="40-49-47", data={"low": 40, "high": 49, "secret": 47})
DEADLINE_S = 60.0


class Guesser:
    """Guesses a number of the first range in the prompt: a pure function of the turn's seed."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.requests: list[GenerateRequest] = []
        self.ended: list[str] = []
        self.num_tokens = 0

    def say(self, prompt: str, rng: random.Random) -> str:
        numbers = re.findall(r"from (\d+) to (\d+)", prompt)[0]
        return str(rng.randint(int(numbers[0]), int(numbers[1])))

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        rng = random.Random(request.sampling.seed)
        text = self.say(RENDERER.decode(request.prompt_ids), rng)
        ids = [*RENDERER.codec.encode_assistant(text), RENDERER.stop_token_ids[0]]
        await asyncio.sleep(rng.random() / 1000)
        reason = StopReason.STOP
        if len(ids) > request.sampling.max_tokens:
            ids, reason = ids[: request.sampling.max_tokens], StopReason.LENGTH
        self.num_tokens += len(ids)
        return Generation(
            ids=ids,
            logprobs=[-rng.random() - 1e-3 for _ in ids],
            policy_version=[self.policy_version] * len(ids),
            stop_reason=reason,
        )

    async def end_session(self, session_id: str) -> None:
        self.ended.append(session_id)


def sample_group(
    n: int = 8,
    tree: TreeConfig | None = None,
    *,
    engine: Guesser | None = None,
    env: str = "guess_number",
    kwargs: dict[str, Any] | None = None,
    process: bool = False,
    tools: Sequence[str] = (),
    limits: LoopLimits | None = None,
    failure: FailureConfig | None = None,
    seed: int = 0,
    concurrency: int = 8,
    task: Task = GUESS_TASK,
    greedy: bool = False,
    alter: Callable[[Sample], Sample] = lambda sample: sample,
    on_played: Callable[[Sample, Trajectory], None] = lambda sample, trajectory: None,
) -> TrajectoryGroup:
    """Sample one group; the record is checked against the template after every turn.

    Args:
        alter: changes what is asked of an episode.
        on_played: sees every episode.
    """

    async def main() -> TrajectoryGroup:
        used = engine or Guesser()
        config = EnvConfig(id=env, kwargs=kwargs or {}, process=process, processes=2, threads=3)
        hosts = EnvHosts(config)
        loop = AgentLoop(
            generate=used.generate,
            renderer=RENDERER,
            toolbox=Toolbox(tools),
            sandboxes=FakeSandboxes(),
            limits=limits or LoopLimits(),
            end_session=used.end_session,
            strict=True,
        )
        stage = Stage(entry=EnvEntry(name=env, config=config), hosts=hosts, loop=loop)

        async def play(sample: Sample) -> Trajectory:
            trajectory = await stage.play(alter(sample))
            on_played(sample, trajectory)
            return trajectory

        runner = GroupRunner(
            play,
            GroupPlan(
                purpose="train", num_samples=n, temperature=1.0, greedy_baseline=greedy, tree=tree
            ),
            env_id=env,
            failure=failure or FailureConfig(),
            seed=seed,
            concurrency=asyncio.Semaphore(concurrency),
            policy_version=lambda: used.policy_version,
        )
        try:
            return await runner.run(Dispatch(index=3, epoch=0, task=task))
        finally:
            await hosts.close()

    return asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def ids_of(trajectory: Trajectory) -> list[int]:
    return trajectory.segments[0].ids.tolist()
