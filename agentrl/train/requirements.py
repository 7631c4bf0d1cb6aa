"""What the settings of a run ask of its environments: seen before a model loads.

:mod:`agentrl.config` has judged the settings by themselves; here there are instances to ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.algo.config import CreditConfig
from agentrl.algo.credit import get_estimator
from agentrl.algo.reward_weights import named_reward_problems
from agentrl.env.base import Env
from agentrl.errors import ConfigError
from agentrl.rollout.tree import refuse_unbranchable

if TYPE_CHECKING:
    from agentrl.config.schema import Config
    from agentrl.train.environments import Environment


def refuse_unmet(
    environments: Sequence[Environment], config: Config, credit: Mapping[str, CreditConfig]
) -> None:
    """Refuse environments that cannot feed the run's estimators, or that name other rewards.

    Args:
        credit: by the name of the environment.

    Raises:
        ConfigError: with every problem found, one a line.
    """
    problems: list[str] = []
    for item in environments:
        chosen = credit[item.name]
        key = f"{item.entry.key}.algo" if item.entry.algo else "algo"
        problems += _anchors(item, chosen, key)
        if not config.reward.replaces_rubric:
            problems += _rewards(item, chosen, key)
        if config.rollout.tree.rounds:
            try:
                refuse_unbranchable(item.env, item.toolbox, env_id=item.name)
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _anchors(item: Environment, credit: CreditConfig, key: str) -> list[str]:
    cls = type(item.env)
    needs = get_estimator(credit.advantage).needs
    if "anchors" not in needs or getattr(cls, "anchor", Env.anchor) is not Env.anchor:
        return []
    return [
        f"{key}.advantage={credit.advantage} compares turns that start from equal states, but "
        f"environment {item.name!r} has no anchor(): implement it in {cls.__qualname__} (a text "
        "that is equal for equal states), or use an estimator without, such as turn_return"
    ]


def _rewards(item: Environment, credit: CreditConfig, key: str) -> list[str]:
    """Parts that the environment's own rubric does not give, where it says which it gives."""
    rubric: Any = item.env.rubric
    if rubric is None:  # then the outcome is 0, and has no parts
        return list(named_reward_problems(credit.reward_weights, {}, key=key, complete=True))
    parts = getattr(rubric, "parts", ())
    named = {part.name: part.weight for part in parts if hasattr(part, "weight")}
    return list(named_reward_problems(credit.reward_weights, named, key=key, complete=False))
