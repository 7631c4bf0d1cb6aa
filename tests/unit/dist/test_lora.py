"""Adapters on a whole model; sharded ones are tested with the engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.dist.config import LoraConfig
from agentrl.dist.lora import Adapters, attach_adapters, is_adapter
from agentrl.errors import ConfigError
from agentrl.testing.random_models import VOCAB, build

IDS = torch.arange(34).reshape(2, 17) % VOCAB


def whole(value: Tensor) -> Tensor:
    return value


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def adapted(family: str = "qwen3", *, trained: bool = True, **how: Any) -> tuple[Any, Adapters]:
    """A model with adapters; ``trained``: with some that change what it computes."""
    model = build(family)
    adapters = attach_adapters(model, LoraConfig(**{"rank": 4, **how}), seed=3, source="a/b")
    generator = torch.Generator().manual_seed(1)
    for name, value in model.named_parameters():
        if trained and ".lora_B." in name:
            value.data.normal_(0.0, 0.05, generator=generator)
    return model, adapters


def test_new_adapters_change_nothing_and_alone_are_trained() -> None:
    model, adapters = adapted(trained=False)
    assert torch.equal(logits(model), logits(build("qwen3")))
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)}
    assert len(trained) == 2 * len(adapters.layers) == 2 * 7 * 3
    assert not any("lm_head" in name for name in adapters.layers)


def test_what_is_drawn_depends_on_the_seed_and_the_layer_alone() -> None:
    first = dict(adapted(trained=False)[1].tensors(whole))
    model, few = build("qwen3"), LoraConfig(rank=4, target_modules=r".*\.(q_proj|up_proj)")
    before = torch.get_rng_state()
    adapters = attach_adapters(model, few, seed=3)
    assert torch.equal(before, torch.get_rng_state())
    again = dict(adapters.tensors(whole))
    assert len(again) == 2 * 2 * 3
    for name, value in again.items():
        assert torch.equal(value, first[name])
    other = dict(attach_adapters(build("qwen3"), few, seed=4).tensors(whole))
    assert not any(torch.equal(other[name], first[name]) for name in other if "lora_A" in name)


@settings(max_examples=12, deadline=None)
@given(
    family=st.sampled_from(["qwen3", "qwen2", "gpt2"]),
    rank=st.integers(1, 16),
    alpha=st.floats(0.5, 64),
)
def test_the_merged_model_computes_what_the_adapters_do(
    family: str, rank: int, alpha: float
) -> None:
    model, adapters = adapted(family, rank=rank, alpha=alpha)
    expected, plain = logits(model), logits(build(family))
    state = copy.deepcopy(model.state_dict())
    merged = build(family, seed=7)
    missing, unknown = merged.load_state_dict(dict(adapters.merged(whole)), strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    merged.tie_weights()
    assert torch.allclose(logits(merged), expected, atol=1e-4)
    assert not torch.allclose(expected, plain, atol=1e-2)
    for name, value in model.state_dict().items():  # merging did not touch what trains
        assert torch.equal(value, state[name]), name


def test_without_adapters_the_model_computes_what_it_did() -> None:
    model, adapters = adapted()
    expected = logits(model)
    with adapters.disabled():
        assert torch.equal(logits(model), logits(build("qwen3")))
    assert torch.equal(logits(model), expected)


def test_frozen_weights_may_be_bf16_beside_float32_adapters() -> None:
    model = build("qwen3").to(torch.bfloat16)
    adapters = attach_adapters(model, LoraConfig(rank=2), seed=0)
    kinds = {is_adapter(n): p.dtype for n, p in model.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    merged = dict(adapters.merged(whole))
    assert merged["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32


def test_peft_loads_what_is_exported(tmp_path: Path) -> None:
    from peft import PeftModel

    model, adapters = adapted()
    adapters.save(tmp_path / "adapter", dict(adapters.tensors(whole)))
    loaded = PeftModel.from_pretrained(build("qwen3"), str(tmp_path / "adapter"))
    assert torch.allclose(logits(loaded), logits(model), atol=1e-6)
    config: Any = loaded.peft_config["default"]
    assert config.base_model_name_or_path == "a/b"
    assert isinstance(config.target_modules, set) and "q_proj" in config.target_modules


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"rank": -1}, "lora.rank=-1: at least 1"),
        ({"rank": 49}, "lora.rank=49 is above 48"),
        ({"alpha": 0.0}, "lora.alpha=0.0"),
        ({"alpha": float("nan")}, "lora.alpha=nan"),
        ({"target_modules": ""}, "lora.target_modules is empty"),
        ({"target_modules": "("}, "no regular expression"),
        ({"target_modules": "q_proj"}, "no linear layer.*has: down_proj.*q_proj.*'model.l"),
        ({"target_modules": r".*embed_tokens"}, "matches no linear layer"),
        ({"target_modules": ".*(q_proj|lm_head)"}, "matches lm_head, the output embedding"),
    ],
)  # fmt: skip
def test_what_would_train_something_else_is_refused(how: dict[str, Any], message: str) -> None:
    model = build("qwen3")
    with pytest.raises(ConfigError, match=message):
        attach_adapters(model, LoraConfig(**{"rank": 4, **how}), seed=0)
    assert not any(is_adapter(name) for name, _ in model.named_parameters())
