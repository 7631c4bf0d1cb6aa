from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM

import agentrl.dist.head as head
from agentrl.batch import Batch
from agentrl.dist.packed_model import PackedModel
from agentrl.dist.scoring import TokenScorer

Make = Callable[..., Any]


FIELDS = ("logprobs", "entropy", "sum_pi_squared")


def _by_full_logits(model: Any, batch: Batch, temperature: float) -> dict[str, list[float]]:
    """One row at a time through the whole model, in float64 after the logits."""
    scores: dict[str, list[float]] = {name: [] for name in FIELDS}
    for row in range(batch.num_rows):
        ids = batch.select([row]).tokens["ids"]
        logits = model(input_ids=ids[None]).logits[0].double() / temperature
        log_softmax = logits.log_softmax(-1)
        for position in range(len(ids)):
            trained = bool(batch.select([row]).tokens["loss_mask"][position])
            logs = log_softmax[position - 1]
            probs = logs.exp()
            found = logs[ids[position]], -(probs * logs).sum(), probs.square().sum()
            for name, value in zip(FIELDS, found, strict=True):
                scores[name].append(float(value) if trained else 0.0)
    return scores


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False])
def test_equals_the_whole_model_row_by_row(
    tiny_model: Make, ragged_batch: Make, temperature: float, tied: bool
) -> None:
    model, batch = tiny_model(tied=tied).eval(), ragged_batch()
    with torch.no_grad():
        scores = TokenScorer(PackedModel(model), temperature=temperature)(batch, fields=FIELDS)
        alone = TokenScorer(PackedModel(model), temperature=temperature)(
            batch, fields=("logprobs",)
        )
        want = _by_full_logits(model, batch, temperature)
    assert scores.keys() == want.keys()
    for name, values in want.items():
        assert scores[name].tolist() == pytest.approx(values, abs=1e-5), name
    assert alone.keys() == {"logprobs"}
    torch.testing.assert_close(alone["logprobs"], scores["logprobs"], atol=1e-6, rtol=0)


def test_chunks_of_logits_change_neither_values_nor_gradients(
    tiny_model: Make, ragged_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = ragged_batch()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        model = tiny_model().eval()
        scores = TokenScorer(PackedModel(model), temperature=0.9)(batch, fields=FIELDS)
        (scores["logprobs"].sum() + scores["entropy"].square().sum()).backward()
        gradients = [value.grad.flatten() for value in model.parameters()]
        return torch.stack(list(scores.values())).detach(), torch.cat(gradients)

    whole = run()
    monkeypatch.setitem(head.MAX_LOGITS, "cpu", 97 * 4)  # four positions at a time
    chunked = run()
    torch.testing.assert_close(chunked[0], whole[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(chunked[1], whole[1], atol=1e-5, rtol=1e-5)


def test_a_family_that_scales_its_logits_is_scored_as_it_generates(ragged_batch: Make) -> None:
    torch.manual_seed(0)
    model = CohereForCausalLM(
        CohereConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            logit_scale=4.0,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    ).eval()
    batch = ragged_batch()
    with torch.no_grad():
        scores = TokenScorer(PackedModel(model), temperature=1.0)(batch, fields=("logprobs",))
        want = _by_full_logits(model, batch, 1.0)
    assert scores["logprobs"].tolist() == pytest.approx(want["logprobs"], abs=1e-4)


def test_training_the_first_token_of_a_row_is_refused(tiny_model: Make, ragged_batch: Make) -> None:
    batch = ragged_batch()
    batch.tokens["loss_mask"][12] = True
    with pytest.raises(ValueError, match="first token"):
        TokenScorer(PackedModel(tiny_model()), temperature=1.0)(batch, fields=("logprobs",))
