"""Weights of a Llama, Qwen2 or Qwen3 module, fused for decoding.

Query, key and value share one matrix, gate and up another. Within each query and key head the
two halves that the rotary embedding pairs are interleaved, so that the rotation is one complex
product; queries and keys are permuted alike, so their dot products stay what they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agentrl.errors import EngineError

# Modules of transformers are typed Any here: their submodules are attributes set at run time.
SUPPORTED_MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3"})


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer.

    ``E`` hidden size, ``H`` query heads, ``G`` key/value heads, ``D`` head size, ``F``
    feed-forward size.
    """

    attn_norm: torch.Tensor
    """[E]"""
    qkv: torch.Tensor
    """[(H + 2 G) D, E]"""
    qkv_bias: torch.Tensor | None
    """[(H + 2 G) D]"""
    qk_norm: torch.Tensor | None
    """[H + G, D], Qwen3 only."""
    out: torch.Tensor
    """[E, H D]"""
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    """[E]"""
    gate_up: torch.Tensor
    """[2 F, E]"""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    """[E, F]"""
    down_bias: torch.Tensor | None


@dataclass(slots=True)
class _Slot:
    """Where a named tensor goes: a view of the fused weights, and the order of its head rows."""

    target: torch.Tensor
    shape: torch.Size
    order: torch.Tensor | None = None
    """[D] for tensors whose leading axis is heads times D."""
    repeat: int = 1
    """Copies of the tensor along a new leading axis (norms shared by heads)."""

    def write(self, value: torch.Tensor) -> None:
        value = value.detach()
        if self.order is not None:
            value = value.unflatten(0, (-1, len(self.order)))[:, self.order.to(value.device)]
            value = value.flatten(0, 1)
        self.target.copy_(value.expand(self.repeat, *value.shape) if self.repeat > 1 else value)

    def read(self) -> torch.Tensor:
        value = self.target[0] if self.repeat > 1 else self.target
        if self.order is not None:
            value = value.unflatten(0, (-1, len(self.order)))[:, self.order.argsort()]
            value = value.flatten(0, 1)
        return value


def refusal(model: Any, max_context: int) -> str | None:
    """Say why the static decoder cannot serve ``model``; None where it can."""
    config = model.config
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        return f"model type {config.model_type!r}"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act!r}"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} and config.sliding_window < max_context:
        return f"a sliding window of {config.sliding_window} tokens"
    rope = model.model.rotary_emb
    kind = getattr(rope, "rope_type", "default")
    limit = getattr(rope, "original_max_seq_len", config.max_position_embeddings)
    if kind in ("dynamic", "longrope") and max_context > limit:
        return f"{kind} rotary frequencies that change beyond {limit} tokens"
    head_dim = model.model.layers[0].self_attn.head_dim
    if rope.inv_freq.shape[0] * 2 != head_dim:
        return "a partial rotary embedding"
    return None


