"""The rollout decoder's forward pass with gradients: the same operations in the same shapes.

:class:`~agentrl.rollout.engines.hf_decoder.StaticDecoder` writes keys and values of a few tokens
into a cache. This one computes whole sequences, chunk by chunk, out of place and from a module's
own parameters; every product and every reduction has the operands, in the order and the shapes,
that the decoder gives them when it prefills. So it yields the same bits wherever the shapes come
from a plan that the decoder was found to be exact in (:mod:`agentrl.rollout.engines.hf_shapes`).

Legend: ``P`` sequences, ``C`` tokens of a chunk, ``T`` rows of matrix products, ``L`` keys, ``E``
hidden size, ``H`` query heads, ``G`` key/value heads, ``D`` head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.rollout.engines.hf_decoder import KEY_BLOCK

# Modules of transformers are typed Any here: their submodules are attributes set at run time.


@dataclass(slots=True, kw_only=True)
class Chunk:
    """Where the tokens of one pass stand."""

    ids: Tensor
    """int64 [T], padded with any id."""
    positions: Tensor
    """int64 [T], in their sequences; 0 for padding."""
    query_positions: Tensor
    """int64 [P C]; 0 for padding."""
    from_padded: Tensor
    """int64 [T], place in [P C] of each token."""
    to_padded: Tensor
    """int64 [P C], row of each place; 0 for padding."""
    num_sequences: int
    size: int
    """C"""
    num_keys: int
    """L, above every position."""


@dataclass(slots=True)
class Keys:
    """Keys and values of the chunks so far, by layer: [P, G, C, D] each."""

    keys: list[list[Tensor]] = field(default_factory=list)
    values: list[list[Tensor]] = field(default_factory=list)


class ExactModel:
    """A Llama, Qwen2 or Qwen3 module, computed as the rollout decoder does.

    Args:
        model: a ``*ForCausalLM``, in float32; its parameters are read at every pass.
        max_context: tokens of the longest sequence.
    """

    def __init__(self, model: Any, *, max_context: int) -> None:
        config = model.config
        attention = model.model.layers[0].self_attn
        self._model = model
        self._heads: int = config.num_attention_heads
        self._groups: int = config.num_key_value_heads
        self._dim: int = attention.head_dim
        self._scale: float = attention.scaling
        self.device: torch.device = model.model.embed_tokens.weight.device
        half = self._dim // 2
        self._order = torch.arange(self._dim).view(2, half).t().reshape(-1).to(self.device)
        self._eps = torch.full((1,), config.rms_norm_eps, device=self.device)
        self._nothing = torch.zeros(1, device=self.device)
        seen = torch.ones(max_context, max_context, dtype=torch.bool).tril_()
        mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        self._mask = mask.to(self.device)
        positions = torch.arange(max_context, device=self.device).unsqueeze(0)
        with torch.no_grad():
            cos, sin = model.model.rotary_emb(self._nothing, positions)
        self._rotation = torch.complex(cos[0, :, :half], sin[0, :, :half]).unsqueeze(1)

    def layers(self) -> list[dict[str, Tensor | None]]:
        """Return the fused weights of every layer, as they are now."""
        return [self._fused(layer) for layer in self._model.model.layers]

    def hidden(self, chunk: Chunk, layers: list[dict[str, Any]], cache: Keys) -> Tensor:
        """Return the states after the last layer, [T, E]; ``cache`` takes the keys and values."""
        x = self._model.model.embed_tokens.weight.index_select(0, chunk.ids)
        rotation = self._rotation.index_select(0, chunk.positions)
        mask = self._mask[:, : chunk.num_keys].index_select(0, chunk.query_positions)
        mask = mask.view(chunk.num_sequences, 1, chunk.size, 1, chunk.num_keys)
        for index, layer in enumerate(layers):
            if len(cache.keys) <= index:
                cache.keys.append([])
                cache.values.append([])
            query = self._project(x, layer, rotation, chunk, cache, index)
            attended = self._attend(query, chunk, cache, index, mask)
            x = _add_linear(x, attended, layer["out"], layer["out_bias"])
            normed = self._norm(x, layer["mlp_norm"])
            gate_up = F.linear(normed, layer["gate_up"], layer["gate_up_bias"])
            gate, up = gate_up.chunk(2, dim=-1)
            x = _add_linear(x, F.silu(gate) * up, layer["down"], layer["down_bias"])
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [B, V] of states [B, E], where B is a batch that the decoder decodes in."""
        normed = self._norm(hidden, self._model.model.norm.weight)
        return F.linear(normed, self._model.lm_head.weight)

    def _project(
        self,
        x: Tensor,
        layer: dict[str, Any],
        rotation: Tensor,
        chunk: Chunk,
        cache: Keys,
        index: int,
    ) -> Tensor:
        """Return the queries [T, H, D]; keys and values go to the cache."""
        heads, groups, dim = self._heads, self._groups, self._dim
        qkv = F.linear(self._norm(x, layer["attn_norm"]), layer["qkv"], layer["qkv_bias"])
        qkv = qkv.view(-1, heads + 2 * groups, dim)
        qk, value = qkv[:, : heads + groups], qkv[:, heads + groups :]
        if layer["qk_norm"] is not None:
            qk = self._norm(qk, layer["qk_norm"])
        pairs = torch.view_as_complex(qk.reshape(-1, heads + groups, dim // 2, 2))
        qk = torch.view_as_real(pairs * rotation).view(-1, heads + groups, dim)
        cache.keys[index].append(self._padded(qk[:, heads:], chunk))
        cache.values[index].append(self._padded(value, chunk))
        return qk[:, :heads]

    def _padded(self, rows: Tensor, chunk: Chunk) -> Tensor:
        """[T, G, D] -> [P, G, C, D]."""
        padded = rows.index_select(0, chunk.to_padded)
        return padded.view(chunk.num_sequences, chunk.size, self._groups, self._dim).transpose(1, 2)

    def _attend(self, query: Tensor, chunk: Chunk, cache: Keys, index: int, mask: Tensor) -> Tensor:
        """Return the mixed values, [T, H D]."""
        num, size, length = chunk.num_sequences, chunk.size, chunk.num_keys
        groups, rep = self._groups, self._heads // self._groups
        keys = _first_keys(cache.keys[index], length)
        values = _first_keys(cache.values[index], length)
        query = query.index_select(0, chunk.to_padded).view(num, size, groups, rep, -1)
        query = query.transpose(1, 2).reshape(num * groups, size * rep, -1)
        scores = torch.baddbmm(
            self._nothing, query, keys.transpose(1, 2), beta=0, alpha=self._scale
        )
        scores = (scores.view(num, groups, size, rep, length) + mask).view(scores.shape)
        shares = torch.softmax(scores, dim=-1)
        mixed = torch.bmm(shares[:, :, :KEY_BLOCK], values[:, :KEY_BLOCK])
        for start in range(KEY_BLOCK, length, KEY_BLOCK):
            block = slice(start, start + KEY_BLOCK)
            mixed = torch.baddbmm(mixed, shares[:, :, block], values[:, block])
        mixed = mixed.view(num, groups, size, -1).transpose(1, 2)
        return mixed.reshape(num * size, -1).index_select(0, chunk.from_padded)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt()
        return x * scale * weight

    def _fused(self, layer: Any) -> dict[str, Tensor | None]:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        turned = (True, True, False)
        norms = None
        if hasattr(attention, "q_norm"):
            pairs = ((attention.q_norm, self._heads), (attention.k_norm, self._groups))
            norms = torch.cat([n.weight[self._order].expand(count, -1) for n, count in pairs])
        return {
            "attn_norm": layer.input_layernorm.weight,
            "qkv": torch.cat([self._turn(p.weight, t) for p, t in zip(qkv, turned, strict=True)]),
            "qkv_bias": None
            if qkv[0].bias is None
            else torch.cat([self._turn(p.bias, t) for p, t in zip(qkv, turned, strict=True)]),
            "qk_norm": norms,
            "out": attention.o_proj.weight,
            "out_bias": attention.o_proj.bias,
            "mlp_norm": layer.post_attention_layernorm.weight,
            "gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            "gate_up_bias": None
            if mlp.gate_proj.bias is None
            else torch.cat([mlp.gate_proj.bias, mlp.up_proj.bias]),
            "down": mlp.down_proj.weight,
            "down_bias": mlp.down_proj.bias,
        }

    def _turn(self, value: Tensor, turned: bool) -> Tensor:
        """Interleave the halves of each head that the rotary embedding pairs."""
        if not turned:
            return value
        return value.unflatten(0, (-1, self._dim))[:, self._order].flatten(0, 1)


def _first_keys(chunks: list[Tensor], length: int) -> Tensor:
    """Join [P, G, C, D] chunks to [P G, L, D]; zeros behind, which no query sees."""
    joined = torch.cat(chunks, dim=2)[:, :, :length]
    return F.pad(joined, (0, 0, 0, length - joined.shape[2])).flatten(0, 1).contiguous()


def _add_linear(x: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.addmm(x, inputs, weight.t())
    return out if bias is None else out + bias
