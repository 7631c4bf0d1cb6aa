from __future__ import annotations

import pytest
import torch

import agentrl.weights.checksum as module
from agentrl.weights.checksum import checksum, checksums
from agentrl.weights.served import differences


def _by_hand(values: torch.Tensor) -> int:
    total = sum((i + 1) * bits for i, bits in enumerate(values.view(torch.int32).tolist()))
    return (total + 2**63) % 2**64 - 2**63


def test_equals_the_formula_in_python_integers_and_wraps_around() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert checksum(values.reshape(10, 100)) == _by_hand(values)
    negative = torch.full((300_000,), -1e38)
    assert checksum(negative) == _by_hand(negative)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000)
    whole = checksum(values)
    monkeypatch.setattr(module, "_CHUNK", 7)
    assert checksum(values) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_flipped_bit_or_a_swap_is_noticed_in_every_width(dtype: torch.dtype) -> None:
    values = torch.arange(1, 65).to(dtype).reshape(8, 8)
    original = checksum(values)
    flipped = values.clone()
    flipped.view(torch.uint8)[3, 0] ^= 1
    assert checksum(flipped) != original
    assert checksum(values[[1, 0, *range(2, 8)]]) != original
    assert checksum(values.t()) != original


def test_a_view_is_summed_as_its_copy() -> None:
    values = torch.randn(6, 6)
    assert checksum(values.t()) == checksum(values.t().contiguous())
    assert checksum(values[1:, 2:4]) == checksum(values[1:, 2:4].clone())


def test_differences_name_what_is_missing_changed_or_new() -> None:
    sent = checksums([("a", torch.ones(2)), ("b", torch.ones(2)), ("c", torch.ones(2))])
    served = checksums([("a", torch.ones(2)), ("b", torch.zeros(2)), ("d", torch.ones(2))])
    assert differences(sent, served) == ["b", "c", "d"]
    assert differences(sent, sent) == []
