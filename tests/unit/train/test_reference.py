from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.errors import CheckpointError
from agentrl.model.load import LoadedModel, load_model
from agentrl.model.tiny import build_tiny, tiny_config
from agentrl.testing import make_tokenizer
from agentrl.train.reference import keep_reference


def policy(seed: int) -> LoadedModel:
    tokenizer = make_tokenizer()
    shape = tiny_config(len(tokenizer), hidden_size=32, num_layers=2, num_heads=1, head_dim=16)
    return LoadedModel(model=build_tiny(tokenizer, seed, shape), tokenizer=tokenizer, source="tiny")


def test_a_resumed_run_keeps_the_policy_that_it_started_from(tmp_path: Path) -> None:
    first, later = policy(0), policy(1)
    keep_reference(first, tmp_path, resumed=False)
    folder = keep_reference(later, tmp_path, resumed=True)
    again = load_model(str(folder), device="cpu")
    for name, value in first.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    assert [path.name for path in tmp_path.iterdir()] == ["reference"]


def test_a_start_that_was_killed_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    (tmp_path / ".writing-reference").mkdir()
    (tmp_path / ".writing-reference" / "model.safetensors").write_bytes(b"half")
    keep_reference(policy(0), tmp_path, resumed=False)
    keep_reference(policy(0), tmp_path, resumed=True)


def test_a_damaged_reference_is_refused(tmp_path: Path) -> None:
    folder = keep_reference(policy(0), tmp_path, resumed=False)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="damaged.*model.safetensors.*the reference policy"):
        keep_reference(policy(0), tmp_path, resumed=True)


def test_a_missing_reference_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing.*the reference policy of the KL"):
        keep_reference(policy(0), tmp_path, resumed=True)