class PackedWeights:
    """The fused weights of a supported module, writable under the module's own names.

    Args:
        model: a ``*ForCausalLM`` of a supported type; it is read, never changed.
        device: where the fused weights lie.
        dtype: what they are stored in.
    """

    def __init__(self, model: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        config = model.config
        attention = model.model.layers[0].self_attn
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = attention.head_dim
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = model.model.embed_tokens.weight.shape[0]
        self.norm_eps: float = config.rms_norm_eps
        self.scale: float = attention.scaling
        half = self.head_dim // 2
        self._order = torch.arange(self.head_dim).view(2, half).t().reshape(-1)
        self._slots: dict[str, _Slot] = {}
        self._tied: dict[str, str] = {}

        self.embed = self._new("model.embed_tokens.weight", model.model.embed_tokens.weight)
        self.layers = [
            self._layer(f"model.layers.{i}", layer) for i, layer in enumerate(model.model.layers)
        ]
        self.final_norm = self._new("model.norm.weight", model.model.norm.weight)
        if model.lm_head.weight is model.model.embed_tokens.weight:
            self.head = self.embed
            self._tied["lm_head.weight"] = "model.embed_tokens.weight"
        else:
            self.head = self._new("lm_head.weight", model.lm_head.weight)
        names = dict(model.named_parameters())
        self.assign((name, names[name]) for name in self._slots)

    def _new(self, name: str, like: torch.Tensor) -> torch.Tensor:
        target = torch.empty(like.shape, device=self.device, dtype=self.dtype)
        self._slots[name] = _Slot(target, like.shape)
        return target

    def _fuse(
        self, parts: Sequence[tuple[str, Any, torch.Tensor | None]], attribute: str
    ) -> torch.Tensor | None:
        """Allocate the rows of several linear maps as one tensor; None where they have no bias."""
        tensors = [getattr(linear, attribute) for _, linear, _ in parts]
        if tensors[0] is None:
            return None
        rows = sum(len(tensor) for tensor in tensors)
        fused = torch.empty((rows, *tensors[0].shape[1:]), device=self.device, dtype=self.dtype)
        start = 0
        for (name, _, order), tensor in zip(parts, tensors, strict=True):
            view = fused[start : start + len(tensor)]
            self._slots[f"{name}.{attribute}"] = _Slot(view, tensor.shape, order)
            start += len(tensor)
        return fused

    def _layer(self, prefix: str, layer: Any) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [
            (f"{prefix}.self_attn.q_proj", attention.q_proj, self._order),
            (f"{prefix}.self_attn.k_proj", attention.k_proj, self._order),
            (f"{prefix}.self_attn.v_proj", attention.v_proj, None),
        ]
        out = [(f"{prefix}.self_attn.o_proj", attention.o_proj, None)]
        gate_up = [
            (f"{prefix}.mlp.gate_proj", mlp.gate_proj, None),
            (f"{prefix}.mlp.up_proj", mlp.up_proj, None),
        ]
        down = [(f"{prefix}.mlp.down_proj", mlp.down_proj, None)]
        mlp_norm = f"{prefix}.post_attention_layernorm.weight"
        return LayerWeights(
            attn_norm=self._new(f"{prefix}.input_layernorm.weight", layer.input_layernorm.weight),
            qkv=_present(self._fuse(qkv, "weight")),
            qkv_bias=self._fuse(qkv, "bias"),
            qk_norm=self._qk_norm(prefix, attention),
            out=_present(self._fuse(out, "weight")),
            out_bias=self._fuse(out, "bias"),
            mlp_norm=self._new(mlp_norm, layer.post_attention_layernorm.weight),
            gate_up=_present(self._fuse(gate_up, "weight")),
            gate_up_bias=self._fuse(gate_up, "bias"),
            down=_present(self._fuse(down, "weight")),
            down_bias=self._fuse(down, "bias"),
        )

    def _qk_norm(self, prefix: str, attention: Any) -> torch.Tensor | None:
        if not hasattr(attention, "q_norm"):
            return None
        heads, groups, dim = self.num_heads, self.num_kv_heads, self.head_dim
        fused = torch.empty((heads + groups, dim), device=self.device, dtype=self.dtype)
        for name, view in (("q_norm", fused[:heads]), ("k_norm", fused[heads:])):
            shared = view if len(view) > 1 else view[0]
            self._slots[f"{prefix}.self_attn.{name}.weight"] = _Slot(
                shared, torch.Size([dim]), self._order, len(view)
            )
        return fused

    def assign(self, params: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights in place; nothing is written unless everything fits.

        Raises:
            EngineError: see :func:`check_params`.
        """
        shapes = {name: slot.shape for name, slot in self._slots.items()}
        for name, value in check_params(params, shapes, self._tied).items():
            self._slots[name].write(value)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is served, under the module's names and in its layout."""
        for name, slot in self._slots.items():
            yield name, slot.read()


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def check_params(
    params: Iterable[tuple[str, torch.Tensor]],
    shapes: dict[str, torch.Size],
    tied: dict[str, str],
) -> dict[str, torch.Tensor]:
    """Collect a stream of weights and refuse it unless it is complete and sound.

    Args:
        params: (name, tensor) pairs, each name once.
        shapes: every name that must come, with its shape.
        tied: other names of the same tensors; where one comes beside its twin, they must be equal.

    Raises:
        EngineError: a tensor is missing, unknown, doubled, of another shape, or not finite.
    """
    given: dict[str, torch.Tensor] = {}
    for name, value in params:
        if name in given:
            raise EngineError(f"weight update: {name!r} came twice; send each tensor once")
        given[name] = value
    for alias, name in tied.items():
        if alias not in given:
            continue
        twin = given.setdefault(name, given[alias])
        if twin is not given[alias] and not torch.equal(twin, given[alias]):
            raise EngineError(
                f"weight update: {alias!r} and {name!r} are tied but differ; send one of them"
            )
        del given[alias]
    missing, unknown = sorted(shapes.keys() - given.keys()), sorted(given.keys() - shapes.keys())
    if missing or unknown:
        raise EngineError(
            f"weight update: {len(missing)} tensors missing {missing[:3]}, {len(unknown)} unknown "
            f"{unknown[:3]}; send exactly the parameters of the served architecture"
        )
    for name, value in given.items():
        if value.shape != shapes[name]:
            raise EngineError(
                f"weight update: {name!r} has shape {tuple(value.shape)}, expected "
                f"{tuple(shapes[name])}; send the parameters of the served architecture"
            )
        if not torch.isfinite(value).all():
            raise EngineError(
                f"weight update: {name!r} holds values that are not finite; the update was refused "
                "whole, look at the training step before it"
            )
    return given
