"""What a configuration asks of this machine's memory: read, planned, shown, and refused in time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.config.cluster import RAY, placement_of, rollout_share
from agentrl.config.engines import uses_critic
from agentrl.config.schema import Config
from agentrl.dist.cluster_config import ClusterConfig
from agentrl.dist.config import (
    EngineConfig,
    LoraConfig,
    PlacementConfig,
    PoolConfig,
    Precision,
)
from agentrl.dist.machine import Gpu, gpus, host_memory
from agentrl.dist.memory import plan_memory
from agentrl.dist.memory_needs import MASTER_BYTES, Device, Memory, ModelNeed, Request, SamplerNeed
from agentrl.dist.memory_table import Planned, as_json, show
from agentrl.dist.model_shape import ModelShape, model_shape
from agentrl.dist.placement import DEFAULT_POOL, PoolPlan, plan_pools
from agentrl.errors import ConfigError, MemoryPlanError, ModelError
from agentrl.memory_buckets import plan_buckets
from agentrl.model.describe import model_config
from agentrl.model.tiny import tiny_config
from agentrl.reward.checks import part_configs
from agentrl.rollout.engines.config import HFEngineConfig, VLLMEngineConfig
from agentrl.telemetry.files import atomic_write
from agentrl.train.config import TINY
from agentrl.train.open_model import MODEL_FOLDER, is_run

PLAN_FILE = "memory_plan.json"
"""In a run directory."""
_MIB, _GIB = 2**20, 2**30
_HOST_PROCESS_BYTES = 700 * _MIB
"""Python with torch and transformers loaded, and a driver's own data."""
_GPU_PROCESS_BYTES = _GIB
"""The context of CUDA, workspaces of its libraries, and NCCL's buffers."""
_CLASSIFIER = "hf_classifier"
_ROLLOUT_POOL = "rollout"


def plan_run(config: Config) -> Planned:
    """Plan the memory of a run. Reads the configuration of its models, and no weights.

    Engines on a GPU that trains too give it up meanwhile where ``rollout.sleep_level`` says so, or
    says nothing and both do not fit beside each other, unless they sample at all times.
    """
    rollout = config.rollout
    if not shares_gpu(config) or rollout.sleep_level is not None or rollout.runs_ahead:
        return _plan(config, sleeps=shares_gpu(config) and bool(config.rollout.sleep_level))
    awake = _plan(config, sleeps=False)
    known = awake.plan is not None and all(
        found.device.capacity is not None for found in awake.plan.devices
    )
    return awake if known and awake.refusal is None else _plan(config, sleeps=True)


def sleep_level(config: Config, planned: Planned) -> int:
    """Return what engines give up while training has their GPU; see ``rollout.sleep_level``.

    Raises:
        ConfigError: they are to sleep while prompts are sampled.
    """
    rollout = config.rollout
    if rollout.sleep_level is not None:
        level = rollout.sleep_level if shares_gpu(config) else 0
        if level and rollout.runs_ahead:
            raise ConfigError(
                f"rollout.sleep_level={level} with rollout.max_staleness={rollout.max_staleness} "
                f"and rollout.oversubscribe={rollout.oversubscribe}: prompts are sampled while a "
                "step trains, which engines that sleep cannot; set rollout.sleep_level=0, or "
                "rollout.max_staleness=0 without rollout.oversubscribe"
            )
        return level
    sampler = None if planned.request is None else planned.request.sampler
    return 2 if sampler is not None and sampler.sleeps else 0


def shares_gpu(config: Config) -> bool:
    """Whether engines sample on a GPU that trains too."""
    if config.cluster.kind == RAY:
        return rollout_share(config).shared
    return wants_gpu(config) and bool(gpus())


