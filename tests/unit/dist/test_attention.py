from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from agentrl.dist.attention import packed_attention
from agentrl.dist.packed_model import pack
from agentrl.errors import ModelError

HEADS, KEY_HEADS, SIZE = 4, 2, 8


class _Layer(nn.Module):
    num_key_value_groups = HEADS // KEY_HEADS


def _inputs(num_tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(heads: int) -> Tensor:
        return torch.randn(1, heads, num_tokens, SIZE, generator=generator).requires_grad_()

    return random(HEADS), random(KEY_HEADS), random(KEY_HEADS)


def _row_by_row(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    rows = zip(*(part.split(lengths, dim=2) for part in (query, key, value)), strict=True)
    found = [
        nn.functional.scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True)
        for row in rows
    ]
    return torch.cat(found, dim=2).transpose(1, 2)


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_rows_attend_to_themselves_alone(lengths: list[int], seed: int) -> None:
    parts = _inputs(sum(lengths), seed)
    _, packing = pack(torch.tensor(lengths), torch.device("cpu"))
    got, weights = packed_attention(_Layer(), *parts, None, scaling=SIZE**-0.5, packing=packing)
    want = _row_by_row(*parts, lengths)
    assert weights is None
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    gradient = torch.randn(got.shape, generator=torch.Generator().manual_seed(seed))
    for one, other in zip(
        torch.autograd.grad(got, parts, gradient),
        torch.autograd.grad(want, parts, gradient),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "sliding_window"])
def test_what_would_change_the_result_is_refused(name: str) -> None:
    _, packing = pack(torch.tensor([3, 2]), torch.device("cpu"))
    with pytest.raises(ModelError, match=name):
        packed_attention(_Layer(), *_inputs(5, 0), None, None, packing, **{name: 4})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_boundaries_on_a_gpu_give_what_padding_gives() -> None:
    lengths = [70, 1, 33, 128]
    query, key, value = (
        part.detach().to("cuda", torch.bfloat16) for part in _inputs(sum(lengths), 0)
    )
    _, packing = pack(torch.tensor(lengths), torch.device("cuda"))
    got, _ = packed_attention(
        _Layer(), query, key, value, None, scaling=SIZE**-0.5, packing=packing
    )
    want = _row_by_row(query.float(), key.float(), value.float(), lengths)
    torch.testing.assert_close(got.float(), want, atol=0.02, rtol=0.02)
