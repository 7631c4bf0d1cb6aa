"""What would make a plan fit: settings, each with what it saves, and a combination that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from agentrl.dist.config import EngineConfig, Offload, Precision, Recompute
from agentrl.dist.memory import DevicePlan, MemoryPlan, plan_memory
from agentrl.dist.memory_needs import Memory, ModelNeed, Request
from agentrl.dist.placement import DEFAULT_POOL
from agentrl.errors import MemoryPlanError

_MIN_SLOTS = 8
_EASY_MICRO_BATCH, _MIN_MICRO_BATCH = 4096, 1024
"""Down to the first a device stays busy; down to the second at a price."""
_MAX_RANKS = 1024
_LORA_RANK = 16
_HALF_BYTES = 2
"""Of a weight as engines serve it."""
GIB = 2**30

Change = Callable[[Request], Request]


@dataclass(slots=True, frozen=True, kw_only=True)
class Knob:
    """A setting that needs less memory."""

    setting: str
    """As it is written on the command line."""
    change: Change
    price: str
    """What it costs."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Fix:
    """Knobs that make a plan fit together."""

    knobs: Sequence[Knob]
    plan: MemoryPlan


def refuse_unfitting(request: Request) -> MemoryPlan:
    """Return the plan of a run.

    Raises:
        MemoryPlanError: it cannot fit; names device, phase, numbers, and what would make it fit.
    """
    plan = plan_memory(request)
    if not plan.missing:
        return plan
    raise MemoryPlanError(refusal(request, plan))


def refusal(request: Request, plan: MemoryPlan) -> str:
    """Return what to say of a plan that does not fit."""
    worst = max(plan.devices, key=lambda device: device.missing)
    lines = [_what_is_missing(worst)]
    for knob, saved in savings(request, worst):
        lines.append(f"  {knob.setting:44} saves {gib(saved)} ({knob.price})")
    fix = find_fix(request)
    if fix is None:
        lines.append(
            "nothing of this is enough, even together: take a smaller model, or a device with "
            "more memory"
        )
    else:
        peak = max(device.peak for device in fix.plan.devices if device.device == worst.device)
        settings = " ".join(knob.setting for knob in fix.knobs)
        lines.append(f"this fits, with {gib(peak)}: {settings}")
    return "\n".join(lines)


def savings(request: Request, device: DevicePlan) -> list[tuple[Knob, int]]:
    """Return every knob that saves something on a device, and the bytes of its peak, largest first.

    Each stands alone: where another phase becomes the largest, less is saved than the part took.
    """
    found = []
    for knob in {knob.setting: knob for knob in knobs(request)}.values():
        changed = plan_memory(knob.change(request))
        peaks = [plan.peak for plan in changed.devices if plan.device.name == device.device.name]
        if peaks and peaks[0] < device.peak:
            found.append((knob, device.peak - peaks[0]))
    return sorted(found, key=lambda pair: -pair[1])


def find_fix(request: Request) -> Fix | None:
    """Return knobs with which the plan fits, the cheapest in speed first; None if none do."""
    chosen: list[Knob] = []
    current = request
    while plan_memory(current).total_missing:
        missing = plan_memory(current).total_missing
        step = next(
            (
                knob
                for knob in knobs(current)
                if plan_memory(knob.change(current)).total_missing < missing
            ),
            None,
        )
        if step is None:
            return None
        current = step.change(current)
        chosen = [knob for knob in chosen if _key(knob) != _key(step)] + [step]
    chosen = _without_needless(request, chosen)
    return Fix(knobs=chosen, plan=plan_memory(_apply(request, chosen)))


def knobs(request: Request) -> Iterator[Knob]:
    """Yield what may be turned, in the order of what it costs."""
    trained = [need for need in request.models if need.trained]
    on_gpu = any(device.memory is Memory.gpu for device in request.devices)
    for need in trained:
        yield from _smaller_micro_batch(need, _EASY_MICRO_BATCH)
    if on_gpu:
        for need in trained:
            yield _engine_knob(
                need, "precision", Precision.bf16, "rounds the forward pass to bfloat16"
            )
            if need.settings_key is None:
                price = "copies over PCIe twice a step"
                yield _engine_knob(need, "offload", Offload.optimizer, price)
    yield from _fewer_slots(request)
    yield from _smaller_claim(request)
    for need in trained:
        yield _engine_knob(
            need, "recompute", Recompute.selective, "recomputes what is cheap: a few percent slower"
        )
        yield _engine_knob(need, "recompute", Recompute.full, "updates take about a third longer")
    for need in trained:
        yield from _smaller_micro_batch(need, _MIN_MICRO_BATCH)
    if on_gpu:
        for need in (need for need in trained if need.settings_key is None):
            yield _engine_knob(need, "offload", Offload.all, "copies over PCIe in every phase")
        for pool in dict.fromkeys(need.pool for need in trained):
            yield from _more_ranks(request, pool)
    if any(need.lora_rank == 0 and need.role == "actor" for need in trained):
        yield Knob(
            setting=f"lora.rank={_LORA_RANK}",
            change=_with_lora,
            price="trains adapters in place of all weights",
        )