def _plan(config: Config, *, sleeps: bool) -> Planned:
    try:
        shapes = _Shapes(config)
        actor = shapes.of(config.model.path)
    except ModelError as error:
        return Planned(request=None, plan=None, why_not=str(error))
    on_gpus = gpus() if wants_gpu(config) else []
    notes: list[str] = []
    if actor.kept is None:
        notes.append(f"activations are not planned: {actor.why_not}")
    buckets = plan_buckets(config, actor, on_gpu=bool(on_gpus))
    models = [
        replace(need, bucket_bytes=buckets.sending if need.role == "actor" else 0)
        for need in _models(config, shapes, actor, on_gpu=bool(on_gpus), notes=notes)
    ]
    sampler = _sampler(config, actor, notes, sleeps=sleeps, on_gpus=on_gpus)
    if sampler is not None:
        sampler = replace(sampler, bucket_bytes=buckets.receiving)
    devices = list(_devices(config, models, sampler, on_gpus))
    request = Request(models=models, sampler=sampler, devices=devices)
    return Planned(request=request, plan=plan_memory(request), notes=tuple(notes))


def plan_training(
    path: str, settings: EngineConfig, lora: LoraConfig, pool: PoolConfig, *, longest_row: int
) -> Planned:
    """Plan the memory of training one model that nobody samples.

    Raises:
        ModelError: nothing at ``path`` that can be read.
    """
    shape = model_shape(model_config(path))
    kind = "local" if pool.ranks == 1 and not pool.gpus_per_rank else RAY
    config = Config(
        cluster=ClusterConfig(kind=kind), placement=PlacementConfig(pools={DEFAULT_POOL: pool})
    )
    on_gpus = gpus() if wants_gpu(config) else []
    need = ModelNeed(
        role="actor",
        shape=shape,
        settings=settings,
        settings_key="",
        num_ranks=pool.ranks,
        lora_rank=lora.rank,
        master_bytes=2 if lora.rank and settings.precision is Precision.bf16 else 4,
        longest_row=longest_row,
        on_gpu=bool(on_gpus),
    )
    devices = list(_devices(config, [need], None, on_gpus))
    request = Request(models=[need], sampler=None, devices=devices)
    notes = () if shape.kept else (f"activations are not planned: {shape.why_not}",)
    return Planned(request=request, plan=plan_memory(request), notes=notes)


def check_memory(config: Config, *, quiet: bool, console: Console | None = None) -> Planned:
    """Show the plan of a run, and refuse it where it cannot fit. Called before weights load.

    Raises:
        MemoryPlanError: names what would make it fit.
    """
    return show_plan(plan_run(config), quiet=quiet, console=console)


def show_plan(planned: Planned, *, quiet: bool, console: Console | None = None) -> Planned:
    """Show a plan on standard error and return it, or refuse it.

    Raises:
        MemoryPlanError: it cannot fit; names what would make it fit.
    """
    if not quiet:
        show(planned, console or Console(stderr=True))
    if (problem := planned.refusal) is not None:
        raise MemoryPlanError(problem)
    return planned


def keep_plan(planned: Planned, run: Path) -> None:
    """Write ``memory_plan.json`` into a run's directory."""
    atomic_write(run / PLAN_FILE, json.dumps(as_json(planned), indent=1))


