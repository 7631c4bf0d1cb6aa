"""A model's architecture and tokenizer travel without its weights."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from agentrl.agent.renderer import Renderer
from agentrl.model.blueprint import Blueprint
from agentrl.model.load import LoadedModel
from agentrl.model.tiny import build_tiny, train_tokenizer
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
