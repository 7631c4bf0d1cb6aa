"""Which roles share which processes, and whether a cluster has room for them. Imports no Ray."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentrl.dist.config import PlacementConfig, PoolConfig
from agentrl.dist.layout import MAX_RANKS
from agentrl.errors import ConfigError

ROLES = ("actor", "critic", "reference", "reward_model")
"""What can be placed."""
DEFAULT_POOL = "train"
"""Where a role is that ``placement.roles`` does not name."""
MIN_SHARE = 1e-4
"""Of a CPU or GPU: Ray counts them in ten-thousandths."""
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(slots=True, frozen=True, kw_only=True)
class PoolPlan:
    """A pool that a run uses: one group of processes."""

    name: str
    pool: PoolConfig
    roles: tuple[str, ...]
    """On every rank of it, in this order."""


@dataclass(slots=True, frozen=True, kw_only=True)
class NodeResources:
    """What a machine of a cluster has in all."""

    name: str
    cpus: float
    gpus: float


def plan_pools(config: PlacementConfig, roles: Sequence[str]) -> list[PoolPlan]:
    """Return the pools that a run needs, in the order of their first role.

    Args:
        config: where roles live.
        roles: that the run has.

    Raises:
        ConfigError: see :func:`placement_problems`.
    """
    if problems := list(placement_problems(config, roles)):
        raise ConfigError("\n".join(problems))
    members: dict[str, list[str]] = {}
    for role in roles:
        members.setdefault(_pool_of(config, role), []).append(role)
    pools = _pools(config)
    return [
        PoolPlan(name=name, pool=pools[name], roles=tuple(found)) for name, found in members.items()
    ]


def placement_problems(config: PlacementConfig, roles: Sequence[str]) -> Iterator[str]:
    """Say what of a placement cannot work, whatever the cluster.

    Args:
        config: where roles live.
        roles: that the run has; what is said of others has no effect, and is refused.
    """
    pools = _pools(config)
    for role, pool in config.roles.items():
        if role not in ROLES:
            yield f"placement.roles.{role}: there is no such role; {_choose(role, ROLES)}"
        elif role not in roles:
            yield (
                f"placement.roles.{role}={pool!r}: this run has no {role} (it has "
                f"{', '.join(roles)}); remove it, or turn on what needs one"
            )
        if pool not in pools:
            yield (
                f"placement.roles.{role}={pool!r}: there is no such pool; "
                f"{_choose(pool, tuple(pools))}, or add placement.pools.{pool}"
            )
    used = {_pool_of(config, role) for role in roles}
    for name, pool in config.pools.items():
        if name not in used:
            yield (
                f"placement.pools.{name}: no role of this run lives there; remove it, or set "
                f"placement.roles.ROLE={name} for one of {', '.join(roles)}"
            )
        yield from pool_problems(f"placement.pools.{name}", pool)


def capacity_problems(
    plans: Sequence[PoolPlan], nodes: Sequence[NodeResources], *, other_gpus: float = 0.0
) -> Iterator[str]:
    """Say where a cluster is too small, empty as it may be.

    Args:
        plans: of the run.
        nodes: of the cluster.
        other_gpus: that the run takes beside its pools, such as for rollouts.
    """
    is_short = False
    for kind, other in (("gpus", other_gpus), ("cpus", 0.0)):
        each = f"{kind}_per_rank"
        need = sum(plan.pool.ranks * getattr(plan.pool, each) for plan in plans) + other
        have = sum(getattr(node, kind) for node in nodes)
        if need > have:
            parts = [f"{p.name} {p.pool.ranks} x {getattr(p.pool, each):g}" for p in plans]
            parts += [f"rollouts {other:g}"] if other else []
            is_short = True
            lower = "cluster.gpus, placement.pools.POOL.ranks" if kind == "gpus" else "its ranks"
            yield (
                f"placement needs {count(need, kind.upper()[:-1])} ({', '.join(parts)}), the "
                f"cluster has {have:g}; lower {lower} or {each}, let roles share a pool, or add "
                "nodes"
            )
    if is_short:  # that no node has room follows from it
        return
    for plan in plans:
        yield from _node_problems(plan, nodes)


def count(number: float, what: str) -> str:
    """Return ``1 CPU``, ``2 CPUs``, ``0.5 CPUs``."""
    return f"{number:g} {what}{'' if number == 1 else 's'}"


def _node_problems(plan: PoolPlan, nodes: Sequence[NodeResources]) -> Iterator[str]:
    pool, key = plan.pool, f"placement.pools.{plan.name}"
    together = pool.ranks if pool.strategy == "STRICT_PACK" else 1
    fits = [
        node
        for node in nodes
        if node.cpus >= together * pool.cpus_per_rank and node.gpus >= together * pool.gpus_per_rank
    ]
    if not fits:
        yield (
            f"{key}: no node has {count(together * pool.cpus_per_rank, 'CPU')} and "
            f"{count(together * pool.gpus_per_rank, 'GPU')} for {together} of its ranks; lower "
            + ("ranks, or use the strategy PACK" if together > 1 else "what a rank takes")
        )
    if pool.strategy == "STRICT_SPREAD" and pool.ranks > len(nodes):
        yield (
            f"{key}.strategy='STRICT_SPREAD': {pool.ranks} ranks need as many nodes, there are "
            f"{len(nodes)}; lower ranks, or use SPREAD"
        )


def pool_problems(key: str, pool: PoolConfig) -> Iterator[str]:
    """Say what of a pool's settings cannot work, whatever lives there.

    Args:
        key: of the pool.
        pool: its settings.
    """
    if not 1 <= pool.ranks <= MAX_RANKS:
        yield f"{key}.ranks={pool.ranks}: must be at least 1, and at most {MAX_RANKS}"
    if not MIN_SHARE <= pool.cpus_per_rank < math.inf:
        yield (
            f"{key}.cpus_per_rank={pool.cpus_per_rank:g}: must be above 0, such as 1 (at least "
            f"{MIN_SHARE:g})"
        )
    if pool.gpus_per_rank != 0 and not MIN_SHARE <= pool.gpus_per_rank <= 1:
        yield (
            f"{key}.gpus_per_rank={pool.gpus_per_rank:g}: a rank uses one GPU, or part of one; "
            f"write 1, and raise {key}.ranks for more"
        )
    elif 0 < pool.gpus_per_rank <= 0.5 and pool.ranks > 1:
        yield (
            f"{key}.gpus_per_rank={pool.gpus_per_rank:g} with ranks={pool.ranks}: two ranks could "
            "get the same GPU, which NCCL does not join; write more than 0.5, or ranks=1"
        )
    if pool.strategy not in STRATEGIES:
        yield f"{key}.strategy={pool.strategy!r}: {_choose(pool.strategy, STRATEGIES)}"


def _pools(config: PlacementConfig) -> dict[str, PoolConfig]:
    return {DEFAULT_POOL: PoolConfig(), **config.pools}


def _pool_of(config: PlacementConfig, role: str) -> str:
    return config.roles.get(role, DEFAULT_POOL)


def _choose(got: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(got.lower(), [name.lower() for name in names], n=1)
    chosen = [name for name in names if name.lower() in close] or list(names)
    return f"write {' or '.join(chosen)}"
