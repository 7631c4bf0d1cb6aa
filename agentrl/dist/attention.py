"""Causal attention inside the rows of a packed buffer, as an attention function of transformers.

Everything else in a decoder treats tokens one by one, so rows can stand behind one another in a
buffer [1, N] without padding; attention alone must know where a row begins. A block-diagonal mask
would cost N^2; instead there are two ways, both of which do the work of the rows and no more:

* on a GPU in bfloat16 or float16, ``varlen_attn`` of torch, which takes the rows' boundaries;
* elsewhere, rows are padded to the longest of the micro-batch **inside the attention only**, go
  through scaled-dot-product attention under a causal mask, and are packed again. Rows of one
  micro-batch should therefore be of similar length.

Legend: ``N`` tokens of the buffer, ``B`` rows, ``T`` longest row, ``H`` heads, ``D`` head size.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentrl.dist.sequence_parallel import SequenceGroup, to_heads, to_tokens
from agentrl.errors import ModelError

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch < 2.10
    varlen_attn = None

IMPLEMENTATION = "agentrl_packed"
"""Name of the attention function; without a :class:`Packing` it is transformers' own ``sdpa``."""
UNSUPPORTED = ("softcap", "s_aux", "sliding_window", "position_bias")
"""Arguments of attention functions that change its result and that this one does not know."""

packed_masks: ContextVar[bool] = ContextVar("packed_masks", default=False)
"""Set while a packed buffer goes through a model: no mask is made for it."""

_HALF = (torch.bfloat16, torch.float16)
_GQA_FLAG = varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters
_GROUPS_UNASKED = torch.__version__.split(".")[:2] == ["2", "11"]
"""Fewer key and value heads need no flag in this version; the bits are those of repeated ones."""


class Packing(NamedTuple):
    """Where the rows of a packed buffer are."""

    cu_seqlens: Tensor
    """int32 [B + 1]: row ``b`` is ``[cu_seqlens[b], cu_seqlens[b + 1])``."""
    places: Tensor
    """int64 [N]: index of each token among those of rows padded to [B, T], flattened."""
    max_length: int
    """T"""
    group: SequenceGroup | None = None
    """Ranks that hold a part of the buffer each; the fields above describe all of it."""

    @property
    def num_rows(self) -> int:
        """B."""
        return self.cu_seqlens.shape[0] - 1


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend causally within rows: an attention function of transformers.

    Args:
        module: the attention layer that asks.
        query: [1, H, N, D]; ``key`` and ``value`` may have fewer heads. Where ranks share the
            buffer, this one's part of the N tokens.
        attention_mask: None for a packed buffer.
        packing: of the buffer; None leaves the work to transformers' ``sdpa``.

    Returns:
        [1, N, H, D], and None in place of the attention weights.

    Raises:
        ModelError: the layer wants something that changes the result and is not known here.
    """
    if packing is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    unknown = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    if unknown:
        raise ModelError(
            f"{type(module).__name__} asks its attention for {', '.join(unknown)}, which packed "
            "attention does not know; its rows must be padded"
        )
    if query.is_cuda and torch.is_autocast_enabled("cuda"):
        # Rotary embeddings leave queries and keys in float32 there.
        half = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(half), key.to(half), value.to(half)
    if packing.group is not None:
        query, key, value = to_heads(query, key, value, packing.group)
    if varlen_attn is not None and query.is_cuda and query.dtype in _HALF:
        out = _by_boundaries(query, key, value, packing, scaling)
    else:
        out = _by_padding(module, query, key, value, packing, scaling)
    return out if packing.group is None else to_tokens(out, packing.group), None


def no_mask_when_packed(*args: Any, **kwargs: Any) -> Tensor | None:
    """Make no mask for a packed buffer, and that of ``sdpa`` otherwise."""
    return None if packed_masks.get() else sdpa_mask(*args, **kwargs)


AttentionInterface.register(IMPLEMENTATION, packed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, no_mask_when_packed)


def _by_boundaries(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None
) -> Tensor:
    assert varlen_attn is not None
    # A compiler lays the rotated heads out in this order then, which needs no division by N.
    query, key, value = (
        part.squeeze(0).transpose(0, 1).contiguous() for part in (query, key, value)
    )
    how: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    if _GQA_FLAG:
        how["enable_gqa"] = True
    elif key.shape[1] != query.shape[1] and not _GROUPS_UNASKED:
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    out = varlen_attn(
        query,
        key,
        value,
        packing.cu_seqlens,
        packing.cu_seqlens,
        packing.max_length,
        packing.max_length,
        **how,
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)


def _by_padding(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float | None,
) -> Tensor:
    rows, length, tokens = packing.num_rows, packing.max_length, query.shape[2]
    if key.shape[1] == query.shape[1]:
        module = _UNGROUPED
    padded = []
    for part in (query, key, value):
        flat: Any = part[0].transpose(0, 1).flatten(1)
        if rows * length != tokens:
            flat = _Pad.apply(flat, packing.places, rows * length)
        padded.append(flat.view(rows, length, part.shape[1], part.shape[3]).transpose(1, 2))
    out: Any
    out, _ = sdpa_attention_forward(
        module, *padded, attention_mask=None, scaling=scaling, is_causal=True
    )
    out = out.reshape(rows * length, -1)
    if rows * length != tokens:
        out = _Unpad.apply(out, packing.places)
    return out.view(1, tokens, query.shape[1], value.shape[3])


_UNGROUPED = nn.Module()
"""Stands for a layer whose key and value heads are not to be repeated."""


class _Pad(torch.autograd.Function):
    """[N, C] -> [size, C], 0 where no token is.

    ``places`` names every place once, so that both directions are copies; autograd's own backward
    of ``index_select`` would add.
    """

    @staticmethod
    def forward(ctx: Any, flat: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(places)
        return flat.new_zeros(size, flat.shape[1]).index_copy_(0, places, flat)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


class _Unpad(torch.autograd.Function):
    """[size, C] -> [N, C]: the inverse of :class:`_Pad`."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = wide.shape[0]
        return wide.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.size, grads[0].shape[1]).index_copy_(
            0, places, grads[0]
        ), None
