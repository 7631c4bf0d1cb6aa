from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.dist.config import Precision
from agentrl.errors import CheckpointError
from agentrl.testing.random_models import build
from agentrl.train.reference import open_reference


def opened(model: Any, path: Path, *, resumed: bool) -> Any:
    return open_reference(
        model, path, temperature=1.0, precision=Precision.fp32, resumed=resumed
    ).model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "reference" / "model.safetensors"


def test_a_resumed_run_keeps_the_policy_that_it_started_from(path: Path) -> None:
    first, later = build("qwen3", seed=0), build("qwen3", seed=1)
    opened(first, path, resumed=False)
    again = opened(later, path, resumed=True)
    for name, value in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert not any(p.requires_grad for p in again.parameters())
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.blake2", "model.safetensors"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "no_digest"])
def test_a_damaged_reference_is_refused(path: Path, damage: str) -> None:
    model = build("qwen3")
    opened(model, path, resumed=False)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-100] ^= 1
    elif damage == "truncate":
        del data[len(data) // 2 :]
    elif damage == "empty":
        data.clear()
    else:
        path.with_suffix(".blake2").unlink()
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="damaged"):
        opened(model, path, resumed=True)


def test_a_missing_reference_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        opened(build("qwen3"), path, resumed=True)


def test_a_reference_of_another_model_is_refused(path: Path) -> None:
    opened(build("qwen2"), path, resumed=False)
    with pytest.raises(CheckpointError, match="another model"):
        opened(build("qwen3"), path, resumed=True)
