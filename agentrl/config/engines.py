"""Refuses settings of policy and critic that cannot work, or that nothing reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from agentrl.config.cluster import LOCAL, placement_of
from agentrl.config.environments import credit_configs
from agentrl.dist.config import CriticConfig, EngineConfig, PoolConfig, Precision, Recompute
from agentrl.dist.layout import MAX_RANKS, layout_problems
from agentrl.dist.lora_checks import lora_problems
from agentrl.dist.optimizer_checks import optimizer_problems
from agentrl.dist.placement import DEFAULT_POOL
from agentrl.errors import AgentRLError
from agentrl.train.config import TINY

if TYPE_CHECKING:
    from agentrl.config.schema import Config


def engine_problems(config: Config) -> Iterable[str]:
    """Yield what is wrong with ``actor``, ``critic`` and ``lora``, one line each."""
    yield from _engine("actor", config.actor, config)
    yield from lora_problems(config.lora)
    yield from _exact(config)
    try:
        estimators = [credit.advantage for credit in credit_configs(config).values()]
        has_critic = uses_critic(config)
    except AgentRLError:  # an estimator that does not exist is refused by its own name
        return
    if has_critic:
        yield from _engine("critic", config.critic, config)
        yield from _critic(config.critic)
    else:
        yield from _idle_critic(config.critic, estimators)
    if config.trainer.total_steps:  # with trainer.epochs the tasks decide; see agentrl.plan
        yield from warmup_problems(config, total_steps=config.trainer.total_steps)


def uses_critic(config: Config) -> bool:
    """Whether an estimator of the run reads values.

    Raises:
        RegistryError: an estimator does not exist.
        ConfigError: an entry of ``env.mix`` sets what does not exist.
    """
    from agentrl.algo.credit import get_estimator

    configs = credit_configs(config).values()
    return any("values" in get_estimator(credit.advantage).needs for credit in configs)


def policy_steps(config: Config, *, total_steps: int) -> int:
    """Steps of a run of ``total_steps`` in which the policy learns: all but the head start."""
    return total_steps - (config.critic.head_start_steps if uses_critic(config) else 0)


def warmup_problems(config: Config, *, total_steps: int) -> Iterable[str]:
    """Say which learning rates would still be warming up when the run ends.

    Args:
        total_steps: of the run.
    """
    try:
        steps = {"actor": policy_steps(config, total_steps=total_steps)}
        steps |= {"critic": total_steps} if uses_critic(config) else {}
    except AgentRLError:
        steps = {"actor": total_steps}
    if steps["actor"] < 1 <= total_steps:
        yield (
            f"critic.head_start_steps={config.critic.head_start_steps} with {total_steps} steps in "
            f"the run: the policy would never move; use at most {total_steps - 1}, or train longer"
        )
        return
    for key, num_steps in steps.items():
        engine: EngineConfig = getattr(config, key)
        updates = num_steps * engine.epochs * engine.updates_per_step
        if 0 < updates <= engine.warmup_steps:
            yield (
                f"{key}.warmup_steps={engine.warmup_steps} with {updates} optimizer steps in the "
                f"run ({num_steps} steps * {key}.epochs={engine.epochs} * "
                f"{key}.updates_per_step={engine.updates_per_step}): the learning rate would not "
                f"arrive at {key}.lr before the end; use at most {updates - 1}, or train longer"
            )


def _engine(key: str, engine: EngineConfig, config: Config) -> Iterable[str]:
    for name in ("updates_per_step", "epochs", "tokens_per_micro_batch"):
        if (value := getattr(engine, name)) < 1:
            yield f"{key}.{name}={value}: must be at least 1"
    yield from optimizer_problems(engine, prefix=f"{key}.")
    yield from layout_problems(
        key,
        num_ranks=_ranks_of(key, config),
        shard_size=engine.shard_size,
        sequence_parallel=engine.sequence_parallel,
        more_ranks=f"cluster=ray placement.pools.{_pool_of(key, config)}.ranks",
    )
    sessions = config.trainer.prompts_per_step * config.rollout.n
    if engine.updates_per_step > sessions:
        yield (
            f"{key}.updates_per_step={engine.updates_per_step} is more than the {sessions} "
            "trajectories of a step (trainer.prompts_per_step * rollout.n): "
            f"use at most {sessions}"
        )


def _exact(config: Config) -> Iterable[str]:
    """Yield what keeps the actor from computing as the rollout engine does."""
    actor, kwargs = config.actor, config.rollout.engine.kwargs
    if not actor.exact:
        return
    conditions = {
        "rollout=hf": config.rollout.engine.id == "hf",
        "rollout.engine.kwargs.dtype=float32": kwargs.get("dtype", "float32") == "float32",
        "trainer.deterministic=true": kwargs.get("deterministic", config.trainer.deterministic),
        "cluster=local": config.cluster.kind == LOCAL,
        "actor.precision=fp32": actor.precision is Precision.fp32,
        "actor.recompute=none": actor.recompute is Recompute.none,
        "actor.compile=false": not actor.compile,
        "lora.rank=0": not config.lora.rank,
    }
    missing = [setting for setting, holds in conditions.items() if not holds]
    if missing:
        yield (
            "actor.exact=true: the bits of the rollout engine can be had on its own terms only; "
            f"set {', '.join(missing)}, or actor.exact=false"
        )


def _ranks_of(role: str, config: Config) -> int:
    """Return how many processes hold a role; a number that cannot be is refused by its pool."""
    pools = placement_of(config).pools
    return min(max(pools.get(_pool_of(role, config), PoolConfig()).ranks, 1), MAX_RANKS)


def _pool_of(role: str, config: Config) -> str:
    return config.placement.roles.get(role, DEFAULT_POOL)


def _critic(critic: CriticConfig) -> Iterable[str]:
    clip = critic.value_clip
    if clip is not None and not (clip > 0 and math.isfinite(clip)):
        yield (
            f"critic.value_clip={clip}: must be a finite number above 0, in units of the return "
            "(0.5 is customary), or null for no bound"
        )
    if critic.head_start_steps < 0:
        yield f"critic.head_start_steps={critic.head_start_steps}: must be at least 0"
    if critic.path is not None and not critic.path.strip():
        yield (
            f"critic.path={critic.path!r} is empty: give a hub id or a directory, or leave it out "
            "(critic.path=null), which starts from the policy's own weights"
        )
    elif critic.path == TINY:
        yield (
            f"critic.path={TINY}: the embedded model is made anew for the policy; leave it out "
            "(critic.path=null), which starts from the policy's own weights"
        )


def _idle_critic(critic: CriticConfig, estimators: Iterable[str]) -> Iterable[str]:
    """Settings of a critic that the run does not have, but for those of the model's recipe."""
    idle = dataclasses.asdict(CriticConfig())
    recipe = idle | _recipe_of_the_embedded_model()
    for name, value in dataclasses.asdict(critic).items():
        value = tuple(value) if isinstance(value, list) else value
        if value not in (idle[name], recipe[name]):
            yield (
                f"critic.{name}={value} with algo.advantage="
                f"{', '.join(dict.fromkeys(estimators))}: there is no critic, since no estimator "
                "of the run reads values, so it would change nothing; leave it out, or choose "
                "algo=ppo, turn_ppo or bilevel"
            )


@cache
def _recipe_of_the_embedded_model() -> dict[str, Any]:
    """What ``model=tiny`` sets of the critic, for runs that have one."""
    from omegaconf import OmegaConf

    from agentrl.config.keys import config_dir

    recipe: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / "model" / "tiny.yaml"))
    return dict(recipe.get("critic", {}))
