"""Policies for benchmarks: never a stop token, prompts of exactly so many tokens."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from agentrl.agent.renderer import Renderer
from agentrl.bench.fixed_work import FixedWork
from agentrl.bench.random_policy import SHAPES, prompt_chars, shape_of, write_policy
from agentrl.bench.sync_arms import SHAPES as SYNC_SHAPES
from agentrl.bench.sync_arms import Shape
from agentrl.errors import ConfigError
from agentrl.model.load import load_model
from agentrl.testing import make_tokenizer
from agentrl.testing.clock_env import ClockEnv
from agentrl.testing.random_models import SERVED


def test_a_stop_token_is_never_sampled_and_other_tokens_are(tmp_path: Path) -> None:
    shape = write_policy("tiny", tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    (stop,) = Renderer(loaded.tokenizer).stop_token_ids
    ids = torch.randint(3, 500, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        probabilities = loaded.model(ids).logits.softmax(-1)
    assert probabilities[..., stop].max() < 1e-6
    others = probabilities.sort(-1).values[..., -400:]
    assert others.min() > 1e-5
    assert shape.matmul_params == sum(p.numel() for p in loaded.model.parameters())


@pytest.mark.parametrize("num_tokens", [40, 512])
def test_prompts_have_exactly_as_many_tokens_and_letters_of_their_own(num_tokens: int) -> None:
    work = FixedWork(prompt_tokens=num_tokens)
    tasks = ClockEnv(**work.env_kwargs()).tasks("train")
    renderer = Renderer(make_tokenizer(vocab_size=260))
    prompts = [task.data["prompt"] for task in tasks]
    for prompt in prompts[:3]:
        begun = renderer.begin([{"role": "user", "content": prompt}])
        assert len(begun.prompt_ids()) == num_tokens
    assert len(set(prompts)) == len(prompts)


def test_work_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="known are tiny"):
        FixedWork(shape="huge")
    with pytest.raises(ConfigError, match="turns=0"):
        FixedWork(turns=0)
    with pytest.raises(ConfigError, match="median <= p99"):
        FixedWork(latency_median_s=1.0)
    with pytest.raises(ConfigError, match="median <= p99"):
        FixedWork(latency_p99_s=math.inf)
    with pytest.raises(ConfigError, match="template alone"):
        FixedWork(prompt_tokens=2).env_kwargs()


def test_the_real_shapes_cost_what_the_formulas_say() -> None:
    for name, kv_bytes in (("qwen2.5-0.5b", 12 * 1024), ("qwen3-1.7b", 112 * 1024)):
        assert shape_of(SHAPES[name](), num_params=1).kv_bytes_per_token == kv_bytes
    assert prompt_chars(100) == prompt_chars(99) + 1


def _sizes(config: PretrainedConfig) -> Shape:
    given = config.to_dict()
    return Shape(
        hidden=given["hidden_size"],
        layers=given["num_hidden_layers"],
        heads=given["num_attention_heads"],
        kv_heads=given["num_key_value_heads"],
        head_dim=given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"],
        ffn=given["intermediate_size"],
        vocab=given["vocab_size"],
    )


def test_a_name_means_one_shape_in_every_benchmark() -> None:
    assert {name: _sizes(make()) for name, make in SHAPES.items()} == SYNC_SHAPES
    shared = SHAPES.keys() & SERVED.keys()
    assert shared == {"qwen2.5-0.5b", "qwen3-1.7b"}
    with torch.device("meta"):
        assert all(_sizes(SERVED[name]().config) == SYNC_SHAPES[name] for name in shared)
