from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from agentrl.dist.config import EngineConfig, Offload, Precision, Recompute
from agentrl.dist.memory import plan_memory
from agentrl.dist.memory_fit import find_fix, refuse_unfitting, savings
from agentrl.dist.memory_needs import Device, Memory, ModelNeed, Request, SamplerNeed
from agentrl.dist.model_shape import model_shape
from agentrl.errors import MemoryPlanError

GIB = 2**30
SHAPE = model_shape(
    Qwen3Config(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=6144,
        tie_word_embeddings=True,
    )
)


def _request(
    capacity_gib: float, *, on_gpu: bool = True, tokens: int = 32768, slots: int = 64
) -> Request:
    config = EngineConfig(tokens_per_micro_batch=tokens)
    actor = ModelNeed(role="actor", shape=SHAPE, settings=config, on_gpu=on_gpu, longest_row=2048)
    reference = replace(actor, role="reference", trained=False, settings_key="actor.")
    sampler = SamplerNeed(
        shape=SHAPE, num_slots=slots, max_context=2048, session_cache_bytes=GIB // 2
    )
    device = Device(
        name="GPU 0" if on_gpu else "host memory",
        memory=Memory.gpu if on_gpu else Memory.host,
        pool="train",
        capacity=int(capacity_gib * GIB),
        process_bytes=GIB,
    )
    host = Device(
        name="host", memory=Memory.host_of_gpus, capacity=512 * GIB, process_bytes=2 * GIB
    )
    devices = [device, host] if on_gpu else [device]
    return Request(models=[actor, reference], sampler=sampler, devices=devices)


def test_what_fits_is_let_through() -> None:
    assert refuse_unfitting(_request(1000)).missing == 0


def test_a_refusal_names_device_phase_numbers_and_a_combination_that_fits() -> None:
    request = _request(80)
    with pytest.raises(MemoryPlanError) as caught:
        refuse_unfitting(request)
    text = str(caught.value)
    assert "GPU 0 has 80.0 GiB" in text and "'update actor'" in text
    peak = plan_memory(request).devices[0].peak
    assert f"{peak / GIB:,.1f} GiB" in text
    for setting in ("actor.recompute=full", "actor.tokens_per_micro_batch=16384", "lora.rank=16"):
        assert setting in text
    fix = find_fix(request)
    assert fix is not None
    assert " ".join(knob.setting for knob in fix.knobs) in text


@pytest.mark.parametrize("on_gpu", [True, False])
@settings(max_examples=30, deadline=None)
@given(capacity=st.floats(20, 300), tokens=st.sampled_from([2048, 8192, 65536]))
def test_a_suggested_combination_fits_and_none_of_it_is_needless(
    on_gpu: bool, capacity: float, tokens: int
) -> None:
    request = _request(capacity, on_gpu=on_gpu, tokens=tokens)
    fix = find_fix(request)
    if fix is None:
        return
    assert fix.plan.missing == 0
    for left_out in fix.knobs:
        changed = request
        for knob in fix.knobs:
            if knob is not left_out:
                changed = knob.change(changed)
        assert plan_memory(changed).total_missing > 0


def test_every_saving_is_what_the_changed_plan_says() -> None:
    request = _request(40)
    device = plan_memory(request).devices[0]
    found = savings(request, device)
    assert [saved for _, saved in found] == sorted((s for _, s in found), reverse=True)
    for knob, saved in found:
        assert plan_memory(knob.change(request)).devices[0].peak == device.peak - saved


def test_knobs_write_what_they_change() -> None:
    request = _request(40)
    changed = {
        knob.setting: knob.change(request)
        for knob, _ in savings(request, plan_memory(request).devices[0])
    }
    actor = changed["actor.recompute=full"].models[0].settings
    assert actor.recompute is Recompute.full
    for need in changed["actor.precision=bf16"].models:  # the reference has the actor's settings
        assert need.settings.precision is Precision.bf16
    assert changed["lora.rank=16"].models[0].lora_rank == 16
    assert [need.role for need in changed["lora.rank=16"].models] == ["actor"]
    offloaded = changed.get("actor.offload=optimizer")
    assert offloaded is None or offloaded.models[0].settings.offload is Offload.optimizer
    sampler = changed["rollout.engine.kwargs.num_slots=32"].sampler
    assert sampler is not None and sampler.num_slots == 32


def test_a_model_that_cannot_fit_is_said_so() -> None:
    with pytest.raises(MemoryPlanError, match="nothing of this is enough"):
        refuse_unfitting(_request(2, on_gpu=False))
