"""The training engines of a run: which roles it has, where they live, what groups hold them.

One path: a run in one process calls its engines through a group as well, the one in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from agentrl.config.cluster import LOCAL, REWARD_MODEL, placement_of
from agentrl.config.engines import policy_steps, uses_critic
from agentrl.config.schema import Config
from agentrl.dist.build import EngineSpec, build_engine
from agentrl.dist.engine_worker import EngineWorker
from agentrl.dist.group_engine import GroupEngine
from agentrl.dist.placement import PoolPlan, plan_pools
from agentrl.dist.worker_group import LocalWorkerGroup, WorkerGroup
from agentrl.model.load import LoadedModel, load_model
from agentrl.plan import Plan
from agentrl.rollout.engines.build import EngineSetup, hf_settings
from agentrl.telemetry.run_dir import RunDir
from agentrl.train.open_critic import open_trunk
from agentrl.train.reference import keep_reference


def roles_of(config: Config) -> list[str]:
    """Return the roles that a run places: with a training engine, or reward models in a pool."""
    roles = ["actor"]
    if uses_critic(config):
        roles.append("critic")
    if config.algo.kl.coef and not config.lora.rank:  # adapters left out are a reference as well
        roles.append("reference")
    if REWARD_MODEL in config.placement.roles:
        roles.append(REWARD_MODEL)
    return roles


OpenGroup = Callable[[Config, PoolPlan, Sequence[EngineSpec]], WorkerGroup]


def engine_specs(
    config: Config, plan: Plan, model: LoadedModel, run_dir: RunDir
) -> dict[str, EngineSpec]:
    """Return role -> its engine before it is built, in the order in which they are built.

    Args:
        model: what the run starts from.
        run_dir: keeps the reference policy.
    """
    common: dict[str, Any] = {
        "deterministic": config.trainer.deterministic,
        "seed": config.trainer.seed,
    }
    actor, critic = config.actor, config.critic
    exact = None
    if actor.exact:
        exact = hf_settings(
            EngineSetup(
                model=None,
                rollout=config.rollout,
                deterministic=config.trainer.deterministic,
            )
        )
    steps = policy_steps(config, total_steps=plan.num_steps)
    specs = {
        "actor": EngineSpec(
            role="actor",
            model=model,
            config=actor,
            temperature=config.rollout.temperature,
            total_updates=steps * actor.epochs * actor.updates_per_step,
            lora=config.lora,
            exact=exact,
            **common,
        )
    }
    roles = roles_of(config)
    if "critic" in roles:
        specs["critic"] = EngineSpec(
            role="critic",
            model=open_trunk(critic, model),
            config=critic,
            head="value",
            total_updates=plan.num_steps * critic.epochs * critic.updates_per_step,
            **common,
        )
    if "reference" in roles:
        folder = keep_reference(model, run_dir.path, resumed=config.trainer.resume is not None)
        specs["reference"] = EngineSpec(
            role="reference",
            model=load_model(str(folder), device=str(model.model.device)),
            config=actor,  # laid out as what it is compared with
            temperature=config.rollout.temperature,
            trainable=False,
            exact=exact,
            **common,
        )
    return specs


async def open_engines(
    config: Config, specs: Mapping[str, EngineSpec], stack: AsyncExitStack
) -> dict[str, GroupEngine]:
    """Build every role's engine, each in its pool; ``stack`` ends the groups.

    On a cluster the event loop goes on meanwhile, so that rollout workers open at the same time.

    Raises:
        ConfigError: a placement that cannot work, or settings that do not fit its ranks.
        WorkerTimeout, WorkerError: ranks could not be started.
        ModelError: a model cannot be run as asked for.
    """
    if config.cluster.kind == LOCAL:
        return _open(config, specs, stack, _local_group)
    return await asyncio.to_thread(_open, config, specs, stack, _ray_group)


def _open(
    config: Config, specs: Mapping[str, EngineSpec], stack: AsyncExitStack, open_group: OpenGroup
) -> dict[str, GroupEngine]:
    engines: dict[str, GroupEngine] = {}
    for pool in plan_pools(placement_of(config), roles_of(config)):
        roles = [role for role in pool.roles if role in specs]
        if not roles:
            continue  # of reward models, which those who play ask
        group = open_group(config, pool, [specs[role] for role in roles])
        stack.callback(group.shutdown)
        engines |= {role: GroupEngine(group, role) for role in roles}
    return engines


def _local_group(config: Config, pool: PoolPlan, specs: Sequence[EngineSpec]) -> WorkerGroup:
    model = specs[0].model
    assert isinstance(model, LoadedModel), "one process holds the models itself"
    builders = {spec.role: partial(build_engine, spec) for spec in specs}
    return LocalWorkerGroup(EngineWorker, builders, device=model.model.device)


def _ray_group(config: Config, pool: PoolPlan, specs: Sequence[EngineSpec]) -> WorkerGroup:
    from agentrl.dist.ray_group import RayOptions, RayWorkerGroup
    from agentrl.dist.ray_transport import store

    builders = {}
    for spec in specs:
        assert isinstance(spec.model, LoadedModel)
        stored = replace(spec, model=store(spec.model))  # no rank has to see the model's own files
        builders[spec.role] = partial(build_engine, stored)
    options = RayOptions(start_timeout_s=config.cluster.start_timeout_s)
    return RayWorkerGroup(EngineWorker, builders, pool=pool.pool, options=options)
