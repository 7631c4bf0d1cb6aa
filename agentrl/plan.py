"""What a run works on: known, and refused where it cannot work, before a model loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.agent.renderer import Renderer
from agentrl.algo.config import CreditConfig
from agentrl.config.engines import warmup_problems
from agentrl.config.environments import credit_configs
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.rollout.groups import GroupPlan
from agentrl.train.credit import needs_of
from agentrl.train.environments import Environment, make_environments, refuse_idle_specs
from agentrl.train.requirements import refuse_unmet
from agentrl.train.tasks import (
    HELD_OUT,
    Splits,
    bound_lengths,
    describe,
    load_tasks,
    total_steps,
)
from agentrl.types import Task

TRAIN = "train"
"""The purpose of the groups that are trained on."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """Environments, tasks and groups of a run."""

    environments: Sequence[Environment]
    credit: Mapping[str, CreditConfig]
    """By environment."""
    tasks: Splits
    groups: Mapping[str, GroupPlan]
    """By purpose."""
    num_steps: int = 0
    """Of the whole run; known once prompts that are too long have been left out."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Split -> tasks that were left out."""

    @property
    def examples(self) -> list[Task]:
        """A task of every environment, for a reward function to be shown."""
        return [found[0] for found in self.tasks["train"].values()]


def make_plan(config: Config) -> Plan:
    """Make the environments and read their tasks.

    Raises:
        AgentRLError: whatever of it cannot be used.
    """
    environments = make_environments(config.env, config.tools)
    refuse_idle_specs(environments, config.tools.specs)
    credit = credit_configs(config)
    refuse_unmet(environments, config, credit)
    return Plan(
        environments=environments,
        credit=credit,
        tasks=load_tasks(environments, config.data),
        groups=_group_plans(config, credit),
    )


def _group_plans(config: Config, credit: Mapping[str, CreditConfig]) -> dict[str, GroupPlan]:
    train = GroupPlan(
        purpose=TRAIN,
        num_samples=config.rollout.n,
        temperature=config.rollout.temperature,
        greedy_baseline="greedy_rewards" in needs_of(credit),
        tree=config.rollout.tree,
    )
    return {TRAIN: train, **{split: evaluation_plan(config, split) for split in HELD_OUT}}


def evaluation_plan(config: Config, split: str, *, num_samples: int | None = None) -> GroupPlan:
    """Return how the tasks of a split are sampled to measure a policy.

    Args:
        num_samples: in place of ``eval.n``.
    """
    temperature = config.eval.temperature
    return GroupPlan(
        purpose=f"eval-{split}",
        num_samples=config.eval.n if num_samples is None else num_samples,
        temperature=config.rollout.temperature if temperature is None else temperature,
    )


def fit_to_model(
    plan: Plan, config: Config, announce: Callable[[str], None], renderer: Renderer
) -> None:
    """Complete the plan: only the model's tokenizer can tell the length of prompts.

    Raises:
        DataError: prompts are too long.
        ConfigError: the warm-up of the learning rate does not fit into the steps there are.
    """
    plan.dropped = bound_lengths(
        plan.tasks,
        plan.environments,
        config.data,
        renderer,
        max_context_tokens=config.rollout.max_context_tokens,
    )
    if config.data.sources():
        announce(describe(plan.tasks, config.data, plan.dropped))
    plan.num_steps = total_steps(config.trainer, sum(map(len, plan.tasks["train"].values())))
    if problems := list(warmup_problems(config, total_steps=plan.num_steps)):
        raise ConfigError(problems[0])
