"""How much memory a run will need on each device, before any of it is allocated.

Pure functions: needs in, bytes out. Legend: ``P`` parameters, ``P_t`` trained ones, ``n`` ranks
over which weights are sharded, ``s`` bytes of a value in forward and backward (4, or 2 in
bfloat16), ``T`` tokens of a micro-batch on one rank, ``V`` vocabulary. Per rank, in bytes:

* weights ``4 P / n`` and, where the forward pass has other ones (another type, or shards), what is
  gathered at a time: ``s P`` of a small model, else the root module and two layers;
* gradients ``4 P_t / n``, and ``4 P_t`` more where a small model sums them over ranks once per
  mini-batch; AdamW ``8 P_t / n``;
* activations ``T`` times what the trunk keeps per token (:class:`ModelShape`), and one layer more,
  whose gradients or recomputed values exist at a time;
* logits: one chunk of ``chunk x V`` and its gradient, on a CPU with what they are computed from;
  the head's own gradient in float32;
* two buckets of weights on their way to engines, see :mod:`agentrl.memory_buckets`.

What each phase needs is what stands in every phase plus what works in that one; a device needs the
largest of its phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.dist.config import Offload, Precision, Recompute
from agentrl.dist.head import MAX_LOGITS
from agentrl.dist.memory_needs import (
    MASTER_BYTES,
    Device,
    Memory,
    ModelNeed,
    Request,
    SamplerNeed,
)
from agentrl.dist.model_shape import Kept
from agentrl.dist.sharding import GATHERED_BYTES, GATHERED_SHARE, GRADIENT_BYTES

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS, KV_CACHE, PROCESS = "activations", "logits", "kv cache", "process"
BUCKETS = "buckets"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, KV_CACHE, BUCKETS, PROCESS)

ROLLOUT = "rollout"
_MOMENT_BYTES = 8  # AdamW's two, in float32
_GATHERED_LAYERS = 2
_AT_WORK = 130
"""Per cent of a layer's activations that exist while it is recomputed and differentiated."""
_UPDATE_LOGIT_BYTES, _SCORE_LOGIT_BYTES = 8, 8
"""Float32 values per logit, beside the logit itself, while a chunk is differentiated or computed
without the kernels of a GPU."""

Sizes = Mapping[str, int]
"""Part -> bytes."""


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
    if device.memory is Memory.gpu:
        roles = list(_on_gpu(request, device))
    else:
        roles = list(_on_host(request, device.capacity))
    if device.memory is Memory.host_of_gpus:
        roles = [RolePlan(role=p.role, standing={OPTIMIZER: p.away}) for p in roles if p.away]
    processes = device.process_bytes * device.num_processes
    roles.append(RolePlan(role="processes", standing={PROCESS: processes}))
    return DevicePlan(device=device, roles=roles)


def _on_gpu(request: Request, device: Device) -> Iterator[RolePlan]:
    """Yield what one rank of the device's pool holds."""
    for need in request.models:
        if need.pool == device.pool:
            yield plan_model(need, memory_bytes=device.capacity)
    if request.sampler is not None and request.sampler.pool == device.pool:
        yield _scaled(plan_sampler(request.sampler), request.sampler.num_on_gpu)


def _on_host(request: Request, capacity: int | None) -> Iterator[RolePlan]:
    """Yield what all ranks hold together."""
    for need in request.models:
        found = _scaled(plan_model(need, memory_bytes=capacity), need.num_ranks)
        # On CPUs one rank sends for all.
        yield replace(found, standing=_present({**found.standing, BUCKETS: need.bucket_bytes}))
    if request.sampler is not None:
        yield _scaled(plan_sampler(request.sampler), request.sampler.num_processes)


