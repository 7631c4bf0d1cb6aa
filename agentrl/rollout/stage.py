"""Where episodes are played: environments, tools, sandboxes and the agent loop, opened together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from agentrl.agent.call_format import choose_parser
from agentrl.agent.failures import classify, named
from agentrl.agent.loop import AgentLoop, EpisodeRequest
from agentrl.agent.renderer import Renderer
from agentrl.env.base import ScriptedPolicy
from agentrl.env.entries import EnvEntry
from agentrl.env.host import EnvHosts
from agentrl.errors import AgentRLError
from agentrl.reward.run import RunReward
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.groups import Sample
from agentrl.sandbox.base import SandboxProvider
from agentrl.tool.binding import Toolbox
from agentrl.types import StopReason, Trajectory


@dataclass(slots=True, kw_only=True)
class Stage:
    """Plays one episode at a time per call; any number of calls run concurrently."""

    entry: EnvEntry
    hosts: EnvHosts
    loop: AgentLoop
    reward: RunReward | None = None
    """Grades in place of the environments' rubrics, where the run has a reward of its own."""

    async def play(self, sample: Sample, *, policy: ScriptedPolicy | None = None) -> Trajectory:
        """Play an episode in a fresh environment; what fails in it is data."""
        request = EpisodeRequest(
            env_id=self.entry.name,
            task=sample.task,
            seed=sample.seed,
            group_id=sample.group_id,
            sample_index=sample.sample_index,
            attempt=sample.attempt,
            temperature=sample.temperature,
            branch=sample.branch,
            branch_points=sample.branch_points,
            cut=sample.cut,
        )
        if sample.cut.is_set:
            return _never_opened(request, StopReason.CUT, "its group was cut before it began")
        await self.loop.toolbox.cooled()
        try:
            env = await self.hosts.open()
        except AgentRLError as error:
            stop_reason = classify(error)
            if stop_reason is None:
                raise
            # One that cannot be made costs its own trajectory, as any other failure.
            return _never_opened(request, stop_reason, named(error))
        if self.reward is not None:
            self.reward.bind(env)
        return await self.loop.run(env, request, policy=policy)


def _never_opened(request: EpisodeRequest, stop_reason: StopReason, error: str) -> Trajectory:
    """Return an episode that ended before its environment was there."""
    return Trajectory(
        id=request.trajectory_id,
        env_id=request.env_id,
        task=request.task,
        group_id=request.group_id,
        sample_index=request.sample_index,
        attempt=request.attempt,
        seed=request.seed,
        segments=[],
        turns=[],
        messages=[],
        stop_reason=stop_reason,
        error=error,
        parent=None if request.branch is None else request.branch.sample_index,
        branch_turn=0 if request.branch is None else len(request.branch.turns),
    )


@asynccontextmanager
async def open_stage(
    *,
    entry: EnvEntry,
    toolbox: Toolbox,
    rollout: RolloutConfig,
    renderer: Renderer,
    engine: RolloutEngine,
    sandboxes: SandboxProvider,
    tool_parser: str | None = None,
    reward: RunReward | None = None,
) -> AsyncIterator[Stage]:
    """Open everything an episode needs; leaving closes threads and processes.

    Args:
        tool_parser: name of a parser; None takes the one that reads what the template writes.

    Raises:
        ConfigError, RegistryError: an environment or parser that does not exist or cannot be used.
        RenderError: the chat template cannot show these tools.
    """
    async with AsyncExitStack() as stack:
        hosts = EnvHosts(entry.config, reward_timeout_s=rollout.reward_timeout_s)
        stack.push_async_callback(hosts.close)
        loop = AgentLoop(
            generate=engine.generate,
            renderer=renderer,
            toolbox=toolbox,
            sandboxes=sandboxes,
            limits=rollout,
            parser=choose_parser(renderer, toolbox.schemas, tool_parser),
            end_session=engine.end_session,
        )
        yield Stage(entry=entry, hosts=hosts, loop=loop, reward=reward)
