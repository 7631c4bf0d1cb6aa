"""What ``algo.reward_weights`` may name. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from agentrl.types import BUILT_IN_REWARDS


def named_reward_problems(
    weights: Mapping[str, float], parts: Mapping[str, float], *, key: str, complete: bool
) -> Iterable[str]:
    """Yield what is wrong with the parts of a rubric that ``reward_weights`` names.

    Args:
        parts: the rubric's own parts, name -> weight in the outcome.
        key: where the settings stand, for messages.
        complete: there can be no others; else only what looks misspelt is refused.
    """
    for name, weight in weights.items():
        if name in BUILT_IN_REWARDS:
            continue
        owner = name.split("/")[0]
        close = difflib.get_close_matches(name, [*parts, *BUILT_IN_REWARDS], n=1, cutoff=0.75)
        if owner not in parts and (complete or close):
            hint = f"did you mean {close[0]}? " if close else ""
            yield (
                f"{key}.reward_weights.{name}={weight}: no part of the reward has that name; "
                f"{hint}known: {', '.join([*BUILT_IN_REWARDS, *parts])}"
            )
        elif weight and parts.get(name) and weights.get("outcome", 0.0):
            yield (
                f"{key}.reward_weights.{name}={weight} with outcome={weights['outcome']}: the "
                f"outcome holds {name!r} already (weight {parts[name]}), so it would count twice; "
                f"set {key}.reward_weights.outcome=0 and weigh every part by its name, or leave "
                f"{name} out"
            )