def plan_model(need: ModelNeed, *, memory_bytes: int | None) -> RolePlan:
    """Return what one rank holds of a model.

    Args:
        memory_bytes: of the device, which decides what counts as a small model.
    """
    settings, shape = need.settings, need.shape
    offload = settings.offload
    adapters = MASTER_BYTES * need.num_trained if need.lora_rank else 0
    weights = need.master_bytes * shape.num_params + adapters
    state = {WEIGHTS: weights // need.num_shards}
    moments = {OPTIMIZER: _MOMENT_BYTES * need.num_trained // need.num_shards}
    standing: dict[str, int] = {}
    moved: dict[str, int] = {}
    standing |= {} if offload is Offload.all else state
    moved |= state if offload is Offload.all else {}
    back = moments if offload is not Offload.none else {}
    standing |= {} if back else moments
    standing |= {BUCKETS: need.bucket_bytes}
    working = {f"score {need.role}": _added(moved, _scoring(need, memory_bytes))}
    if need.trained:
        working[f"update {need.role}"] = _added(moved, back, _updating(need, memory_bytes))
    return RolePlan(
        role=need.role,
        standing=_present(standing),
        working=working,
        away=_total(moved) + _total(back),
    )


def plan_sampler(need: SamplerNeed) -> RolePlan:
    """Return what one engine holds: its weights always, its cache while it samples too.

    The cache has a row per slot, and room for saved sessions. What an engine claims as a whole, on
    a GPU, stands under its cache, and all of it is given up where the engine sleeps.
    """
    if need.claimed_bytes is not None:
        claim = {KV_CACHE: need.claimed_bytes}
        beside = {WEIGHTS: need.weight_bytes, PROCESS: need.process_bytes}
        standing = beside | {BUCKETS: need.bucket_bytes}
        return RolePlan(
            role=ROLLOUT,
            standing=_present(standing | ({} if need.sleeps else claim)),
            working={ROLLOUT: claim if need.sleeps else {}},
        )
    per_token = need.shape.kv_values * need.value_bytes
    weights = need.shape.num_params * (need.value_bytes + MASTER_BYTES * need.keeps_module)
    mask = need.max_context**2 * need.value_bytes
    rows = need.num_slots * need.max_context * per_token + need.session_cache_bytes
    cache = {KV_CACHE: rows + mask}
    logits = {LOGITS: need.num_slots * need.shape.vocab_size * 2 * MASTER_BYTES}
    return RolePlan(
        role=ROLLOUT,
        standing=_present(
            {WEIGHTS: weights, BUCKETS: need.bucket_bytes} | ({} if need.sleeps else cache)
        ),
        working={ROLLOUT: logits | (cache if need.sleeps else {})},
    )


def kept_of(need: ModelNeed) -> Kept | None:
    """Return what the trunk keeps in the number format of the forward pass."""
    kept = need.shape.kept
    return None if kept is None else kept[need.settings.precision]


def value_bytes(need: ModelNeed) -> int:
    """Return the bytes of a value in forward and backward."""
    return 2 if need.settings.precision is Precision.bf16 else 4


def is_sharded(need: ModelNeed) -> bool:
    """Whether the weights of the forward pass are other tensors than the masters."""
    return need.settings.precision is Precision.bf16 or need.num_ranks > 1


def is_gathered_whole(need: ModelNeed, memory_bytes: int | None) -> bool:
    """Whether all weights of the forward pass exist at once, as the engine decides it."""
    size = need.shape.num_params * (GATHERED_BYTES + GRADIENT_BYTES)
    return memory_bytes is None or size <= GATHERED_SHARE * memory_bytes


def _updating(need: ModelNeed, memory_bytes: int | None) -> Sizes:
    kept, settings = kept_of(need), need.settings
    gradients = GRADIENT_BYTES * need.num_trained // need.num_shards
    if is_sharded(need) and is_gathered_whole(need, memory_bytes):
        gradients += GRADIENT_BYTES * need.num_trained
    logits = _logits(need, trains=True)
    found = {WEIGHTS: _gathered(need, memory_bytes), GRADIENTS: gradients, LOGITS: logits}
    if kept is not None:
        full = kept.compiled if settings.compile else kept.eager
        held = {
            Recompute.none: full,
            Recompute.selective: min(kept.products, full),
            Recompute.full: kept.layer_inputs,
        }[settings.recompute]
        # Logits and a layer's own gradients never exist at once: the larger of the two counts.
        one_layer = need.num_tokens * full // max(need.shape.num_layers, 1)
        layer = one_layer if settings.recompute is Recompute.none else one_layer * _AT_WORK // 100
        found[ACTIVATIONS] = need.num_tokens * held + max(layer - logits, 0)
    return found


def _scoring(need: ModelNeed, memory_bytes: int | None) -> Sizes:
    kept, layers = kept_of(need), max(need.shape.num_layers, 1)
    return {
        WEIGHTS: _gathered(need, memory_bytes),
        ACTIVATIONS: 0 if kept is None else need.num_tokens * kept.eager // layers,
        LOGITS: _logits(need, trains=False),
    }


def _gathered(need: ModelNeed, memory_bytes: int | None) -> int:
    """Weights that exist for the forward pass only."""
    if not is_sharded(need):
        return 0
    shape = need.shape
    layers = min(_GATHERED_LAYERS, shape.num_layers) * shape.layer_params
    whole = is_gathered_whole(need, memory_bytes)
    return value_bytes(need) * (shape.num_params if whole else shape.root_params + layers)


def _logits(need: ModelNeed, *, trains: bool) -> int:
    if not need.has_vocabulary:
        return 0
    size, head = value_bytes(need), need.shape.vocab_size * need.shape.hidden_size
    cast = size % MASTER_BYTES * head  # of the head's weight
    if need.on_gpu:  # its kernels hold logits and their gradient, nothing else of that size
        per_logit = 2 * size if trains else size
    else:
        per_logit = size + (_UPDATE_LOGIT_BYTES if trains else _SCORE_LOGIT_BYTES)
    return _logits_at_once(need) * per_logit + cast + trains * GRADIENT_BYTES * head


def _logits_at_once(need: ModelNeed) -> int:
    """Logits of the largest of equal chunks, none above the limit."""
    limit = MAX_LOGITS["cuda" if need.on_gpu else "cpu"]
    tokens, vocabulary = need.num_tokens, need.shape.vocab_size
    num_chunks = max(1, -(-tokens // max(1, limit // vocabulary)))
    return -(-tokens // num_chunks) * vocabulary


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
