"""A run on Ray, as its driver sees it: what is started, and where episodes are played."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentrl.agent.renderer import Renderer
from agentrl.config.cluster import REWARD_MODEL, placement_of, rollout_share
from agentrl.config.schema import Config
from agentrl.dist.engine import TrainEngine
from agentrl.dist.placement import NodeResources, capacity_problems, count, plan_pools
from agentrl.dist.rollout_pool import RolloutPool
from agentrl.dist.rollout_worker import ProcessSetup
from agentrl.dist.weight_sync.config import OBJECT_STORE, WeightSyncConfig
from agentrl.dist.weight_sync.direct import DirectChannel
from agentrl.dist.weight_sync.sender import sending_ranks
from agentrl.engines import roles_of
from agentrl.errors import ConfigError
from agentrl.extras import missing_extra
from agentrl.model.blueprint import Blueprint
from agentrl.model.load import LoadedModel
from agentrl.plan import Plan
from agentrl.playground import (
    GroupRunners,
    Playground,
    open_playground,
    open_policy,
)
from agentrl.reward.service import RewardModels, ScoringService
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.engines import READ_SHAPES_ONLY
from agentrl.rollout.groups import GroupPlan
from agentrl.rollout.producer import CutGroup, RunGroup
from agentrl.rollout.serving.stats import merged
from agentrl.rollout.tasks import Dispatch
from agentrl.rollouts import FitToModel, OneOwner, TakesTurns
from agentrl.sandbox.opening import open_sandboxes
from agentrl.telemetry.console import say
from agentrl.train.environments import make_environments
from agentrl.train.parts import Placement, Weights
from agentrl.types import Task, TrajectoryGroup

MIB = 1 << 20


# ---------------------------------------------------------------- in a rollout worker's process


@dataclass(slots=True, frozen=True, kw_only=True)
class HostSpec:
    """What a rollout worker opens. Can be pickled."""

    config: Config
    groups: Mapping[str, GroupPlan]
    """By purpose."""
    blueprint: Blueprint
    examples: list[Task]
    """Shown to a reward function before it grades."""
    reward_models: ScoringService | None
    """Where they have a pool of their own."""


@dataclass(slots=True, frozen=True)
class PlaygroundHost:
    """A playground behind the few things that a worker asks of it."""

    ground: Playground
    runners: Mapping[str, GroupRunners]

    @property
    def engine(self) -> RolloutEngine:
        """What is sampled."""
        return self.ground.engine

    async def run_group(self, purpose: str, dispatch: Dispatch) -> TrajectoryGroup:
        """Sample one prompt."""
        return await self.runners[purpose](dispatch)

    async def cut(self, purpose: str, dispatch: Dispatch) -> None:
        """End the episodes of a prompt with what they have."""
        await self.runners[purpose].cut(dispatch)

    def metrics(self) -> dict[str, float]:
        """Return what the replicas have done."""
        return self.ground.engine.metrics()


@asynccontextmanager
async def open_host(spec: HostSpec, index: int) -> AsyncIterator[PlaygroundHost]:
    """Open everything that plays, with weights that are yet to come.

    Args:
        index: of the worker.

    Raises:
        AgentRLError: whatever of it cannot be used in this process.
    """
    config = worker_config(spec.config, index)
    environments = make_environments(config.env, config.tools)
    shapes_only = config.rollout.engine.id in READ_SHAPES_ONLY
    device = "meta" if shapes_only else config.model.device
    model = await asyncio.to_thread(spec.blueprint.build, device=device)
    async with open_playground(
        config,
        environments,
        examples=spec.examples,
        served=model,
        reward_models=spec.reward_models,
    ) as ground:
        runners = {name: ground.groups(config, plan) for name, plan in spec.groups.items()}
        yield PlaygroundHost(ground, runners)


def worker_config(config: Config, index: int) -> Config:
    """Give a worker a port of its own: several of them may be on one machine."""
    serving = config.rollout.serving
    port = serving.metrics_port and serving.metrics_port + index
    rollout = replace(config.rollout, serving=replace(serving, metrics_port=port))
    return replace(config, rollout=rollout)


# ---------------------------------------------------------------- in the driver


@dataclass(slots=True, frozen=True)
class ClusterRollouts:
    """Rollout workers as Ray actors; a :class:`~agentrl.rollouts.Rollouts`."""

    model: LoadedModel
    pool: RolloutPool
    config: Config
    opening: asyncio.Task[None]

    async def opened(self) -> None:
        """Wait for every worker."""
        await self.opening

    def runner(self, purpose: str) -> RunGroup:
        """Return what has a group played by the worker with the fewest of them."""
        return partial(self.pool.run_group, purpose)

    def cutter(self, purpose: str) -> CutGroup:
        """Return what has a group end where it is being played."""
        return partial(self.pool.cut, purpose)

    def weights(self, actor: TrainEngine) -> Weights:
        """Return what carries the policy of ``actor`` to every worker."""
        return ClusterWeights(self.pool, actor, self.config.weight_sync)

    def placement(self, actor: TrainEngine) -> Placement:
        """Return who owns the GPUs when."""
        level = self.config.rollout.sleep_level
        return TakesTurns(self.pool, actor, level) if level else OneOwner()


class ClusterWeights:
    """Publishes a training engine, straight into workers or through Ray's object store."""

    def __init__(self, pool: RolloutPool, actor: TrainEngine, config: WeightSyncConfig) -> None:
        self._pool = pool
        self._actor = actor
        self._config = config
        self._channel: DirectChannel | None = None
        self._transport = config.transport

    async def publish(self, *, version: int) -> dict[str, Any]:
        """Pack, send, load and compare; see :meth:`RolloutPool.load` and `update`.

        Returns:
            ``weight_sync/{seconds,bytes,checksum_ok}``, what became of workers and groups since
            the start of the run, ``cluster/{rollout_worker_restarts,replayed_groups}``, and the
            workers' ``serving/*`` together.
        """
        start = time.perf_counter()
        if self._transport == OBJECT_STORE:
            num_bytes = await self._publish_through_store(version)
        else:
            num_bytes = await self._publish_directly(version)
        seconds = time.perf_counter() - start
        return merged(await self._pool.metrics()) | {
            "weight_sync/seconds": seconds,
            "weight_sync/bytes": float(num_bytes),
            "weight_sync/checksum_ok": 1.0,
            "cluster/rollout_worker_restarts": self._pool.num_restarts,
            "cluster/replayed_groups": self._pool.num_replayed,
        }

    async def _publish_directly(self, version: int) -> int:
        if self._channel is None:
            channel = DirectChannel(
                sending_ranks(self._actor),
                transport=self._transport,
                bucket_bytes=self._config.bucket_mb * MIB,
                timeout_s=self._config.timeout_s,
            )
            self._transport = await self._pool.transport(channel)
            if self._transport == OBJECT_STORE:
                return await self._publish_through_store(version)
            self._channel = channel
        await self._pool.update(self._channel, version)
        return self._channel.num_bytes

    async def _publish_through_store(self, version: int) -> int:
        from agentrl.dist.weight_sync.object_store import ship_to_store

        shipment = await asyncio.to_thread(
            ship_to_store,
            self._actor,
            version=version,
            bucket_bytes=self._config.bucket_mb * MIB,
            dtypes=self._pool.dtypes,
        )
        await self._pool.load(shipment, timeout_s=self._config.timeout_s)
        return shipment.num_bytes


