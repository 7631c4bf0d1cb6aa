"""A training engine with adapters: what it trains, streams, saves and compares with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.algo.loss import PolicyLoss
from agentrl.algo.policy_losses import Vanilla
from agentrl.batch import Batch
from agentrl.dist.config import EngineConfig, LoraConfig, Precision
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.lora import WithoutAdapters, attach_adapters, is_adapter
from agentrl.dist.ranks import Ranks, leave_ranks
from agentrl.dist.sharding import full_tensor

BUDGET = 24


@pytest.fixture(autouse=True)
def no_process_group():
    yield
    leave_ranks()


@pytest.fixture
def open_engine(tiny_model) -> Callable[..., FSDPEngine]:
    """``open_engine(bf16=False)``: adapters of rank 4 on a Qwen3 of two layers."""

    def make(*, bf16: bool = False, seed: int = 3) -> FSDPEngine:
        model = tiny_model().to(torch.bfloat16 if bf16 else torch.float32)
        precision = Precision.bf16 if bf16 else Precision.fp32
        config = EngineConfig(lr=1e-2, weight_decay=0.1, precision=precision)
        adapters = attach_adapters(model, LoraConfig(rank=4), seed=seed)
        return FSDPEngine(model, None, config, ranks=Ranks.single("cpu"), adapters=adapters)

    return make


def train(engine: FSDPEngine, batch: Batch, num_steps: int = 2) -> dict[str, float]:
    loss = PolicyLoss(token_loss=Vanilla(), num_tokens=int(batch.tokens["loss_mask"].sum()))
    for _ in range(num_steps - 1):
        engine.train_mini_batch(batch, loss, tokens_per_micro_batch=BUDGET)
    return engine.train_mini_batch(batch, loss, tokens_per_micro_batch=BUDGET)


def weights(engine: FSDPEngine) -> dict[str, Tensor]:
    return {
        name: full_tensor(value.detach()).clone() for name, value in engine.model.named_parameters()
    }


def logprobs(engine: FSDPEngine | WithoutAdapters, batch: Batch) -> Tensor:
    return engine.infer_batch(batch, tokens_per_micro_batch=BUDGET, fields=("logprobs",))[
        "logprobs"
    ]


@pytest.mark.parametrize("bf16", [False, True])
def test_adapters_alone_move_and_the_start_stays_within_reach(
    open_engine, ragged_batch, bf16: bool
) -> None:
    engine, batch = open_engine(bf16=bf16), ragged_batch()
    before, first = weights(engine), logprobs(engine, batch)
    metrics = train(engine, batch, num_steps=3)
    assert metrics["skipped"] == 0 and metrics["grad_norm"] > 0
    for name, value in weights(engine).items():
        assert torch.equal(value, before[name]) != is_adapter(name), name
    assert not torch.allclose(logprobs(engine, batch), first, atol=1e-3)
    assert torch.equal(logprobs(WithoutAdapters(engine), batch), first)


def test_what_is_streamed_and_written_is_the_merged_model(
    open_engine, ragged_batch, tiny_model, tmp_path: Path
) -> None:
    engine, batch = open_engine(), ragged_batch()
    train(engine, batch, num_steps=4)
    streamed = dict(engine.export_params())
    plain = FSDPEngine(tiny_model(), None, EngineConfig(), ranks=Ranks.single("cpu"))
    assert streamed.keys() == dict(plain.export_params()).keys()
    engine.export_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    loaded = FSDPEngine(model, None, EngineConfig(), ranks=Ranks.single("cpu"))
    assert torch.allclose(logprobs(loaded, batch), logprobs(engine, batch), atol=1e-4)
    for name, value in loaded.export_params():
        assert torch.equal(value, streamed[name]), name


def test_a_state_holds_adapters_alone_and_goes_on_bit_for_bit(
    open_engine, ragged_batch, tmp_path: Path
) -> None:
    from agentrl.dist.sharded_state import stored_tensors

    engine, batch = open_engine(), ragged_batch()
    train(engine, batch)
    engine.save(tmp_path).wait()
    names = stored_tensors(tmp_path)
    assert all(is_adapter(name) for name in names)
    train(engine, batch)
    again = open_engine(seed=4)
    again.load(tmp_path)
    train(again, batch)
    expected = weights(engine)
    assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())
