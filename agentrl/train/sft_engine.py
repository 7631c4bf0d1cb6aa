"""The training engine of supervised training: in this process, or over ranks on Ray."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from agentrl.dist.build import EngineSpec, build_engine
from agentrl.dist.engine_worker import EngineWorker
from agentrl.dist.group_engine import GroupEngine
from agentrl.dist.placement import count
from agentrl.dist.stored_model import StoredModel
from agentrl.dist.worker_group import LocalWorkerGroup
from agentrl.errors import ConfigError
from agentrl.extras import missing_extra
from agentrl.model.load import LoadedModel, load_model
from agentrl.train.sft_config import RAY, SFTConfig

ROLE = "actor"


@contextmanager
def local_engine(
    config: SFTConfig, model: LoadedModel, *, total_steps: int
) -> Iterator[GroupEngine]:
    """Train ``model`` in this process.

    Raises:
        ModelError, ConfigError: the model cannot be trained, or not with these settings.
    """
    group = LocalWorkerGroup(
        EngineWorker,
        {ROLE: partial(build_engine, _spec(config, model, total_steps))},
        device=model.model.device,
    )
    try:
        yield GroupEngine(group, ROLE)
    finally:
        group.shutdown()


@contextmanager
def open_engine(config: SFTConfig, path: str, *, total_steps: int) -> Iterator[GroupEngine]:
    """Train the model at ``path``, where ``config`` says.

    Raises:
        ConfigError: Ray is missing or does not answer, or has not what the ranks need.
        WorkerError: a rank could not start.
        ModelError: the model cannot be trained.
    """
    opened = _ray_engine if config.cluster == RAY else _engine_here
    with opened(config, path, total_steps) as engine:
        yield engine


@contextmanager
def _engine_here(config: SFTConfig, path: str, total_steps: int) -> Iterator[GroupEngine]:
    with local_engine(config, load_model(path), total_steps=total_steps) as engine:
        yield engine


@contextmanager
def _ray_engine(config: SFTConfig, path: str, total_steps: int) -> Iterator[GroupEngine]:
    """This process reads the model and stores it for the ranks, whose files need not have it."""
    try:
        from agentrl.dist.ray_cluster import ray_cluster
        from agentrl.dist.ray_group import RayOptions, RayWorkerGroup
        from agentrl.dist.ray_transport import store
    except ModuleNotFoundError as error:
        raise ConfigError(missing_extra("ray", "cluster=ray")) from error
    pool = config.pool()
    needed, here = pool.ranks * math.ceil(pool.gpus_per_rank), torch.cuda.device_count()
    if config.address is None and needed > here:
        raise ConfigError(
            f"ranks={pool.ranks} gpus_per_rank={pool.gpus_per_rank:g} takes "
            f"{count(needed, 'GPU')}, and this machine has {here or 'none'}: give address of a "
            "cluster that has them, or gpus_per_rank=0 to train on CPUs"
        )
    cpus = max(len(os.sched_getaffinity(0)), math.ceil(pool.ranks * pool.cpus_per_rank))
    with ray_cluster(config.address, num_cpus=cpus, timeout_s=config.start_timeout_s):
        model = store(load_model(path, device="cpu"))
        group = RayWorkerGroup(
            EngineWorker,
            {ROLE: partial(build_engine, _spec(config, model, total_steps))},
            pool=pool,
            options=RayOptions(start_timeout_s=config.start_timeout_s),
        )
        try:
            yield GroupEngine(group, ROLE)
        finally:
            group.shutdown()


def _spec(config: SFTConfig, model: LoadedModel | StoredModel, total_steps: int) -> EngineSpec:
    return EngineSpec(
        role=ROLE,
        model=model,
        config=config.engine_config(),
        total_updates=total_steps,
        lora=config.lora,
        seed=config.seed,
    )