def gib(num_bytes: int) -> str:
    """Format bytes: ``12.3 GiB``, ``4 MiB``."""
    if num_bytes < 0.1 * GIB:
        return f"{num_bytes / 2**20:,.0f} MiB"
    return f"{num_bytes / GIB:,.1f} GiB"


def _what_is_missing(worst: DevicePlan) -> str:
    phase = max(worst.phases, key=lambda name: worst.phases[name])
    capacity = worst.device.capacity or 0
    return (
        f"{worst.device.name} has {gib(capacity)}, and the run needs {gib(worst.peak)} of it in "
        f"the phase '{phase}': {gib(worst.missing)} too much. What would save memory there:"
    )


def _fewer_slots(request: Request) -> Iterator[Knob]:
    sampler = request.sampler
    if sampler is None or sampler.num_slots // 2 < _MIN_SLOTS:
        return
    slots = sampler.num_slots // 2

    def change(request: Request) -> Request:
        assert request.sampler is not None
        return replace(request, sampler=replace(request.sampler, num_slots=slots))

    yield Knob(
        setting=f"rollout.engine.kwargs.num_slots={slots}",
        change=change,
        price="decodes fewer sequences at once",
    )


def _smaller_claim(request: Request) -> Iterator[Knob]:
    """Yield a smaller part of the GPU for engines that claim it whole, whatever it is now."""
    sampler = request.sampler
    capacity = next(
        (
            device.capacity
            for device in request.devices
            if sampler and device.memory is Memory.gpu and device.pool == sampler.pool
        ),
        None,
    )
    if sampler is None or sampler.claimed_bytes is None or not capacity:
        return
    fraction = sampler.claimed_bytes * sampler.num_on_gpu / capacity
    smaller = int(fraction * 10 - 1e-6) / 10
    if smaller * capacity <= 2 * _HALF_BYTES * sampler.shape.num_params:
        return  # the weights alone leave no room for a cache
    claimed = int(smaller * capacity) // sampler.num_on_gpu

    def change(request: Request) -> Request:
        assert request.sampler is not None
        return replace(request, sampler=replace(request.sampler, claimed_bytes=claimed))

    yield Knob(
        setting=f"rollout.gpu_memory_fraction={smaller:g}",
        change=change,
        price="a smaller KV cache",
    )


def _smaller_micro_batch(need: ModelNeed, least: int) -> Iterator[Knob]:
    smallest = max(need.longest_row, least)
    tokens = max(need.settings.tokens_per_micro_batch // 2, smallest)
    if tokens < need.settings.tokens_per_micro_batch:
        price = "more, smaller passes; the gradient stays the same"
        yield _engine_knob(need, "tokens_per_micro_batch", tokens, price)


def _more_ranks(request: Request, pool: str) -> Iterator[Knob]:
    ranks = max(need.num_ranks for need in request.models if need.pool == pool)
    if ranks * 2 > _MAX_RANKS:
        return

    def change(request: Request) -> Request:
        models = [
            replace(need, num_ranks=ranks * 2) if need.pool == pool else need
            for need in request.models
        ]
        return replace(request, models=models)

    if any(need.settings_key == "" for need in request.models):
        setting = f"cluster=ray gpus_per_rank=1 ranks={ranks * 2}"
    elif pool == DEFAULT_POOL:
        setting = f"cluster=ray cluster.gpus={ranks * 2}"
    else:
        setting = f"placement.pools.{pool}.ranks={ranks * 2}"
    yield Knob(
        setting=setting,
        change=change,
        price=f"{ranks * 2} GPUs",
    )


def _engine_knob(need: ModelNeed, name: str, value: object, price: str) -> Knob:
    key = _settings_key(need)

    def change(request: Request) -> Request:
        models = [
            replace(other, settings=_with(other.settings, name, value))
            if _settings_key(other) == key
            else other
            for other in request.models
        ]
        return replace(request, models=models)

    return Knob(setting=f"{key}{name}={value}", change=change, price=price)


def _settings_key(need: ModelNeed) -> str:
    return f"{need.role}." if need.settings_key is None else need.settings_key


def _with(settings: EngineConfig, name: str, value: object) -> EngineConfig:
    return replace(settings, **{name: value})


def _with_lora(request: Request) -> Request:
    """Adapters; the reference is then the actor without them."""
    models = [
        replace(need, lora_rank=_LORA_RANK) if need.role == "actor" else need
        for need in request.models
        if need.role != "reference"
    ]
    return replace(request, models=models)


def _key(knob: Knob) -> str:
    return knob.setting.partition("=")[0]


def _apply(request: Request, chosen: Sequence[Knob]) -> Request:
    for knob in chosen:
        request = knob.change(request)
    return request


def _rank_of(knob: Knob, names: Sequence[str]) -> int:
    name = _key(knob)
    return names.index(name) if name in names else len(names)


def _without_needless(request: Request, chosen: list[Knob]) -> list[Knob]:
    """Leave out what other knobs made needless, the dearest first."""
    names = [_key(knob) for knob in knobs(request)]
    for knob in sorted(chosen, key=lambda knob: _rank_of(knob, names), reverse=True):
        fewer = [other for other in chosen if other is not knob]
        if not plan_memory(_apply(request, fewer)).total_missing:
            chosen = fewer
    return chosen
