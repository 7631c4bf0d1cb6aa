from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.train.state_file import encode_state, read_state

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(value=PLAIN)
def test_plain_values_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, value: Any
) -> None:
    directory = tmp_path_factory.mktemp("state")
    encode_state({"value": value}).write(directory)
    back = read_state(directory)["value"]
    assert back == value
    if isinstance(value, float):
        assert struct.pack("d", back) == struct.pack("d", value)


def test_tensors_of_every_kind_come_back_bit_for_bit(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    base[0, 0] = math.nan
    state = {
        "a": {"weight": base, "transposed": base.t(), "view": base[1:3]},
        "half": [torch.randn(3).bfloat16(), torch.randn(3).half()],
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 3),
        "rng": torch.get_rng_state(),
        "mask": torch.tensor([True, False]),
    }
    encode_state(state).write(tmp_path)
    back = read_state(tmp_path)

    def same(one: Any, other: Any) -> bool:
        return one.dtype == other.dtype and bool(
            (one.contiguous().view(-1).view(torch.uint8) == other.view(-1).view(torch.uint8)).all()
            if one.numel() and one.ndim
            else torch.equal(one, other)
        )

    for name in ("weight", "transposed", "view"):
        assert same(state["a"][name], back["a"][name]), name
    for mine, theirs in zip(state["half"], back["half"], strict=True):
        assert same(mine, theirs)
    for name in ("scalar", "empty", "rng", "mask"):
        assert same(state[name], back[name]), name


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, object(), b"x", "tensor://a"])
def test_what_cannot_be_stored_exactly_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError):
        encode_state({"value": value}).write(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    encode_state({"weight": torch.zeros(2)}).write(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    encode_state({}).write(other)
    (other / "tensors.safetensors").rename(tmp_path / "tensors.safetensors")
    with pytest.raises(ValueError, match="/weight"):
        read_state(tmp_path)
