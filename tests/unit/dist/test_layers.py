from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

import agentrl.dist.layers as layers
from agentrl.batch import Batch
from agentrl.dist.config import Recompute
from agentrl.dist.layers import decoder_layers
from agentrl.dist.packed_model import PackedModel
from agentrl.dist.scoring import TokenScorer
from agentrl.errors import ModelError

Make = Callable[..., Any]


def _gradient(packed: PackedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    scores = TokenScorer(packed)(batch, fields=("logprobs",))["logprobs"]
    packed.zero_grad()
    scores.sum().backward()
    gradients = [value.grad.flatten() for value in packed.parameters() if value.grad is not None]
    return scores.detach(), torch.cat(gradients)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compile by tracing alone, and count the graphs."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(layers, "BACKEND", backend)
    return graphs


@pytest.mark.parametrize("recompute", [Recompute.selective, Recompute.full])
def test_recomputing_changes_no_bit_and_computes_again(
    tiny_model: Make, ragged_batch: Make, recompute: Recompute
) -> None:
    batch, kept = ragged_batch(), PackedModel(tiny_model().eval())
    again = PackedModel(tiny_model().eval(), recompute=recompute)
    calls = {"kept": 0, "again": 0}
    for name, packed in (("kept", kept), ("again", again)):

        def count(*args: Any, name: str = name) -> None:
            calls[name] += 1

        packed.model.model.layers[0].mlp.register_forward_pre_hook(count)
    want, got = _gradient(kept, batch), _gradient(again, batch)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert calls == {"kept": 1, "again": 2}
    with torch.no_grad():  # nothing to keep: nothing to compute again
        TokenScorer(again)(batch, fields=("logprobs",))
    assert calls["again"] == 3


def test_compiled_layers_share_a_graph_for_all_micro_batches(
    tiny_model: Make, ragged_batch: Make, traced: list[Any]
) -> None:
    plain = PackedModel(tiny_model().eval())
    compiled = PackedModel(tiny_model().eval(), compile=True)
    for lengths in ((12, 5, 30, 1, 17, 8), (40, 41), (100, 90, 80, 70), (300,), (7, 7, 7)):
        batch = ragged_batch(lengths=lengths)
        want, got = _gradient(plain, batch), _gradient(compiled, batch)
        torch.testing.assert_close(got[0], want[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(got[1], want[1], atol=1e-4, rtol=1e-4)
    assert len(traced) == 1


@pytest.mark.parametrize("recompute", [Recompute.selective, Recompute.full])
def test_compiled_layers_can_be_recomputed(
    tiny_model: Make, ragged_batch: Make, traced: list[Any], recompute: Recompute
) -> None:
    batch = ragged_batch()
    want = _gradient(PackedModel(tiny_model().eval()), batch)
    got = _gradient(PackedModel(tiny_model().eval(), recompute=recompute, compile=True), batch)
    assert traced
    torch.testing.assert_close(got[1], want[1], atol=1e-4, rtol=1e-4)


def test_what_cannot_be_compiled_is_an_error_not_an_eager_run(
    tiny_model: Make, ragged_batch: Make, traced: list[Any]
) -> None:
    model = tiny_model().eval()
    packed = PackedModel(model, compile=True)
    model.model.layers[0].mlp.register_forward_hook(lambda *args: torch._dynamo.graph_break())
    with pytest.raises(TorchDynamoException):
        TokenScorer(packed)(ragged_batch(), fields=("logprobs",))


def test_a_copy_has_layers_of_its_own(tiny_model: Make, ragged_batch: Make) -> None:
    packed = PackedModel(tiny_model().eval(), recompute=Recompute.full)
    other = copy.deepcopy(packed)
    with torch.no_grad():
        for value in other.parameters():
            value.zero_()
        scores = TokenScorer(packed)(ragged_batch(), fields=("logprobs",))["logprobs"]
    assert len(scores.unique()) > 2  # a model of zeros would give all tokens one probability


def test_a_model_that_names_no_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="_no_split_modules"):
        decoder_layers(nn.Linear(2, 2))
