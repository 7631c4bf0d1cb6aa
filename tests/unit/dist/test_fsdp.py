from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.algo.loss import PolicyLoss
from agentrl.algo.policy_losses import Vanilla
from agentrl.batch import Batch
from agentrl.dist.config import EngineConfig, Offload, Precision, Schedule
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.ranks import Ranks
from agentrl.dist.sharded_state import load_full, read_values
from agentrl.errors import CheckpointError, ConfigError, ModelError, TrainingError

Make = Callable[..., Any]
BIG = 10_000


def _loss(batch: Batch) -> PolicyLoss:
    num_tokens = int(batch.tokens["loss_mask"].sum())
    return PolicyLoss(token_loss=Vanilla(), num_tokens=num_tokens)


def _engine(model: Any, config: EngineConfig, **settings: Any) -> FSDPEngine:
    return FSDPEngine(model, None, config, ranks=Ranks.single("cpu"), **settings)


def _step(engine: FSDPEngine, batch: Batch, budget: int = BIG) -> dict[str, float]:
    return engine.train_mini_batch(batch, _loss(batch), tokens_per_micro_batch=budget)


def _state(engine: FSDPEngine) -> dict[str, Any]:
    """All that a checkpoint of the engine holds."""
    with TemporaryDirectory() as directory:
        engine.save(Path(directory)).wait()
        return {"tensors": load_full(Path(directory)), "values": read_values(Path(directory))}


def _infer(engine: FSDPEngine, batch: Batch) -> torch.Tensor:
    return engine.infer_batch(batch, tokens_per_micro_batch=BIG)["logprobs"]


def _weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.export_params()}


