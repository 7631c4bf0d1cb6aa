from __future__ import annotations

import pickle

import pytest
import torch

from agentrl.dist.stored_model import store_model
from agentrl.model.load import LoadedModel
from agentrl.testing.random_models import build
from agentrl.testing.tokenizer import make_tokenizer
from agentrl.weights.buckets import Bucket

STORE: list[Bucket] = []


def put(bucket: Bucket) -> int:
    STORE.append(bucket)
    return len(STORE) - 1


def fetch(reference: int) -> Bucket:
    return STORE[reference]


@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied", "gpt2"])
def test_a_stored_model_is_opened_with_its_weights(name: str) -> None:
    model = LoadedModel(model=build(name), tokenizer=make_tokenizer(), source=name)
    stored = store_model(model, put=put, fetch=fetch)
    assert len(pickle.dumps(stored)) < 500_000  # the weights stay in the store
    opened = stored.open(device="cpu")
    ids = torch.arange(12)[None]
    assert torch.equal(opened.model(ids).logits, model.model(ids).logits)
    assert opened.source == name
    tied = opened.model.config.tie_word_embeddings
    same = opened.model.lm_head.weight is opened.model.get_input_embeddings().weight
    assert tied == same


def test_an_outline_has_shapes_and_no_storage() -> None:
    model = LoadedModel(model=build("qwen3"), tokenizer=make_tokenizer(), source="qwen3")
    outline = store_model(model, put=put, fetch=fetch).outline()
    shapes = {name: value.shape for name, value in model.model.named_parameters()}
    found = dict(outline.model.named_parameters())
    assert {name: value.shape for name, value in found.items()} == shapes
    assert all(value.is_meta for value in found.values())
