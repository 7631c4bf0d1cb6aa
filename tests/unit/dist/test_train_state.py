"""A state that was saved by any number of ranks comes back, bit for bit, at any other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from agentrl.dist.sharded_state import load_full, num_saved_ranks, read_values
from agentrl.dist.train_state import TrainState, capture_torch_rng, restore_torch_rng
from agentrl.errors import CheckpointError

PROGRAM = Path(__file__).with_name("resharding_ranks.py")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def resharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks saved and loaded; see the program."""
    root = tmp_path_factory.mktemp("resharded")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(root), str(rank)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0, errors[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return root


def _assert_same(one: Path, other: Path) -> None:
    left, right = load_full(one), load_full(other)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype and torch.equal(value, right[name]), name


@pytest.mark.timeout(180)
def test_two_ranks_to_one_and_back_is_the_same_state_bit_for_bit(resharded: Path) -> None:
    assert [num_saved_ranks(resharded / name) for name in ("two", "one", "two_again")] == [2, 1, 2]
    for name in ("one", "two_again", "copies"):
        _assert_same(resharded / "two", resharded / name)
        saved, found = read_values(resharded / "two"), read_values(resharded / name)
        assert found == saved, name
    for rank in range(2):  # shard by shard, too
        file = f"shard_{rank:05d}.safetensors"
        one, again = (load_file(resharded / name / file) for name in ("two", "two_again"))
        assert one.keys() == again.keys()
        assert all(torch.equal(value, again[name]) for name, value in one.items())
    tensors = load_full(resharded / "two")
    assert {name for name in tensors if name.startswith("optimizer/")} == {
        f"optimizer/{moment}/{name}"
        for moment in ("exp_avg", "exp_avg_sq")
        for name in ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")
    }
    assert all(bool(value.any()) for name, value in tensors.items() if name != "model/calls")


def test_training_that_goes_on_from_there_is_the_unbroken_one(resharded: Path) -> None:
    _assert_same(resharded / "unbroken", resharded / "resumed")
    unbroken, before = load_full(resharded / "unbroken"), load_full(resharded / "two")
    assert not torch.equal(unbroken["model/0.weight"], before["model/0.weight"])


def test_a_rank_keeps_its_generator_and_a_new_one_gets_its_own(resharded: Path) -> None:
    def generators(name: str) -> list[str]:
        return [read_values(resharded / name, rank=rank)["rng"]["cpu"] for rank in range(2)]

    two, two_again, copies = (generators(name) for name in ("two", "two_again", "copies"))
    assert copies == two and two[0] != two[1]
    assert two_again[0] == two[0]
    assert two_again[1] not in two  # rank 1 had no state in the checkpoint of one rank


def test_a_rank_that_never_was_draws_numbers_of_its_own_reproducibly() -> None:
    torch.manual_seed(7)
    state = capture_torch_rng(CPU)

    def draw(rank: int | None) -> float:
        restore_torch_rng(state, CPU, rank=rank)
        return float(torch.rand(()))

    assert draw(1) == draw(1)
    assert len({draw(None), draw(1), draw(2)}) == 3


def _state(model: nn.Module, *, steps: int = 0) -> TrainState:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TrainState(
        model=dict(model.state_dict(keep_vars=True)),
        parameters=dict(model.named_parameters()),
        optimizer=optimizer,
        device=CPU,
    )
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return state


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Sequential(nn.Linear(3, 2)), r"lacks \['model/0.bias'"),
        (nn.Linear(3, 2, bias=False), r"has unknown .*'model/bias'"),
        (nn.Linear(4, 2), r"'model/weight' is .*\(2, 3\).*\(2, 4\)"),
        (nn.Linear(3, 2).to(torch.bfloat16), r"'model/\w+' is torch.float32.*bfloat16"),
    ],
)
def test_another_model_is_refused_by_name_and_stays_as_it_was(
    tmp_path: Path, other: nn.Module, message: str
) -> None:
    _state(nn.Linear(3, 2)).save(tmp_path, {}).wait()
    state = _state(other, steps=1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        state.load(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert len(state.optimizer.state) == len(list(other.parameters()))


def test_moments_of_what_is_not_trained_here_are_refused(tmp_path: Path) -> None:
    _state(nn.Linear(3, 2), steps=1).save(tmp_path, {}).wait()
    state = _state(nn.Linear(3, 2))
    frozen = TrainState(model=state.model, parameters={}, optimizer=state.optimizer, device=CPU)
    with pytest.raises(CheckpointError, match="which this one does not train"):
        frozen.load(tmp_path)


def test_a_state_that_lacks_a_ranks_file_is_refused(resharded: Path, tmp_path: Path) -> None:
    """Its tensors would be part old, part new."""
    for path in (resharded / "two").iterdir():
        if path.name != "shard_00000.safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="not complete.*a rank's file is missing"):
        load_full(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"counters": [], "optimizer": {}, "rng": {}},
        {"optimizer": {"step": {"weight": None}}},
        {"optimizer": {"step": {"other": 1.0}}},
        {"rng": {"cpu": "not hexadecimal"}},
        {"rng": {"cpu": "00"}},
    ],
    ids=str,
)
def test_values_of_another_form_are_refused_before_anything_changes(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    _state(nn.Linear(3, 2), steps=1).save(tmp_path, {}).wait()
    saved = read_values(tmp_path)
    (tmp_path / "values_00000.json").write_text(json.dumps(saved | values if values else {}))
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match="not those of a training engine|does not train"):
        _state(model).load(tmp_path)
    assert torch.equal(model.weight, before)
