"""Where tensors lie in vLLM's fused and split parameters; its layers are played by stand-ins."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from agentrl.errors import EngineError
from agentrl.rollout.engines.vllm_names import Placement, check_names, find_placements
from agentrl.weights.checksum import checksum, checksum_slice, wrapped_sum

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
HEAD, HIDDEN, VOCAB, INNER = 4, 8, 10, 12


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)


class ColumnParallelLinear(nn.Module):
    def __init__(self, rows: int, columns: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = parameter(rows, columns)
        self.bias = parameter(rows) if bias else None


class QKVParallelLinear(ColumnParallelLinear):
    """As vLLM splits heads: a rank has at least one key head, maybe the same as its neighbour."""

    def __init__(self, ranks: int, heads: int, kv_heads: int, *, bias: bool) -> None:
        self_heads, self_kv = heads // ranks, max(1, kv_heads // ranks)
        super().__init__((self_heads + 2 * self_kv) * HEAD, HIDDEN, bias=bias)
        self.head_size, self.num_heads, self.num_kv_heads = HEAD, self_heads, self_kv
        self.total_num_heads, self.total_num_kv_heads = heads, kv_heads
        self.num_kv_head_replicas = max(1, ranks // kv_heads)


class MergedColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, ranks: int, sizes: list[int], *, bias: bool) -> None:
        super().__init__(sum(sizes) // ranks, HIDDEN, bias=bias)
        self.output_sizes = sizes


class RowParallelLinear(nn.Module):
    def __init__(self, ranks: int, rows: int, columns: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = parameter(rows, columns // ranks)
        self.bias = parameter(rows) if bias else None


class VocabParallelEmbedding(nn.Module):
    def __init__(self, ranks: int, rank: int) -> None:
        super().__init__()
        rows = -(-VOCAB // ranks) + 3  # padded
        start = min(rank * rows, VOCAB)
        self.weight = parameter(rows, HIDDEN)
        self.org_vocab_size = VOCAB
        self.shard_indices = SimpleNamespace(
            org_vocab_start_index=start, org_vocab_end_index=min(start + rows, VOCAB)
        )


class ParallelLMHead(VocabParallelEmbedding):
    pass


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = parameter(size)


class WithLoRA(nn.Module):
    """As vLLM wraps a layer that adapters may change."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer


class OneLayer(nn.Module):
    def __init__(
        self,
        *,
        ranks: int = 1,
        rank: int = 0,
        heads: int = 4,
        kv_heads: int = 2,
        bias: bool = True,
        tied: bool = False,
        lora: bool = False,
    ) -> None:
        super().__init__()
        wrap = WithLoRA if lora else lambda layer: layer
        self.embed = VocabParallelEmbedding(ranks, rank)
        self.qkv_proj = wrap(QKVParallelLinear(ranks, heads, kv_heads, bias=bias))
        self.o_proj = wrap(RowParallelLinear(ranks, HIDDEN, heads * HEAD, bias=bias))
        self.gate_up_proj = wrap(MergedColumnParallelLinear(ranks, [INNER, INNER], bias=bias))
        self.norm = Norm(HIDDEN)
        self.lm_head = self.embed if tied else ParallelLMHead(ranks, rank)


def full_shapes(*, heads: int, kv_heads: int, bias: bool, tied: bool) -> dict[str, tuple[int, ...]]:
    rows = {"q_proj": heads * HEAD, "k_proj": kv_heads * HEAD, "v_proj": kv_heads * HEAD}
    rows |= {"gate_proj": INNER, "up_proj": INNER}
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,)}
    shapes |= {f"{name}.weight": (size, HIDDEN) for name, size in rows.items()}
    shapes["o_proj.weight"] = (HIDDEN, heads * HEAD)
    if bias:
        shapes |= {f"{name}.bias": (size,) for name, size in rows.items()}
        shapes["o_proj.bias"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return shapes


def place(model: nn.Module, *, ranks: int = 1, rank: int = 0) -> list[Placement]:
    return find_placements(model, packed=PACKED, tensor_parallel=ranks, rank=rank)


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    kv_heads=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
    tied=st.booleans(),
    lora=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_weights_written_through_the_map_are_whole_and_add_up(
    ranks: int, kv_heads: int, bias: bool, tied: bool, lora: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = full_shapes(heads=4, kv_heads=kv_heads, bias=bias, tied=tied)
    sent = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    read = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    sums: dict[str, list[int]] = {name: [] for name in shapes}
    for rank in range(ranks):
        model = OneLayer(ranks=ranks, rank=rank, kv_heads=kv_heads, bias=bias, tied=tied, lora=lora)
        found = place(model, ranks=ranks, rank=rank)
        check_names(found, shapes, model="OneLayer")
        for part in found:
            part.view.copy_(part.cut(sent[part.name]))
            if part.counted:
                sums[part.name].append(checksum_slice(part.view, part.shape, part.starts))
        for part in find_placements(model, packed=PACKED, tensor_parallel=ranks, rank=rank):
            part.cut(read[part.name]).copy_(part.view)
    for name, value in sent.items():
        assert torch.equal(read[name], value), name
        assert wrapped_sum(sums[name]) == checksum(value), name


def test_fused_rows_lie_in_the_order_in_which_vllm_multiplies_them() -> None:
    model = OneLayer(bias=False, tied=True)
    for part in place(model):
        part.view.fill_({"q_proj.weight": 1.0, "k_proj.weight": 2.0}.get(part.name, 3.0))
    fused: Any = model.qkv_proj
    assert fused.weight[:, 0].tolist() == [1.0] * 16 + [2.0] * 8 + [3.0] * 8


def changed(shapes: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in {**shapes, **changes}.items() if shape is not None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q_norm.weight": (4,)}, "1 tensors have no place in it ['q_norm.weight']"),
        ({"k_proj.bias": None}, "1 of its own come from nowhere ['k_proj.bias']"),
        ({"o_proj.weight": (8, 17)}, "'o_proj.weight' (8, 16) instead of (8, 17)"),
    ],
)
def test_a_model_that_is_not_exactly_the_same_is_refused_by_name(
    changes: dict[str, Any], said: str
) -> None:
    shapes = full_shapes(heads=4, kv_heads=2, bias=True, tied=False)
    with pytest.raises(EngineError) as refused:
        check_names(place(OneLayer()), changed(shapes, changes), model="OneLayer")
    assert said in str(refused.value)
    assert "rollout=hf" in str(refused.value)


def test_a_fused_layer_without_names_is_refused() -> None:
    with pytest.raises(EngineError, match=r"fuses 3 tensors in 'qkv_proj' and does not name them"):
        find_placements(OneLayer(), packed={}, tensor_parallel=1, rank=0)


def test_a_parameter_with_rows_that_nothing_would_write_is_refused() -> None:
    model = OneLayer(bias=False)
    fused: Any = model.gate_up_proj
    fused.weight = parameter(2 * INNER + 1, HIDDEN)
    with pytest.raises(EngineError, match="of which 192 are known here"):
        place(model)