@asynccontextmanager
async def open_cluster(
    config: Config, plan: Plan, fit: FitToModel
) -> AsyncIterator[ClusterRollouts]:
    """Be connected to Ray, with rollout workers that open; leaving ends what was started.

    Raises:
        ConfigError: Ray is not installed or does not answer, or has not what the run needs.
        AgentRLError: whatever of the run cannot be used.
    """
    try:
        from agentrl.dist.ray_cluster import ray_cluster
    except ModuleNotFoundError as error:
        raise ConfigError(missing_extra("ray", "cluster=ray")) from error

    cluster = ray_cluster(
        config.cluster.address,
        num_cpus=max(len(os.sched_getaffinity(0)), cpus_needed(config)),
        runtime_env=config.cluster.runtime_env or None,
        timeout_s=config.cluster.start_timeout_s,
    )
    async with AsyncExitStack() as stack:
        refuse_too_small(config, stack.enter_context(cluster))
        async with open_sandboxes(config.sandbox) as sandboxes:  # for demonstrations
            model = await open_policy(_on_cpu(config), plan.environments, sandboxes)
        fit(Renderer(model.tokenizer))
        reward_models = await _open_reward_models(config, stack)
        pool = _rollout_pool(config, plan, Blueprint.of(model), reward_models)
        count, kind = config.rollout.workers, config.rollout.engine.id
        plural = "s" if count > 1 else ""
        say(f"opening {count} rollout worker{plural} with {kind}", quiet=config.telemetry.quiet)
        opening = asyncio.create_task(pool.start(), name="open rollout workers")
        stack.push_async_callback(_end, opening, pool)
        yield ClusterRollouts(model, pool, config, opening)


