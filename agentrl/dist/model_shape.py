"""What a model weighs: parameters and activations, counted without allocating either.

The model is built on torch's meta device, where tensors have shapes and no storage. Parameters are
counted there; activations by running the trunk once and noting what autograd keeps for the backward
pass, so that no formula has to know the architecture.

Legend: ``T`` tokens, ``L`` layers, ``G`` key/value heads, ``D`` size of a head.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoModelForCausalLM

from agentrl.dist.config import Precision
from agentrl.dist.layers import decoder_layers
from agentrl.errors import AgentRLError, ModelError
from agentrl.model.load import quiet_transformers

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch < 2.10
    varlen_attn = None

# What the kernel for packed rows wants of models whose heads share keys and values.
_REPEATS_HEADS = (
    varlen_attn is None or "enable_gqa" not in inspect.signature(varlen_attn).parameters
)
_ATTENTION = "agentrl_memory_plan"
_NUM_TRACED_TOKENS = 64
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "linear")
_CASTS = ("_to_copy",)
# What a compiler keeps beside the operands of products: everything else is cheap to compute again.
_ANCHORS = ("add", "add_", "embedding")


@dataclass(slots=True, frozen=True, kw_only=True)
class Kept:
    """Bytes per token that the trunk keeps for its backward pass, by what is computed again."""

    eager: int
    """All layers, nothing recomputed, operation by operation."""
    compiled: int
    """All layers, nothing recomputed, fused by torch.compile: operands of products and attention,
    and the residual stream."""
    products: int
    """All layers: only results of products and attention (``recompute=selective``)."""
    layer_inputs: int
    """All layers: only what enters each (``recompute=full``)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a causal language model."""

    model_type: str
    num_params: int
    """Tied ones once."""
    num_layers: int
    layer_params: int
    """Of the largest layer."""
    root_params: int
    """Outside of the layers: embeddings, head, last norm."""
    vocab_size: int
    hidden_size: int
    linear_widths: int
    """Sum over the linear maps inside layers of inputs plus outputs: parameters of adapters of
    rank 1."""
    kv_values: int
    """Keys and values of one token: 2 L G D."""
    kept: Mapping[Precision, Kept] | None
    """By the number format of the forward pass; None where the trunk cannot be run without its
    weights."""
    why_not: str = ""
    """The reason for that."""


def model_shape(config: Any) -> ModelShape:
    """Count the parameters and activations of ``AutoModelForCausalLM.from_config(config)``.

    Args:
        config: a configuration of transformers.

    Raises:
        ModelError: transformers cannot build a causal language model from it.
    """
    model = _on_meta(config, torch.float32)
    text = model.config.get_text_config()
    layers = decoder_layers(model)
    inside = {id(value) for layer in layers for value in layer.parameters()}
    try:
        kept = {
            Precision.fp32: _kept(model, len(layers)),
            Precision.bf16: _kept(_on_meta(config, torch.bfloat16), len(layers)),
        }
        why_not = ""
    except Exception as error:  # whatever the modelling code does with tensors that have no values
        kept, why_not = None, f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return ModelShape(
        model_type=str(text.model_type),
        num_params=sum(value.numel() for value in model.parameters()),
        num_layers=len(layers),
        layer_params=max((_numel(layer) for layer in layers), default=0),
        root_params=sum(v.numel() for v in model.parameters() if id(v) not in inside),
        vocab_size=int(text.vocab_size),
        hidden_size=int(text.hidden_size),
        linear_widths=_linear_widths(layers),
        kv_values=_kv_values(text, len(layers)),
        kept=kept,
        why_not=why_not,
    )


def _on_meta(config: Any, dtype: torch.dtype) -> Any:
    # Registered without a mask: transformers then builds none, which would need values.
    AttentionInterface.register(_ATTENTION, _attention)
    try:
        with quiet_transformers(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=dtype, attn_implementation=_ATTENTION
            ).eval()
    except AgentRLError:
        raise
    except Exception as error:  # of modelling code that may be anyone's
        raise ModelError(
            f"transformers cannot build a causal language model of type "
            f"{getattr(config, 'model_type', '?')!r}: {type(error).__name__}: {error}"
        ) from error


def _numel(module: nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())


def _linear_widths(layers: list[nn.Module]) -> int:
    linears = [m for layer in layers for m in layer.modules() if isinstance(m, nn.Linear)]
    return sum(linear.in_features + linear.out_features for linear in linears)


def _kv_values(text: Any, num_layers: int) -> int:
    heads = int(getattr(text, "num_attention_heads", 1))
    groups = int(getattr(text, "num_key_value_heads", None) or heads)
    dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return 2 * num_layers * groups * dim


# ---------------------------------------------------------------------- activations


class _Attention(torch.autograd.Function):
    """Keeps what a fused attention kernel keeps: its three inputs, its result, a sum per head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return something of the right shape [1, T, H, D]."""
        out = query.new_empty(*query.transpose(1, 2).shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Is never run."""
        raise AssertionError("the trace has no backward pass")


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
) -> tuple[Tensor, None]:
    trace = _Trace.running
    if _REPEATS_HEADS:
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    out: Any = _Attention.apply(query, key, value)
    if trace is not None:
        trace.note_product((query, key, value), out)
    return out, None