def _assert_same(one: Any, other: Any) -> None:
    """Equal, bit for bit, all the way down."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            _assert_same(one[name], other[name])
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    else:
        assert one == other


def test_a_step_raises_the_probability_of_what_had_an_advantage(
    tiny_model: Make, ragged_batch: Make
) -> None:
    batch = ragged_batch()
    engine = _engine(tiny_model(), EngineConfig(lr=1e-2))
    before = _infer(engine, batch)
    batch.tokens["old_logprobs"] = before
    metrics = _step(engine, batch)
    gain = _infer(engine, batch) - before
    assert float((gain * batch.tokens["advantages"] * batch.tokens["loss_mask"]).sum()) > 0
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["grad_norm"] > 0 and metrics["skipped"] == 0
    assert (engine.num_updates, engine.num_skipped) == (1, 0)


# With a huge epsilon AdamW's first step is the gradient itself, times lr / eps.
DESCENT = EngineConfig(lr=1e3, eps=1e3, grad_clip=0.0)


@pytest.mark.parametrize("budget", [1, 40, 64])
def test_the_gradient_does_not_depend_on_micro_batches(
    tiny_model: Make, ragged_batch: Make, budget: int
) -> None:
    batch = ragged_batch()
    whole, split = (_engine(tiny_model(), DESCENT) for _ in range(2))
    metrics = _step(whole, batch), _step(split, batch, budget)
    for name, value in split.export_params():
        torch.testing.assert_close(value, _weights(whole)[name], atol=1e-6, rtol=0)
    assert metrics[0]["micro_batches"] == 1 and metrics[1]["micro_batches"] > 1
    for name in ("loss", "kl", "entropy", "grad_norm", "ratio_max", "pg_clipfrac"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], abs=1e-5), name


def test_the_gradient_does_not_depend_on_the_order_of_rows(
    tiny_model: Make, ragged_batch: Make
) -> None:
    batch = ragged_batch()
    straight, shuffled = (_engine(tiny_model(), DESCENT) for _ in range(2))
    _step(straight, batch)
    _step(shuffled, batch.select([4, 2, 0, 5, 3, 1]), 64)
    for name, value in shuffled.export_params():
        torch.testing.assert_close(value, _weights(straight)[name], atol=1e-6, rtol=0)


def test_the_gradient_is_clipped_to_the_norm_asked_for(
    tiny_model: Make, ragged_batch: Make
) -> None:
    before = _weights(_engine(tiny_model(), DESCENT))
    config = EngineConfig(lr=1e3, eps=1e3, grad_clip=0.01)
    engine = _engine(tiny_model(), config)
    metrics = _step(engine, ragged_batch())
    moved = torch.cat([(v - before[n]).flatten() for n, v in engine.export_params()])
    assert metrics["grad_norm"] > 0.05  # as it was before clipping
    assert float(moved.norm()) == pytest.approx(0.01, rel=0.01)


def test_rerun_gives_the_same_bits(tiny_model: Make, ragged_batch: Make) -> None:
    def run() -> dict[str, Any]:
        engine = _engine(tiny_model(), EngineConfig(lr=1e-2))
        for seed in range(4):
            _step(engine, ragged_batch(seed), 64)
        return _state(engine)

    _assert_same(run(), run())


def test_resumed_training_is_the_same_bits_as_unbroken(
    tiny_model: Make, ragged_batch: Make, tmp_path: Path
) -> None:
    config = EngineConfig(lr=1e-2, schedule=Schedule.cosine, warmup_steps=2, weight_decay=0.1)

    def engine(seed: int) -> FSDPEngine:
        return _engine(tiny_model(seed), config, total_updates=6)

    unbroken = engine(0)
    for step in range(3):
        _step(unbroken, ragged_batch(step))
    saving = unbroken.save(tmp_path)
    noise = torch.rand(3)  # drawn from the restored generator as well
    rates = [_step(unbroken, ragged_batch(step))["lr"] for step in range(3, 6)]
    saving.wait()  # only now: what was trained since is not in it

    resumed = engine(1)
    resumed.load(tmp_path)
    assert torch.equal(torch.rand(3), noise)
    again = [_step(resumed, ragged_batch(step))["lr"] for step in range(3, 6)]
    assert again == rates and len(set(rates)) == 3
    _assert_same(_state(resumed), _state(unbroken))


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    tiny_model: Make, ragged_batch: Make
) -> None:
    engine = _engine(tiny_model(), EngineConfig(lr=1e-2, warmup_steps=10))
    _step(engine, ragged_batch())
    before = _state(engine)
    poisoned = ragged_batch(1)
    poisoned.tokens["advantages"][poisoned.tokens["loss_mask"].nonzero()[3]] = float("nan")
    metrics = _step(engine, poisoned)
    assert metrics["skipped"] == 1.0
    after = _state(engine)
    counters = [state["values"].pop("counters") for state in (before, after)]
    assert counters == [{"num_updates": 1, "num_skipped": n} for n in (0, 1)]
    _assert_same(after, before)
    healthy = _step(engine, ragged_batch(2))
    assert healthy["skipped"] == 0.0
    assert all(bool(value.isfinite().all()) for _, value in engine.export_params())


def test_nothing_to_train_changes_nothing(tiny_model: Make, ragged_batch: Make) -> None:
    engine = _engine(tiny_model(), EngineConfig(lr=1e-2))
    _step(engine, ragged_batch())
    before = _state(engine)
    empty = ragged_batch(1)
    empty.tokens["loss_mask"][:] = False
    assert _step(engine, empty) == {"micro_batches": 0}
    _assert_same(_state(engine), before)
    assert not _infer(engine, empty).any()


def test_weight_decay_spares_norms(tiny_model: Make, ragged_batch: Make) -> None:
    batch = ragged_batch()
    batch.tokens["advantages"][:] = 0.0  # no gradient: only the decay moves anything
    before = _weights(_engine(tiny_model(), EngineConfig()))
    engine = _engine(tiny_model(), EngineConfig(lr=0.1, weight_decay=0.5))
    _step(engine, batch)
    for name, value in engine.export_params():
        factor = 1.0 if value.ndim < 2 else 1 - 0.1 * 0.5
        torch.testing.assert_close(value, before[name] * factor, msg=name)


def test_tied_tensors_are_exported_once_under_the_name_of_the_saved_file(
    tiny_model: Make, tmp_path: Path
) -> None:
    for tied in (True, False):
        engine = _engine(tiny_model(tied=tied), EngineConfig())
        names = [name for name, _ in engine.export_params()]
        assert len(names) == len(set(names))
        engine.export_pretrained(tmp_path / str(tied))
        assert set(names) == set(load_file(tmp_path / str(tied) / "model.safetensors"))
        assert ("lm_head.weight" in names) is not tied


def test_weights_that_leave_the_device_during_an_export_come_back_for_it(tiny_model: Make) -> None:
    engine = _engine(tiny_model(), EngineConfig(offload=Offload.all))
    before = _weights(engine)
    stream = engine.export_params()
    first, _ = next(stream)
    engine.offload()
    assert all(value.untyped_storage().nbytes() == 0 for value in engine.model.parameters())
    for name, value in stream:
        assert name != first and torch.equal(value, before[name]), name


def test_an_exported_model_gives_the_same_logits(
    tiny_model: Make, ragged_batch: Make, tmp_path: Path
) -> None:
    engine = _engine(tiny_model(), EngineConfig(lr=1e-2))
    _step(engine, ragged_batch())
    engine.export_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, engine.model(input_ids=ids).logits)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"


def test_a_state_of_another_model_is_refused_by_name(tiny_model: Make, tmp_path: Path) -> None:
    engine = _engine(tiny_model(), EngineConfig())
    _engine(tiny_model(1, tied=False), EngineConfig()).save(tmp_path).wait()
    before = _state(engine)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        engine.load(tmp_path)
    _assert_same(_state(engine), before)


def test_a_falling_schedule_without_an_end_is_refused_before_training(tiny_model: Make) -> None:
    with pytest.raises(ConfigError, match="total_updates"):
        _engine(tiny_model(), EngineConfig(schedule=Schedule.linear))


def test_a_frozen_engine_needs_no_schedule(tiny_model: Make, ragged_batch: Make) -> None:
    model = tiny_model()
    config = EngineConfig(schedule=Schedule.linear)  # the actor's, for a reference
    frozen = _engine(model, config, trainable=False)
    assert bool(_infer(frozen, ragged_batch()).any())
    assert not any(value.requires_grad for value in model.parameters())


def test_a_frozen_engine_has_nothing_to_train_save_or_load(
    tiny_model: Make, ragged_batch: Make, tmp_path: Path
) -> None:
    frozen = _engine(tiny_model(), EngineConfig(), trainable=False)
    for method in (frozen.save, frozen.load):
        with pytest.raises(TrainingError, match="only reads .*no state of its own"):
            method(tmp_path)
    with pytest.raises(TrainingError, match="only reads .*nothing to train"):
        _step(frozen, ragged_batch())
    assert not any(tmp_path.iterdir())


def test_a_critic_is_not_exported_without_its_head(tiny_model: Make, tmp_path: Path) -> None:
    critic = _engine(tiny_model(), EngineConfig(), head="value")
    with pytest.raises(ModelError, match="value head would be lost"):
        critic.export_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())


def test_bf16_stays_near_fp32_and_keeps_float32_weights(
    tiny_model: Make, ragged_batch: Make
) -> None:
    batch = ragged_batch()
    exact = _engine(tiny_model(), EngineConfig())
    half = _engine(tiny_model(), EngineConfig(lr=1e-3, precision=Precision.bf16))
    want = _infer(exact, batch)
    got = _infer(half, batch)
    assert 0 < float((got - want).abs().max()) < 0.05
    assert _step(half, batch)["skipped"] == 0.0
    assert {value.dtype for _, value in half.export_params()} == {torch.float32}


def test_scores_of_the_pass_that_trains_come_along(tiny_model: Make, ragged_batch: Make) -> None:
    batch = ragged_batch()
    engine = _engine(tiny_model(), EngineConfig(lr=1e-2))
    before = _infer(engine, batch)
    metrics = engine.train_mini_batch(
        batch, _loss(batch), tokens_per_micro_batch=40, keep=("logprobs", "entropy")
    )
    torch.testing.assert_close(metrics["logprobs/tokens"], before, atol=1e-5, rtol=0)
    mask = batch.tokens["loss_mask"]
    assert bool((metrics["entropy/tokens"][mask] > 0).all())
    assert not bool(metrics["logprobs/tokens"][~mask].any())
    assert not torch.allclose(_infer(engine, batch), before, atol=1e-3)
    assert "logprobs/tokens" not in _step(engine, batch)
