"""How much memory a run will need on each device, before any of it is allocated.

Pure functions: needs in, bytes out. Legend: ``P`` parameters, ``P_t`` trained ones, ``n`` ranks
over which weights are sharded, ``s`` bytes of a value in forward and backward (4, or 2 in
bfloat16), ``T`` tokens of a micro-batch on one rank, ``V`` vocabulary. Per rank, in bytes:

* weights ``4 P / n`` and, where the forward pass has other ones (another type, or shards), what is
  gathered at a time: the root module and two layers, ``s (root + 2 layer)``;
* gradients ``4 P_t / n``; AdamW ``8 P_t / n``;
* activations ``T`` times what the trunk keeps per token (:class:`ModelShape`), and one layer more,
  whose gradients or recomputed values exist at a time;
* logits: one chunk of ``chunk x V`` values.

What each phase needs is what stands in every phase plus what works in that one; a device needs the
largest of its phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from agentrl.dist.config import EngineConfig, Offload, Precision, Recompute
from agentrl.dist.model_shape import Kept, ModelShape

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS, KV_CACHE, PROCESS = "activations", "logits", "kv cache", "process"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, KV_CACHE, PROCESS)

ROLLOUT = "rollout"
_MASTER_BYTES = 4
_MOMENT_BYTES = 8  # AdamW's two, in float32
_GATHERED_LAYERS = 2
CHUNK_TOKENS = 4096
"""Tokens whose logits exist at a time."""
_LOGIT_COPIES = {True: 2, False: 4}
"""Values per logit while a chunk is computed or differentiated, by ``compile``."""

Sizes = Mapping[str, int]
"""Part -> bytes."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelNeed:
    """A model that training processes hold."""

    role: str
    """``actor``, ``critic``, ``reference``, ``reward_model``."""
    shape: ModelShape
    settings: EngineConfig
    pool: str = "train"
    num_ranks: int = 1
    """Processes of the pool."""
    trained: bool = True
    lora_rank: int = 0
    """0: all weights are trained."""
    master_bytes: int = _MASTER_BYTES
    """Of a weight at rest."""
    has_vocabulary: bool = True
    """Whether logits over the vocabulary are computed; a value head has none."""
    longest_row: int = 0
    """Tokens of the longest sequence, which is never cut."""

    @property
    def num_trained(self) -> int:
        """Parameters with a gradient."""
        if not self.trained:
            return 0
        return self.lora_rank * self.shape.linear_widths or self.shape.num_params

    @property
    def num_shards(self) -> int:
        """Ranks over which weights are sharded."""
        return self.settings.shard_size or self.num_ranks

    @property
    def tokens(self) -> int:
        """Of the largest micro-batch, the part of one rank."""
        largest = max(self.settings.tokens_per_micro_batch, self.longest_row)
        return -(-largest // self.settings.sequence_parallel)


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplerNeed:
    """A rollout engine on transformers, in the process of a pool or in processes of its own."""

    shape: ModelShape
    pool: str = "train"
    num_processes: int = 1
    num_slots: int
    """Sequences that are decoded at once."""
    max_context: int
    """Tokens of each."""
    session_cache_bytes: int
    """For sessions that hold no slot."""
    value_bytes: int = 4
    """Of weights and cache."""
    keeps_module: bool = True
    """Whether the float32 module stays beside the engine's own weights."""


class Memory(StrEnum):
    """Whose memory a device is."""

    gpu = "gpu"
    """Of the GPU of one rank of a pool."""
    host = "host"
    """Of a machine that computes on its CPU: every process of the run shares it."""
    host_of_gpus = "host_of_gpus"
    """Of a machine that computes on GPUs: holds what waits between phases."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Device:
    """A memory that a part of the run lives in."""

    name: str
    memory: Memory
    pool: str = ""
    """Whose ranks have such a GPU each."""
    capacity: int | None
    """Bytes; None where it cannot be known from here."""
    process_bytes: int
    """Of a process before it holds a tensor: libraries, or the context of CUDA."""
    num_processes: int = 1
    """That use this memory."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Request:
    """Everything that decides the plan."""

    models: Sequence[ModelNeed]
    sampler: SamplerNeed | None
    devices: Sequence[Device]


@dataclass(slots=True, frozen=True, kw_only=True)
class RolePlan:
    """One role on one device, in bytes."""

    role: str
    standing: Sizes
    """Held in every phase."""
    working: Mapping[str, Sizes] = field(default_factory=dict)
    """Phase -> what is held in that one only."""
    away: int = 0
    """Waits in host memory between phases."""


@dataclass(slots=True, frozen=True, kw_only=True)
class DevicePlan:
    """What stands and works on one device."""

    device: Device
    roles: Sequence[RolePlan]

    @property
    def phases(self) -> dict[str, int]:
        """Phase -> bytes on this device."""
        standing = sum(_total(plan.standing) for plan in self.roles)
        names = dict.fromkeys(name for plan in self.roles for name in plan.working)
        return {
            name: standing + sum(_total(plan.working.get(name, {})) for plan in self.roles)
            for name in names or ("idle",)
        }

    @property
    def peak(self) -> int:
        """Bytes of the phase that needs most."""
        return max(self.phases.values())

    @property
    def missing(self) -> int:
        """Bytes beyond the capacity; 0 where it fits, or nothing is known."""
        capacity = self.device.capacity
        return 0 if capacity is None else max(self.peak - capacity, 0)


@dataclass(slots=True, frozen=True, kw_only=True)
class MemoryPlan:
    """The devices of a run."""

    devices: Sequence[DevicePlan]

    @property
    def missing(self) -> int:
        """Bytes beyond the capacity of the device that lacks most."""
        return max((plan.missing for plan in self.devices), default=0)

    @property
    def total_missing(self) -> int:
        """Bytes beyond the capacities of all devices."""
        return sum(plan.missing for plan in self.devices)


def plan_memory(request: Request) -> MemoryPlan:
    """Say what every device of a run will hold."""
    return MemoryPlan(devices=[_plan_device(request, device) for device in request.devices])


def _plan_device(request: Request, device: Device) -> DevicePlan:
    roles = list(
        _on_gpu(request, device.pool) if device.memory is Memory.gpu else _on_host(request)
    )
    if device.memory is Memory.host_of_gpus:
        roles = [RolePlan(role=p.role, standing={OPTIMIZER: p.away}) for p in roles if p.away]
    processes = device.process_bytes * device.num_processes
    roles.append(RolePlan(role="processes", standing={PROCESS: processes}))
    return DevicePlan(device=device, roles=roles)


def _on_gpu(request: Request, pool: str) -> Iterator[RolePlan]:
    """Yield what one rank of ``pool`` holds."""
    for need in request.models:
        if need.pool == pool:
            yield plan_model(need)
    if request.sampler is not None and request.sampler.pool == pool:
        yield plan_sampler(request.sampler)


def _on_host(request: Request) -> Iterator[RolePlan]:
    """Yield what all ranks hold together."""
    for need in request.models:
        yield _scaled(plan_model(need), need.num_ranks)
    if request.sampler is not None:
        yield _scaled(plan_sampler(request.sampler), request.sampler.num_processes)


def plan_model(need: ModelNeed) -> RolePlan:
    """Return what one rank holds of a model."""
    settings, shape = need.settings, need.shape
    offload = settings.offload
    state = {WEIGHTS: need.master_bytes * shape.num_params // need.num_shards}
    moments = {OPTIMIZER: _MOMENT_BYTES * need.num_trained // need.num_shards}
    standing: dict[str, int] = {}
    moved: dict[str, int] = {}
    standing |= {} if offload is Offload.all else state
    moved |= state if offload is Offload.all else {}
    back = moments if offload is not Offload.none else {}
    standing |= {} if back else moments
    working = {f"score {need.role}": _added(moved, _scoring(need))}
    if need.trained:
        working[f"update {need.role}"] = _added(moved, back, _updating(need))
    return RolePlan(
        role=need.role,
        standing=_present(standing),
        working=working,
        away=_total(moved) + _total(back),
    )


def plan_sampler(need: SamplerNeed) -> RolePlan:
    """Return what one engine holds: its weights always, its cache while it samples too.

    The cache has a row per slot, and room for saved sessions.
    """
    per_token = need.shape.kv_values * need.value_bytes
    weights = need.shape.num_params * (need.value_bytes + _MASTER_BYTES * need.keeps_module)
    mask = need.max_context**2 * need.value_bytes
    rows = need.num_slots * need.max_context * per_token + need.session_cache_bytes
    return RolePlan(
        role=ROLLOUT,
        standing={WEIGHTS: weights, KV_CACHE: rows + mask},
        working={
            ROLLOUT: {LOGITS: need.num_slots * need.shape.vocab_size * 2 * _MASTER_BYTES},
        },
    )


def kept_of(need: ModelNeed) -> Kept | None:
    """Return what the trunk keeps in the number format of the forward pass."""
    kept = need.shape.kept
    return None if kept is None else kept[need.settings.precision]


def value_bytes(settings: EngineConfig) -> int:
    """Return the bytes of a value in forward and backward."""
    return 2 if settings.precision is Precision.bf16 else 4


def _updating(need: ModelNeed) -> Sizes:
    kept, settings = kept_of(need), need.settings
    gradients = _MASTER_BYTES * need.num_trained // need.num_shards
    found = {WEIGHTS: _gathered(need), GRADIENTS: gradients, LOGITS: _logits(need, trains=True)}
    if kept is not None:
        full = kept.compiled if settings.compile else kept.eager
        held = {
            Recompute.none: full,
            Recompute.selective: min(kept.products, full),
            Recompute.full: kept.layer_inputs,
        }[settings.recompute]
        # Logits and a layer's own gradients never exist at once: the larger of the two counts.
        one_layer = need.tokens * full // max(need.shape.num_layers, 1)
        layer = one_layer * (1 if settings.recompute is Recompute.none else 2)
        found[ACTIVATIONS] = need.tokens * held + max(layer - found[LOGITS], 0)
    return found


def _scoring(need: ModelNeed) -> Sizes:
    kept = kept_of(need)
    one_layer = 0 if kept is None else need.tokens * kept.eager // max(need.shape.num_layers, 1)
    return {
        WEIGHTS: _gathered(need),
        ACTIVATIONS: one_layer,
        LOGITS: _logits(need, trains=False),
    }


def _gathered(need: ModelNeed) -> int:
    """Weights that exist for the forward pass only."""
    if value_bytes(need.settings) == need.master_bytes and need.num_shards == 1:
        return 0
    shape = need.shape
    layers = min(_GATHERED_LAYERS, shape.num_layers) * shape.layer_params
    return value_bytes(need.settings) * (shape.root_params + layers)


def _logits(need: ModelNeed, *, trains: bool) -> int:
    if not need.has_vocabulary:
        return 0
    chunk = min(CHUNK_TOKENS, need.tokens)
    copies = _LOGIT_COPIES[need.settings.compile] if trains else 2
    return chunk * need.shape.vocab_size * 4 * copies


def _scaled(plan: RolePlan, factor: int) -> RolePlan:
    return replace(
        plan,
        standing={part: size * factor for part, size in plan.standing.items()},
        working={
            phase: {part: size * factor for part, size in sizes.items()}
            for phase, sizes in plan.working.items()
        },
        away=plan.away * factor,
    )


def _added(*sizes: Sizes) -> dict[str, int]:
    return {part: sum(size.get(part, 0) for size in sizes) for part in dict.fromkeys(PARTS)}


def _present(sizes: Sizes) -> dict[str, int]:
    return {part: size for part, size in sizes.items() if size}


def _total(sizes: Sizes) -> int:
    return sum(sizes.values())