async def _end(opening: asyncio.Task[None], pool: RolloutPool) -> None:
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await pool.close()


def refuse_too_small(config: Config, nodes: Sequence[NodeResources]) -> None:
    """Refuse a cluster that has not got what the run takes, empty as it may be.

    Raises:
        ConfigError: says what is needed, and what there is.
    """
    share, workers = rollout_share(config), config.rollout.workers
    pools = plan_pools(placement_of(config), roles_of(config))
    problems = list(capacity_problems(pools, nodes, other_gpus=workers * share.gpus))
    have = sum(node.cpus for node in nodes)
    if not problems and cpus_needed(config) > have:
        problems.append(
            f"the run needs {count(cpus_needed(config), 'CPU')}, of which {workers} "
            "rollout.workers take "
            f"cluster.cpus_per_rollout_worker={share.cpus:g} each, and the cluster has {have:g}; "
            "lower one of them, or add nodes"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def cpus_needed(config: Config) -> int:
    """Return the cores that a cluster must be able to reserve: those of ranks and workers."""
    pools = [item.pool for item in plan_pools(placement_of(config), roles_of(config))]
    ranks = sum(pool.ranks * pool.cpus_per_rank for pool in pools)
    workers = config.rollout.workers * config.cluster.cpus_per_rollout_worker
    return int(-(-(ranks + workers) // 1))


def _on_cpu(config: Config) -> Config:
    """The driver reads the model; it computes nothing with it."""
    return replace(config, model=replace(config.model, device="cpu"))


async def _open_reward_models(config: Config, stack: AsyncExitStack) -> ScoringService | None:
    """Start the pool of the reward models, where ``placement.roles`` gives them one."""
    from agentrl.dist.ray_service import RewardModelClient, ServicePool

    name = config.placement.roles.get(REWARD_MODEL)
    if name is None:
        return None
    pool = ServicePool(
        "the reward model", partial(RewardModels, config.reward), config.placement.pools[name]
    )
    stack.callback(pool.close)
    return RewardModelClient(await pool.start(timeout_s=config.cluster.start_timeout_s))


def _rollout_pool(
    config: Config, plan: Plan, blueprint: Blueprint, reward_models: ScoringService | None
) -> RolloutPool:
    from agentrl.dist.ray_rollout import RolloutResources, ray_spawner

    share = rollout_share(config)
    concurrency = -(-config.rollout.concurrency // config.rollout.workers)
    own = replace(
        config,
        model=replace(config.model, device="cuda" if share.gpus else "cpu"),
        rollout=replace(config.rollout, concurrency=concurrency),
    )
    spec = HostSpec(
        config=own,
        groups=plan.groups,
        blueprint=blueprint,
        examples=plan.examples,
        reward_models=reward_models,
    )
    spawn = ray_spawner(
        partial(open_host, spec),
        ProcessSetup.of_this_process(num_threads=config.trainer.num_threads),
        RolloutResources(cpus=share.cpus, gpus=share.gpus, max_groups=concurrency),
    )
    return RolloutPool(
        spawn,
        num_workers=config.rollout.workers,
        max_groups=concurrency,
        max_restarts=config.cluster.max_restarts,
        start_timeout_s=config.cluster.start_timeout_s,
    )
