from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

from agentrl.batch import Batch
from agentrl.dist.packed_model import PackedModel
from agentrl.dist.scoring import TokenScorer
from agentrl.errors import ModelError
from agentrl.testing.random_models import BUILDERS, build

Make = Callable[..., Any]


@torch.no_grad()
def _one_by_one(model: Any, batch: Batch) -> list[float]:
    """Log-probabilities of the trained tokens, each row by itself through the whole model."""
    found: list[float] = []
    for row in range(batch.num_rows):
        part = batch.select([row]).tokens
        logs = model(input_ids=part["ids"][None]).logits[0].double().log_softmax(-1)
        of_token = [0.0, *logs[:-1].gather(1, part["ids"][1:, None])[:, 0].tolist()]
        kept = zip(of_token, part["loss_mask"].tolist(), strict=True)
        found += [value if trained else 0.0 for value, trained in kept]
    return found


def _mistral(window: int | None) -> Any:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
    )
    model = MistralForCausalLM(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim > 1:
                value.normal_(0.0, 0.3)
    return model


@pytest.mark.parametrize("name", BUILDERS)
def test_packed_rows_score_as_each_by_itself(name: str, ragged_batch: Make) -> None:
    model, batch = build(name), ragged_batch()
    want = _one_by_one(model, batch)
    packed = PackedModel(model)
    assert packed.layout.packed and packed.layout.plain_head
    with torch.no_grad():
        got = TokenScorer(packed)(batch, fields=("logprobs",))["logprobs"]
    assert got.tolist() == pytest.approx(want, abs=1e-5)


def test_a_row_does_not_depend_on_its_neighbours(tiny_model: Make, ragged_batch: Make) -> None:
    scorer, batch = TokenScorer(PackedModel(tiny_model().eval())), ragged_batch()
    changed = copy.deepcopy(batch)
    changed.tokens["ids"][:12] = 3  # the first row
    with torch.no_grad():
        before = scorer(batch, fields=("logprobs",))["logprobs"]
        after = scorer(changed, fields=("logprobs",))["logprobs"]
    assert torch.equal(before[12:], after[12:])
    assert not torch.equal(before[:12], after[:12])


def test_windows_of_attention_are_kept_by_padding(
    ragged_batch: Make, caplog: pytest.LogCaptureFixture
) -> None:
    batch = ragged_batch()
    model, without = _mistral(window=4), _mistral(window=None)
    want = _one_by_one(model, batch)
    assert want != pytest.approx(_one_by_one(without, batch), abs=1e-3)  # the window matters
    with caplog.at_level(logging.WARNING):
        packed = PackedModel(model)
    assert not packed.layout.packed and "MistralForCausalLM" in caplog.text
    with torch.no_grad():
        got = TokenScorer(packed)(batch, fields=("logprobs",))["logprobs"]
    assert got.tolist() == pytest.approx(want, abs=1e-5)
    assert PackedModel(without).layout.packed


def test_a_model_that_looks_ahead_is_refused_by_name(tiny_model: Make) -> None:
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ModelError, match="Qwen3ForCausalLM"):
        PackedModel(model)


def test_the_model_by_itself_stays_what_it_was(tiny_model: Make) -> None:
    model, plain = tiny_model().eval(), tiny_model().eval()
    PackedModel(model)
    ids = torch.arange(20).view(2, 10)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0  # padded on the left, as for generation
    with torch.no_grad():
        for how in ({}, {"attention_mask": mask}):
            assert torch.equal(model(ids, **how).logits, plain(ids, **how).logits)


def test_values_stand_before_and_after_each_token(tiny_model: Make, ragged_batch: Make) -> None:
    model, batch = tiny_model().eval(), ragged_batch()
    packed = PackedModel(model, head="value")
    scorer, fields = TokenScorer(packed), ("values", "next_values")
    with torch.no_grad():
        assert not any(bool(value.any()) for value in scorer(batch, fields=fields).values())
        assert packed.value_head is not None
        nn.init.normal_(packed.value_head.weight)
        nn.init.constant_(packed.value_head.bias, 0.5)
        got = scorer(batch, fields=fields)
        for row in range(batch.num_rows):
            span = slice(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1]))
            ids, trained = batch.tokens["ids"][span], batch.tokens["loss_mask"][span]
            values = packed.value_head(model.model(ids[None]).last_hidden_state[0])[:, 0]
            where = trained.nonzero()[:, 0]
            torch.testing.assert_close(got["values"][span][where], values[where - 1])
            torch.testing.assert_close(got["next_values"][span][where], values[where])
            assert not got["values"][span][~trained].any()
    with pytest.raises(ValueError, match="logprobs"):
        scorer(batch, fields=("logprobs",))


def test_a_critic_does_not_train_the_output_embedding_it_never_uses(tiny_model: Make) -> None:
    untied, tied = (PackedModel(tiny_model(tied=tied), head="value") for tied in (False, True))
    assert not untied.model.lm_head.weight.requires_grad
    assert tied.model.lm_head.weight.requires_grad
