"""Refuses estimators that a run cannot feed, and rewards that would count otherwise than meant."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from agentrl.algo.config import CreditConfig
from agentrl.algo.reward_weights import named_reward_problems
from agentrl.errors import AgentRLError
from agentrl.kwargs import check_kwargs
from agentrl.reward.checks import part_configs

if TYPE_CHECKING:
    from agentrl.config.schema import Config
    from agentrl.reward.config import RewardConfig

SINGLE_VALUED = ("format", "overlong", "judge", "hf_classifier")
"""Parts of a reward that give their value and ``name/...``, but nothing under another name."""
LARGEST_WEIGHT = 1e6
"""Weights and arguments above would leave the range of float32; a slip of the hand."""
_DISCOUNTS = ("gamma", "lam")
_SHARES = ("gamma", "lam", "token_gamma", "token_lam")
_FIX = {"tree": "set rollout.tree.rounds above 0"}


def credit_problems(credit: CreditConfig, config: Config, *, key: str) -> Iterable[str]:
    """Yield what is wrong with an estimator and its inputs, one line each.

    Args:
        key: where the settings stand, for messages.
    """
    from agentrl.algo.credit import NEEDS, get_estimator

    yield from _weights(credit.reward_weights, config.reward, key=key)
    name = credit.advantage
    try:
        estimator = get_estimator(name)
    except AgentRLError as error:
        yield f"{key}.advantage={name!r}: {error}"
        return
    yield from _arguments(estimator, credit, key)
    if config.rollout.n < estimator.min_group:
        yield (
            f"rollout.n={config.rollout.n} with {key}.advantage={name}: it compares the samples of "
            f"a prompt, and a group below {estimator.min_group} has no baseline, so every "
            f"advantage would be 0; use at least {estimator.min_group} (8 is customary)"
        )
    provided = {"values", "old_logprobs", "sum_pi_squared", "greedy_rewards", "anchors"}
    if config.rollout.tree.rounds:
        provided.add("tree")
        if "tree" not in estimator.needs:
            yield (
                f"rollout.tree.rounds={config.rollout.tree.rounds} with {key}.advantage={name}: it "
                "takes the samples of a prompt for independent, but branches share the turns "
                "before them; use an estimator for trees (algo.advantage=tree), or "
                "rollout.tree.rounds=0"
            )
    for need in sorted(estimator.needs - provided):
        yield (
            f"{key}.advantage={name} needs {NEEDS[need]}, which this run does not have; "
            f"{_FIX[need]}"
        )
    if estimator.min_group < 2:
        yield from _ungrouped(name, config, key)


def _weights(weights: Mapping[str, float], reward: RewardConfig, *, key: str) -> Iterable[str]:
    for name, weight in weights.items():
        if not abs(weight) <= LARGEST_WEIGHT:
            yield (
                f"{key}.reward_weights.{name}={weight}: must be a finite number of at most "
                f"{LARGEST_WEIGHT:g} (1 is customary)"
            )
    if not any(weights.values()):
        yield f"{key}.reward_weights={dict(weights)}: every weight is 0, so no reward is left"
    if reward.replaces_rubric:
        parts = [part for _, part in part_configs(reward)]
        named = {part.name or part.id: part.weight for part in parts}
        complete = all(part.id in SINGLE_VALUED for part in parts)
        yield from named_reward_problems(weights, named, key=key, complete=complete)


def _arguments(estimator: Any, credit: CreditConfig, key: str) -> Iterable[str]:
    """Arguments that the estimator does not take, and discounts that are none."""
    try:
        takes = list(inspect.signature(estimator).parameters)
    except (TypeError, ValueError):  # written in C
        takes = []
    if not takes:
        yield (
            f"{key}.advantage={credit.advantage!r}: an estimator is a function of a batch, "
            "estimate(batch, *, ...)"
        )
        return
    kwargs = dict(credit.advantage_kwargs)
    for name in _DISCOUNTS:
        value = getattr(credit, name)
        if value is None:
            continue
        if name in kwargs:
            yield f"{key}.{name} and {key}.advantage_kwargs.{name}: set one of them"
        elif name not in takes:
            yield (
                f"{key}.{name}={value}: {credit.advantage} takes no {name} (it takes: "
                f"{', '.join(takes[1:]) or 'nothing'}), so it would change nothing; leave it out "
                f"({key}.{name}=null), or choose an estimator that discounts, such as turn_return"
            )
        elif not 0 <= value <= 1:
            yield f"{key}.{name}={value}: must be between 0 and 1"
    others = [
        p.name
        for p in list(inspect.signature(estimator).parameters.values())[1:]
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty and p.name not in kwargs
    ]
    if others:
        yield (
            f"{key}.advantage={credit.advantage!r} takes {', '.join(takes)}: an estimator is "
            "estimate(batch, *, ...), where batch is a CreditBatch and the rest are settings with "
            f"defaults; {', '.join(others)} cannot be filled"
        )
        return
    own = f"{key}.advantage_kwargs"
    discounts = {n: float(getattr(credit, n) or 0) for n in _DISCOUNTS if n in takes}
    try:
        check_kwargs(estimator, {**discounts, **kwargs}, key=own, given=takes[:1])
    except AgentRLError as error:
        yield str(error)
        return
    for name, value in kwargs.items():
        if not isinstance(value, float | int):
            continue
        if not abs(value) <= LARGEST_WEIGHT:
            yield f"{own}.{name}={value}: must be a finite number of at most {LARGEST_WEIGHT:g}"
        elif name in _SHARES and not 0 <= value <= 1:
            yield f"{own}.{name}={value}: must be between 0 and 1"


def _ungrouped(name: str, config: Config, key: str) -> Iterable[str]:
    """Choices between groups, where the estimator compares none."""
    groups = config.algo.groups
    used = {
        f"algo.groups.variance_top_p={groups.variance_top_p}": groups.variance_top_p < 1,
        f"algo.groups.refill={str(groups.refill).lower()}": groups.refill,
    }
    for setting in (setting for setting, is_on in used.items() if is_on):
        yield (
            f"{setting} with {key}.advantage={name}: it chooses groups by their rewards, which "
            f"{name} does not compare within groups; leave it out, or use grpo"
        )
