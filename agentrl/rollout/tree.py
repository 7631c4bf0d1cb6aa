"""Tree sampling: members of a group that branch off from each other.

The scheme is that of Tree-GRPO (arXiv 2509.21240), with the number of leaves given: a group of
``n`` members has ``trunks`` trees; then, in each of ``rounds`` rounds, members begin at states that
their tree already holds. A node is a state in which the model spoke. It belongs to the episode that
reached it first, so a branch brings no second node for the state that it began at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.agent.branch import BranchPoint
from agentrl.env.base import missing_for_branching
from agentrl.errors import ConfigError
from agentrl.rollout.config import TreeConfig
from agentrl.seeding import derive_seed
from agentrl.tool.binding import Toolbox


def deal_members(num_samples: int, config: TreeConfig) -> list[list[list[int]]]:
    """Deal the members of a group to trees and rounds.

    Returns:
        For every tree its rounds, for every round the sample indices played in it. The first round
        is the trunk alone. Without branching every member is a tree of its own.

    Raises:
        ConfigError: a tree or a round would get no branch.
    """
    if problem := config.problem(num_samples):
        raise ConfigError(problem)
    if not config.rounds:
        return [[[index]] for index in range(num_samples)]
    trees = [[[trunk], *([] for _ in range(config.rounds))] for trunk in range(config.trunks)]
    num_branches = num_samples - config.trunks
    for branch in range(num_branches):
        round_ = 1 + branch * config.rounds // num_branches
        trees[branch % config.trunks][round_].append(config.trunks + branch)
    return [[members for members in rounds if members] for rounds in trees]


def choose_node(nodes: Sequence[BranchPoint], seed: int) -> BranchPoint | None:
    """Draw the node that an episode begins at; None (the start) where there are none.

    Args:
        nodes: of the episodes that stand; a failed one has none to give.
        seed: of the episode.
    """
    return nodes[derive_seed(seed, "node") % len(nodes)] if nodes else None


def refuse_unbranchable(env: Any, toolbox: Toolbox, *, env_id: str) -> None:
    """Refuse an environment whose episodes cannot branch.

    Raises:
        ConfigError: it has no ``snapshot`` or ``restore``, or a tool that keeps state.
    """
    where = f"rollout.tree.rounds is above 0, but environment {env_id!r}"
    if missing := missing_for_branching(type(env)):
        raise ConfigError(
            f"{where} has no {' and no '.join(missing)}: implement snapshot() and restore(state) "
            f"in {type(env).__qualname__}, or set rollout.tree.rounds=0"
        )
    stateful = [name for name, binding in toolbox.bindings.items() if not binding.is_stateless]
    if stateful:
        raise ConfigError(
            f"{where} has the tools {', '.join(stateful)}, which are no plain functions: they keep "
            "state from call to call that a snapshot of the environment does not hold. Give tools "
            "that are functions, or set rollout.tree.rounds=0"
        )