class _Trace(TorchDispatchMode):
    """Notes which operation made every tensor, and which are operands of products."""

    running: _Trace | None = None

    def __init__(self) -> None:
        super().__init__()
        self.made_by: dict[int, str] = {}
        self.cast_of: dict[int, Tensor] = {}
        self.operands: set[int] = set()
        self.products: dict[int, int] = {}
        self.saved: list[Tensor] = []
        self._alive: list[Tensor] = []
        """Keys are addresses of storages, which must not be given to others meanwhile."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note it."""
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(out, Tensor):
            self._alive.append(out)
            sources = [value for value in args if isinstance(value, Tensor)]
            if all(_key(out) != _key(source) for source in sources):  # no view
                self.made_by[_key(out)] = name
            if name in _CASTS:
                self.cast_of[_key(out)] = sources[0]
            if name in _PRODUCTS:
                self.note_product(sources, out)
        return out

    def note_product(self, sources: Any, out: Tensor) -> None:
        """Note a product, or attention, which is one for this purpose."""
        self.operands.update(_key(source) for source in sources)
        self.operands.add(_key(out))
        self.products[_key(out)] = _size(out)
        self._alive.append(out)

    def undone(self, value: Tensor) -> Tensor:
        """Return what ``value`` is a cast of."""
        while _key(value) in self.cast_of:
            value = self.cast_of[_key(value)]
        return value

    def survives_fusion(self, value: Tensor) -> bool:
        """Whether compiled code would keep ``value`` rather than compute it again."""
        key = _key(value)
        return key in self.operands or self.made_by.get(key) in _ANCHORS


def _kept(model: Any, num_layers: int) -> Kept:
    parameters = {_key(value) for value in model.parameters()}
    trace = _Trace()

    def pack(value: Tensor) -> Tensor:
        if _key(value) not in parameters:
            trace.saved.append(value)
        return value

    ids = torch.zeros(1, _NUM_TRACED_TOKENS, dtype=torch.int64, device="meta")
    positions = torch.arange(_NUM_TRACED_TOKENS, device="meta")[None]
    with _running(trace), saved_tensors_hooks(pack, lambda value: value), trace:
        states = model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False)[0]
    eager = {_key(value): _size(value) for value in trace.saved}
    undone = [trace.undone(value) for value in trace.saved]
    fused = {_key(v): _size(v) for v in undone if trace.survives_fusion(v)}
    layer_inputs = _size(states) * (num_layers + 1)  # and what enters the head

    def per_token(num_bytes: int) -> int:
        return -(-num_bytes // _NUM_TRACED_TOKENS)

    return Kept(
        eager=per_token(sum(eager.values())),
        compiled=per_token(sum(fused.values())),
        products=per_token(sum(trace.products.values()) + layer_inputs),
        layer_inputs=per_token(layer_inputs),
    )


@contextmanager
def _running(trace: _Trace) -> Iterator[None]:
    _Trace.running = trace
    try:
        yield
    finally:
        _Trace.running = None


def _key(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _size(value: Tensor) -> int:
    return value.untyped_storage().nbytes()
