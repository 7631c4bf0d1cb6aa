"""What a run takes of a cluster, and settings of it that cannot work together."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from agentrl.dist.cluster_config import ClusterConfig, address_problems
from agentrl.dist.config import PlacementConfig, PoolConfig
from agentrl.dist.layout import MAX_RANKS
from agentrl.dist.placement import DEFAULT_POOL, MIN_SHARE, count, pool_problems
from agentrl.dist.weight_sync.config import AUTO, WeightSyncConfig
from agentrl.extras import missing_extra

if TYPE_CHECKING:
    from agentrl.config.schema import Config

LOCAL, RAY = "local", "ray"
REWARD_MODEL = "reward_model"
"""The role that may have a pool of its own; without one, whoever plays holds its models."""
_RANK_SHARE = 0.6
"""Of a GPU that a training rank shares with rollout workers. Above a half, so that Ray never gives
two ranks the same one; memory is not divided by it, since they take turns."""
_MAX_WORKERS = 4096
_MAX_CPUS = 4096
_MAX_BUCKET_MB = 1 << 20
_PER_PROCESS = ("address", "gpus", "cpus_per_rollout_worker", "gpus_per_rollout_worker")
_PER_PROCESS += ("runtime_env",)
"""Settings of ``cluster`` that say what processes get, of which one process reads nothing."""


@dataclass(slots=True, frozen=True)
class RolloutShare:
    """What Ray reserves for one rollout worker."""

    cpus: float
    gpus: float
    shared: bool
    """On a GPU that a training rank has too."""


def placement_of(config: Config) -> PlacementConfig:
    """Return which role lives in which pool, with the ranks that ``cluster.gpus`` asks for."""
    pools = dict(config.placement.pools)
    if config.cluster.gpus and DEFAULT_POOL not in pools:
        alone = config.cluster.gpus_per_rollout_worker is not None
        pools[DEFAULT_POOL] = PoolConfig(
            ranks=config.cluster.gpus, gpus_per_rank=1.0 if alone else _RANK_SHARE
        )
    return replace(config.placement, pools=pools)


def rollout_share(config: Config) -> RolloutShare:
    """Return what each of ``rollout.workers`` takes."""
    cpus, gpus = config.cluster.cpus_per_rollout_worker, config.cluster.gpus_per_rollout_worker
    if gpus is not None:
        return RolloutShare(cpus, gpus, shared=False)
    pool = placement_of(config).pools.get(DEFAULT_POOL, PoolConfig())
    left = 1.0 - pool.gpus_per_rank
    if not pool.gpus_per_rank or left <= 0:  # CPUs only, or ranks that leave nothing
        return RolloutShare(cpus, 1.0 if pool.gpus_per_rank else 0.0, shared=False)
    on_each = -(-config.rollout.workers // pool.ranks)
    return RolloutShare(cpus, math.floor(1000 * left / on_each) / 1000, shared=True)


def gpu_shortage(config: Config, *, here: int) -> str | None:
    """Return what to say where Ray is to be started on a machine with too few GPUs.

    Args:
        here: GPUs that torch sees on this machine.
    """
    if config.cluster.kind != RAY or config.cluster.address is not None:
        return None
    share, pools = rollout_share(config), placement_of(config).pools
    # Ranks of a pool never share a GPU.
    needed = sum(pool.ranks * math.ceil(pool.gpus_per_rank) for pool in pools.values())
    needed += 0 if share.shared else math.ceil(config.rollout.workers * share.gpus)
    if needed <= here:
        return None
    keys = [f"cluster.gpus={config.cluster.gpus}"] if config.cluster.gpus else []
    keys += [
        f"placement.pools.{name}.gpus_per_rank={pool.gpus_per_rank:g}"
        for name, pool in config.placement.pools.items()
        if pool.gpus_per_rank
    ]
    if config.cluster.gpus_per_rollout_worker:
        keys.append(f"cluster.gpus_per_rollout_worker={config.cluster.gpus_per_rollout_worker:g}")
    ranks = pools.get(DEFAULT_POOL, PoolConfig()).ranks
    return (
        f"{' with '.join(keys)} takes {count(needed, 'GPU')}, and this machine has {here or 'none'}"
        f": give cluster.address of a cluster that has them, or leave out what asks for GPUs and "
        f"train on CPUs with cluster=ray placement.pools.{DEFAULT_POOL}.ranks={ranks}"
    )


def cluster_problems(config: Config) -> Iterator[str]:
    """Say what of ``cluster`` and of the number of processes cannot work."""
    cluster = config.cluster
    yield from _weight_sync_problems(config.weight_sync)
    if cluster.kind == LOCAL:
        yield from _local_problems(config)
        return
    if cluster.kind != RAY:
        return  # told among the choices
    if importlib.util.find_spec("ray") is None:
        yield missing_extra("ray", "cluster=ray")
    if not 1 <= config.rollout.workers <= _MAX_WORKERS:
        yield f"rollout.workers={config.rollout.workers}: must be between 1 and {_MAX_WORKERS}"
    port, last = config.rollout.serving.metrics_port, 65536 - config.rollout.workers
    if 0 <= last < port <= 65535:
        yield (
            f"rollout.serving.metrics_port={port} with rollout.workers={config.rollout.workers}: "
            f"each takes the next port; use at most {last}"
        )
    if not 0 <= cluster.gpus <= MAX_RANKS:
        yield f"cluster.gpus={cluster.gpus}: must be at least 0, and at most {MAX_RANKS}"
    if cluster.max_restarts < 0:
        yield f"cluster.max_restarts={cluster.max_restarts}: must be at least 0"
    yield from address_problems("cluster.address", cluster.address)
    for name, pool in config.placement.pools.items():
        yield from pool_problems(f"placement.pools.{name}", pool)
    if not MIN_SHARE <= cluster.cpus_per_rollout_worker <= _MAX_CPUS:
        yield (
            f"cluster.cpus_per_rollout_worker={cluster.cpus_per_rollout_worker:g}: must be between "
            f"{MIN_SHARE:g} and {_MAX_CPUS}"
        )
    if not (cluster.start_timeout_s > 0 and math.isfinite(cluster.start_timeout_s)):
        yield (
            f"cluster.start_timeout_s={cluster.start_timeout_s:g}: must be a finite number above 0"
        )
    yield from _gpu_problems(config)
    home = config.placement.roles.get(REWARD_MODEL)
    others = [role for role, name in config.placement.roles.items() if name == home]
    if home is not None and (home == DEFAULT_POOL or len(others) > 1):
        yield (
            f"placement.roles.{REWARD_MODEL}={home!r}: reward models need a pool of their own; add "
            f"placement.pools.judge.ranks=1 and set placement.roles.{REWARD_MODEL}=judge, or leave "
            "the role out: rollout workers then hold them"
        )


def _weight_sync_problems(config: WeightSyncConfig) -> Iterator[str]:
    if not (config.timeout_s > 0 and math.isfinite(config.timeout_s)):
        yield f"weight_sync.timeout_s={config.timeout_s:g}: must be a finite number above 0"
    if not 1 <= config.bucket_mb <= _MAX_BUCKET_MB:
        yield (
            f"weight_sync.bucket_mb={config.bucket_mb}: must be between 1 and {_MAX_BUCKET_MB}; a "
            "smaller model is one bucket"
        )


def _transport_problems(config: Config) -> Iterator[str]:
    """Say what the settings alone tell; who lies where is known when all processes are placed."""
    transport = config.weight_sync.transport
    share = rollout_share(config)
    home = config.placement.roles.get("actor", DEFAULT_POOL)
    trains_on_gpus = placement_of(config).pools.get(home, PoolConfig()).gpus_per_rank > 0
    problem = None
    if transport in ("cuda_ipc", "nccl") and not (trains_on_gpus and share.gpus > 0):
        problem = "needs GPUs for training ranks (cluster.gpus) and for rollout workers"
    elif transport == "nccl" and share.shared and home == DEFAULT_POOL:
        problem = (
            "rollout workers share the GPUs of training ranks, which nccl cannot use; give them "
            "their own with cluster.gpus_per_rollout_worker=1"
        )
    elif transport == "shm" and share.gpus > 0:
        problem = "is between CPUs, and rollout workers are on GPUs"
    if problem is not None:
        yield f"weight_sync.transport={transport}: {problem}, or leave it at auto"


def _local_problems(config: Config) -> Iterator[str]:
    if config.weight_sync.transport != AUTO:
        yield (
            f"weight_sync.transport={config.weight_sync.transport}: it is between processes of a "
            "cluster; add cluster=ray, or leave it at auto"
        )
    found: dict[str, tuple[Any, Any]] = {"rollout.workers": (config.rollout.workers, 1)}
    for name in _PER_PROCESS:
        found[f"cluster.{name}"] = getattr(config.cluster, name), getattr(ClusterConfig(), name)
    for name, pool in config.placement.pools.items():
        for field in fields(PoolConfig):
            now = getattr(pool, field.name)
            found[f"placement.pools.{name}.{field.name}"] = now, field.default
    found["placement.roles"] = dict(config.placement.roles), {}
    for key, (value, default) in found.items():
        if value != default:
            yield f"{key}={value!r}: one process is all that cluster=local has; add cluster=ray"


def _gpu_problems(config: Config) -> Iterator[str]:
    gpus = config.cluster.gpus_per_rollout_worker
    is_share = gpus is None or gpus == 0 or MIN_SHARE <= gpus <= 1
    if gpus is not None and not (is_share or (1 < gpus < math.inf and gpus == int(gpus))):
        yield (
            f"cluster.gpus_per_rollout_worker={gpus:g}: write 0, a part of one GPU, or a whole "
            "number; null shares those of the training ranks"
        )
    if DEFAULT_POOL in config.placement.pools and config.cluster.gpus:
        yield (
            f"cluster.gpus={config.cluster.gpus} with placement.pools.{DEFAULT_POOL}: both say how "
            "many ranks train; leave one of them out"
        )
    pool = placement_of(config).pools.get(DEFAULT_POOL, PoolConfig())
    if any(pool_problems("", pool)) or config.rollout.workers < 1:
        return  # told by its own name; what follows divides by it
    yield from _transport_problems(config)
    if rollout_share(config).shared and config.rollout.max_staleness:
        yield (
            f"rollout.max_staleness={config.rollout.max_staleness} with rollout workers that share "
            "the GPUs of the training ranks: while those train, nothing can be sampled; set "
            "cluster.gpus_per_rollout_worker=1 for GPUs of their own, or max_staleness=0"
        )
    if config.model.device.startswith("cuda"):
        yield (
            f"model.device={config.model.device!r} with cluster=ray: Ray says which GPU a process "
            "has; leave it at auto, and set cluster.gpus"
        )