class _Shapes:
    """Shapes of models by path, each read once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._known: dict[str, ModelShape] = {}

    def of(self, path: str) -> ModelShape:
        """Return the shape of what ``model.path`` and its like name.

        Raises:
            ModelError: nothing there that can be read.
        """
        if path not in self._known:
            self._known[path] = model_shape(self._read(path))
        return self._known[path]

    def _read(self, path: str) -> Any:
        if path == TINY:
            return tiny_config(self._config.model.warm_start.vocab_size)
        return model_config(str(Path(path) / MODEL_FOLDER) if is_run(path) else path)


def wants_gpu(config: Config) -> bool:
    """Whether the run computes on GPUs where there are any."""
    if config.cluster.kind == RAY:
        return any(pool.gpus_per_rank for pool in placement_of(config).pools.values())
    return config.model.device != "cpu"


def _models(
    config: Config, shapes: _Shapes, actor: ModelShape, *, on_gpu: bool, notes: list[str]
) -> Iterator[ModelNeed]:
    pools = _pools(config)
    # What is frozen is kept as it is computed with.
    half = 2 if config.actor.precision is Precision.bf16 else 4

    def need(role: str, shape: ModelShape, **settings: Any) -> ModelNeed:
        pool = next(pool for pool in pools if role in pool.roles)
        defaults: dict[str, Any] = {
            "settings": config.actor,
            "longest_row": config.rollout.max_context_tokens,
        }
        return ModelNeed(
            role=role,
            shape=shape,
            pool=pool.name,
            num_ranks=pool.pool.ranks if config.cluster.kind == RAY else 1,
            on_gpu=on_gpu,
            **(defaults | settings),
        )

    for role in _roles(config):
        if role == "actor":
            half_base = half if config.lora.rank else 4
            yield need(role, actor, lora_rank=config.lora.rank, master_bytes=half_base)
        elif role == "critic":
            shape = shapes.of(config.critic.path or config.model.path)
            yield need(role, shape, settings=config.critic, has_vocabulary=False)
        elif role == "reference":
            yield need(role, actor, trained=False, master_bytes=half, settings_key="actor.")
        else:
            yield from _reward_models(config, shapes, need, notes)


def _roles(config: Config) -> list[str]:
    roles = ["actor"]
    if uses_critic(config):
        roles.append("critic")
    if config.algo.kl.coef and not config.lora.rank:  # the actor without its adapters is one
        roles.append("reference")
    if any(part.id == _CLASSIFIER for _, part in part_configs(config.reward)):
        roles.append("reward_model")
    return roles


def _pools(config: Config) -> list[PoolPlan]:
    return plan_pools(placement_of(config), _roles(config))


def _reward_models(
    config: Config, shapes: _Shapes, need: Any, notes: list[str]
) -> Iterator[ModelNeed]:
    for _, part in part_configs(config.reward):
        if part.id != _CLASSIFIER:
            continue
        try:
            shape = shapes.of(str(part.kwargs.get("model", "")))
        except ModelError as error:
            notes.append(f"the reward model is not planned: {error}")
            continue
        half = part.kwargs.get("dtype", "float32") != "float32"
        tokens = int(part.kwargs.get("max_tokens", 4096)) * int(part.kwargs.get("max_batch", 16))
        yield need(
            "reward_model",
            shape,
            settings=replace(config.actor, tokens_per_micro_batch=tokens),
            longest_row=0,
            trained=False,
            has_vocabulary=False,
            master_bytes=2 if half else 4,
        )


def _sampler(
    config: Config, shape: ModelShape, notes: list[str], *, sleeps: bool, on_gpus: list[Gpu]
) -> SamplerNeed | None:
    kind = config.rollout.engine.id
    is_ray = config.cluster.kind == RAY
    share = rollout_share(config) if is_ray else None
    workers = config.rollout.workers if is_ray else 1
    ranks = placement_of(config).pools.get(DEFAULT_POOL)
    in_train_pool = share is None or share.shared
    common: dict[str, Any] = {
        "shape": shape,
        "pool": DEFAULT_POOL if in_train_pool else _ROLLOUT_POOL,
        "num_processes": workers,
        "num_on_gpu": -(-workers // ranks.ranks) if ranks and share and share.shared else 1,
        "sleeps": sleeps,
        "max_context": config.rollout.max_context_tokens,
    }
    if kind == "hf":
        return _hf_sampler(config, common)
    if kind == "vllm":
        return _vllm_sampler(config, shape, common, on_gpus)
    if kind != "openai":  # that one is somebody else's
        notes.append(f"the rollout engine {kind!r} is not planned")
    return None


def _hf_sampler(config: Config, common: dict[str, Any]) -> SamplerNeed:
    known = {field.name for field in fields(HFEngineConfig)}
    given = {k: v for k, v in config.rollout.engine.kwargs.items() if k in known}
    engine = HFEngineConfig(**({"max_context": common["max_context"]} | given))
    common = common | {"max_context": engine.max_context}
    return SamplerNeed(
        **common,
        num_slots=engine.num_slots,
        session_cache_bytes=engine.session_cache_mb * _MIB,
        value_bytes=4 if engine.dtype == "float32" else 2,
    )


def _vllm_sampler(
    config: Config, shape: ModelShape, common: dict[str, Any], on_gpus: list[Gpu]
) -> SamplerNeed:
    """Return the need of vLLM, which claims its share when it starts."""
    rollout = config.rollout
    common = common | {"num_slots": 0, "session_cache_bytes": 0}
    if on_gpus:  # weights and processes are within the share
        workers = common["num_on_gpu"]  # the fraction is of all engines on a GPU
        chosen = _chosen_gpu(config.model.device, on_gpus)
        claimed = int(rollout.gpu_memory_fraction * chosen.total_bytes) // workers
        return SamplerNeed(**common, claimed_bytes=claimed)
    known = {field.name for field in fields(VLLMEngineConfig)}
    given = {k: v for k, v in rollout.engine.kwargs.items() if k in known}
    replicas = rollout.replicas_per_gpu
    return SamplerNeed(
        **common,
        claimed_bytes=replicas * VLLMEngineConfig(**given).cpu_cache_mb * _MIB,
        weight_bytes=replicas * MASTER_BYTES * shape.num_params,
        process_bytes=replicas * 2 * _HOST_PROCESS_BYTES,
    )


def _devices(
    config: Config, models: list[ModelNeed], sampler: SamplerNeed | None, on_gpus: list[Gpu]
) -> Iterator[Device]:
    """Yield the devices, capacities where this machine has them.

    With a cluster elsewhere, this machine stands for its nodes.
    """
    host = host_memory()
    is_ray = config.cluster.kind == RAY
    ranks = {need.pool: need.num_ranks for need in models} if is_ray else {}
    workers = sampler.num_processes if is_ray and sampler else 0
    processes = 1 + sum(ranks.values()) + workers
    limit = " (limit of the container)" if host.limited else ""
    if not on_gpus and not (wants_gpu(config) and is_ray):
        yield Device(
            name=f"host memory{limit}",
            memory=Memory.host,
            capacity=host.total_bytes,
            process_bytes=_HOST_PROCESS_BYTES,
            num_processes=processes,
        )
        return
    chosen = _chosen_gpu(config.model.device, on_gpus)
    pools = dict.fromkeys(need.pool for need in models)
    if sampler is not None and (rollout_share(config).gpus if is_ray else True):
        pools |= dict.fromkeys([sampler.pool])
    for pool in pools:
        many = f"each of {ranks[pool]} GPUs" if ranks.get(pool, 1) > 1 else "GPU"
        yield Device(
            name=f"{many} of the pool {pool!r}" if is_ray else f"GPU {chosen.index}, {chosen.name}",
            memory=Memory.gpu,
            pool=pool,
            capacity=chosen.total_bytes if chosen else None,
            process_bytes=_GPU_PROCESS_BYTES,
            num_processes=1 + (sampler.num_on_gpu if sampler and sampler.sleeps else 0),
        )
    yield Device(
        name=f"host memory{limit}",
        memory=Memory.host_of_gpus,
        capacity=host.total_bytes,
        process_bytes=2 * _HOST_PROCESS_BYTES,
        num_processes=processes,
    )


def _chosen_gpu(device: str, on_gpus: list[Gpu]) -> Any:
    """Return the GPU that a run in one process takes; None where this machine has none."""
    index = device.partition(":")[2]
    wanted = int(index) if index.isdigit() else 0
    return next((gpu for gpu in on_gpus if gpu.index == wanted), on_gpus[0] if on_gpus else None)
