"""What evaluation, rollout and training have in common: a model that plays episodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from agentrl.agent.renderer import Renderer
from agentrl.config.schema import Config
from agentrl.errors import EngineError
from agentrl.model.load import LoadedModel, positions_of
from agentrl.model.tiny import MAX_CONTEXT_TOKENS
from agentrl.reward.run import open_reward
from agentrl.reward.service import ScoringService
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.engines import READ_SHAPES_ONLY, build_engine
from agentrl.rollout.engines.build import EngineSetup
from agentrl.rollout.fit_limits import refuse_beyond_positions
from agentrl.rollout.groups import GroupPlan, GroupRunner
from agentrl.rollout.serving.replica_set import ReplicaSet
from agentrl.rollout.stage import Stage, open_stage
from agentrl.rollout.tasks import Dispatch
from agentrl.sandbox.opening import open_sandboxes
from agentrl.sandbox.pool import SandboxPool
from agentrl.telemetry.console import say
from agentrl.train.checkpoint import CheckpointStore
from agentrl.train.config import TINY, ModelConfig
from agentrl.train.environments import Environment, need_sandboxes
from agentrl.train.open_model import base_of_adapters, is_run, open_model
from agentrl.types import Task, TrajectoryGroup
from agentrl.weights.served import ServedWeights


@dataclass(slots=True)
class PolicySource:
    """Where a replica that was started again gets the policy from."""

    export: Callable[[], Iterable[tuple[str, Tensor]]] | None = None
    """None where weights come from elsewhere: it then waits for those of the next update."""
    version: int = 0

    async def give(self, engine: RolloutEngine) -> ServedWeights:
        """Give an engine the policy as it is now; that it is the one published, sums must tell."""
        if self.export is None:
            raise EngineError("the weights are not in this process")
        return await engine.update_weights(self.export(), self.version)


@dataclass(slots=True, kw_only=True)
class Playground:
    """One engine, and a stage for every environment: tools differ, all else is shared."""

    model: LoadedModel
    engine: ReplicaSet
    renderer: Renderer
    stages: Sequence[Stage]
    concurrency: asyncio.Semaphore
    policy: PolicySource

    def groups(self, config: Config, plan: GroupPlan) -> GroupRunners:
        """Return what samples prompts as ``plan`` says, each in its environment."""
        runners = {
            stage.entry.name: GroupRunner(
                stage.play,
                plan,
                env_id=stage.entry.name,
                failure=config.failure,
                seed=config.trainer.seed,
                concurrency=self.concurrency,
                policy_version=lambda: self.engine.policy_version,
                namespace=stage.entry.namespace,
            )
            for stage in self.stages
        }

        return GroupRunners(runners)


@dataclass(slots=True, frozen=True)
class GroupRunners:
    """Samples prompts, each in its environment."""

    by_env: Mapping[str, GroupRunner]

    async def __call__(self, dispatch: Dispatch) -> TrajectoryGroup:
        """Sample one prompt."""
        return await self.by_env[dispatch.env].run(dispatch)

    async def cut(self, dispatch: Dispatch) -> None:
        """End the episodes of a prompt with what they have."""
        await self.by_env[dispatch.env].cut(dispatch)


@asynccontextmanager
async def open_playground(
    config: Config,
    environments: Sequence[Environment],
    *,
    examples: Sequence[Task] = (),
    served: LoadedModel | None = None,
    reward_models: ScoringService | None = None,
) -> AsyncIterator[Playground]:
    """Open model, engine, environments, tools, sandboxes and reward; leaving closes them all.

    Args:
        examples: tasks that a reward function is shown before any model loads.
        served: what the engine samples from, and owns; None opens the run's model, and samples
            from a copy of it.
        reward_models: hold them, where they have a pool of their own.

    Raises:
        AgentRLError: whatever of it cannot be used; before anything is trained.
    """
    async with AsyncExitStack() as stack:
        sandboxes = await stack.enter_async_context(open_sandboxes(config.sandbox))
        if need_sandboxes(environments):
            await sandboxes.start()
        given = {
            "max_response_tokens": config.rollout.max_response_tokens,
            "seed": config.trainer.seed,
        }
        reward = await stack.enter_async_context(
            open_reward(
                config.reward,
                reward_timeout_s=config.rollout.reward_timeout_s,
                given=given,
                examples=examples,
                service=reward_models,
            )
        )
        model = served or await open_policy(config, environments, sandboxes)
        policy = PolicySource()
        replicas = _replicas(config, model, policy, owned=served is not None)
        if served is None:  # else the process is one of several, and its owner has said so
            _announce_engines(config)
        await replicas.start()
        stack.push_async_callback(replicas.close)
        if served is None and replicas.weight_specs():
            export = policy.export = model.model.named_parameters
            if replicas.policy_version < 0:  # else it began with them
                await replicas.update_weights(export(), policy.version)
        renderer = Renderer(model.tokenizer)
        stages = [
            await stack.enter_async_context(
                open_stage(
                    entry=item.entry,
                    toolbox=item.toolbox,
                    rollout=config.rollout,
                    renderer=renderer,
                    engine=replicas,
                    sandboxes=sandboxes,
                    tool_parser=config.model.tool_parser,
                    reward=reward,
                )
            )
            for item in environments
        ]
        yield Playground(
            model=model,
            engine=replicas,
            renderer=renderer,
            stages=stages,
            concurrency=asyncio.Semaphore(config.rollout.concurrency),
            policy=policy,
        )


def _announce_engines(config: Config) -> None:
    """Tell of a wait of a minute; the engine of this process takes none."""
    kind, count = config.rollout.engine.id, config.rollout.replicas_per_gpu
    if kind in READ_SHAPES_ONLY:
        plural = "s" if count > 1 else ""
        say(f"opening {count} engine{plural} of {kind}", quiet=config.telemetry.quiet)


def _replicas(
    config: Config, model: LoadedModel, policy: PolicySource, *, owned: bool
) -> ReplicaSet:
    """Return the engines of this process, not started.

    Args:
        owned: they may sample from the model itself; else each takes a copy.
    """

    def spawn(index: int) -> RolloutEngine:
        return build_engine(
            config.rollout.engine.id,
            EngineSetup(
                model=model.model,
                copies=not owned,
                rollout=config.rollout,
                deterministic=config.trainer.deterministic,
                index=index,
                bucket_mb=config.weight_sync.bucket_mb,
            ),
        )

    serving = config.rollout.serving
    if serving.interrupt_updates is None:  # else nothing is in flight when an update comes
        serving = replace(serving, interrupt_updates=config.rollout.runs_ahead)
    return ReplicaSet(
        spawn,
        config.rollout.replicas_per_gpu,
        serving,
        republish=policy.give,
        bucket_bytes=config.weight_sync.bucket_mb << 20,
    )


async def open_policy(
    config: Config, environments: Sequence[Environment], sandboxes: SandboxPool
) -> LoadedModel:
    """Open the run's model.

    Raises:
        ConfigError: it has fewer positions than the run's episodes may take.
        AgentRLError: it cannot be loaded.
    """
    check_length = partial(refuse_beyond_positions, config.rollout)
    if config.model.path == TINY:  # known before it is made
        check_length(MAX_CONTEXT_TOKENS, source=TINY)
    model = await open_model(
        _model_of(config), environments, sandboxes=sandboxes, quiet=config.telemetry.quiet
    )
    check_length(positions_of(model.model), source=model.source)
    return model


def _model_of(config: Config) -> ModelConfig:
    """A resumed run takes its model from its own directory, whatever became of the original.

    That holds the chat template too: its file may be gone, or say something else by now.
    """
    run = config.trainer.resume
    if run is None or not is_run(run):
        return config.model
    if config.lora.rank:  # adapters come with the checkpoint, for the model as it was without them
        folder = base_of_adapters(Path(run))
        return config.model if folder is None else _own(config.model, str(folder))
    if not CheckpointStore.of_run(Path(run)).steps():
        return config.model
    return _own(config.model, run)


def _own(model: ModelConfig, path: str) -> ModelConfig:
    return replace(model, path=path, chat_template=None)
