"""A model's architecture and tokenizer travel without its weights."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from agentrl.agent.renderer import Renderer
from agentrl.model.blueprint import Blueprint
from agentrl.model.load import LoadedModel
from agentrl.model.tiny import build_tiny, train_tokenizer
from agentrl.testing import random_models
from agentrl.types import Message

MESSAGES: list[Message] = [{"role": "user", "content": "17 or 42? <|im_end|>"}]


def test_a_blueprint_builds_the_same_architecture_and_tokenizer(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["17 or 42?", "higher, lower"], vocab_size=300)
    model = LoadedModel(model=build_tiny(tokenizer, seed=0), tokenizer=tokenizer, source="it")
    blueprint: Blueprint = pickle.loads(pickle.dumps(Blueprint.of(model)))
    weights = sum(p.nbytes for p in model.model.parameters())
    assert sum(map(len, blueprint.files.values())) < weights / 4, "no weights among the files"
    built = blueprint.build(device="cpu")
    assert built.source == "it" and not built.model.training
    built.model.load_state_dict(model.model.state_dict())
    ids = torch.tensor([Renderer(tokenizer).begin(MESSAGES, []).record.ids])
    assert Renderer(built.tokenizer).begin(MESSAGES, []).record.ids == ids[0].tolist()
    assert torch.equal(built.model(ids).logits, model.model(ids).logits)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied"])
def test_weights_that_are_tied_stay_tied_where_they_have_no_storage(name: str, device: str) -> None:
    tokenizer = train_tokenizer(["17 or 42?"], vocab_size=280)
    module = random_models.build(name)
    built = Blueprint.of(LoadedModel(model=module, tokenizer=tokenizer, source="it")).build(
        device=device
    )
    shapes = {name: value.shape for name, value in module.named_parameters()}
    assert {name: value.shape for name, value in built.model.named_parameters()} == shapes
    assert {value.device.type for value in built.model.parameters()} == {device}
