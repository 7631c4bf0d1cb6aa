"""A static-cache decoder for Llama, Qwen2 and Qwen3, written for many short sequences.

``transformers``' forward spends most of a small model's step in Python; this one runs some
twenty operations a layer over fused weights (:mod:`agentrl.rollout.engines.hf_weights`) and a
preallocated cache in which each row is at a position of its own. Logits equal those of
transformers within 1e-5 in float32.

Two entry points share one body: :meth:`StaticDecoder.decode` feeds one token to each of the
first ``B`` rows, :meth:`StaticDecoder.prefill` writes ``C`` tokens to each of ``P`` rows. Where
the kernels of the machine compute a row of a matrix product alike in both shapes, keys and
values have the same bits whichever way they came (:mod:`agentrl.rollout.engines.hf_shapes`
tests that). Query heads are padded to four per key/value head, since the kernels for one to
three rows add in another order; on a CPU four rows are also faster than three.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from agentrl.rollout.engines.hf_weights import LayerWeights, PackedWeights

_MIN_QUERY_ROWS = 4
_SPARE_POSITIONS = 8
"""Columns behind the context: the first takes the writes of idle rows, and all of them keep the
rows from lying a power of two apart, where they would compete for the same cache sets."""

KEY_BLOCK = 192
"""Keys summed by one product. A library splits a long sum by its length (MKL at 192), which would
make the low bits depend on how many masked keys follow; blocks of our own do not."""


class StaticDecoder:
    """Weights and cache of one model.

    Args:
        model: a ``*ForCausalLM`` for which :func:`~agentrl.rollout.engines.hf_weights.refusal`
            is None; it is read, never changed.
        num_rows: sequences that the cache holds.
        max_context: tokens of one sequence.
        device: where it runs.
        dtype: of weights and cache.
    """

    prefix_exact = True
    """Keys and values do not depend on how a prefix was split, given equal kernels."""

    def __init__(
        self,
        model: Any,
        *,
        num_rows: int,
        max_context: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_rows, self.max_context = num_rows, max_context
        self.device, self.dtype = device, dtype
        self.weights = PackedWeights(model, device=device, dtype=dtype)
        self.vocab_size = self.weights.vocab_size
        self._depth = len(self.weights.layers)
        self._stride = max_context + _SPARE_POSITIONS
        groups = self.weights.num_kv_heads
        self._rep = self.weights.num_heads // groups
        self._group_offset = np.arange(groups, dtype=np.int64) * self._stride
        self._rotation = self._rotations(model)
        # Row p lets a query at position p see keys 0..p.
        seen = torch.ones(max_context, max_context, dtype=torch.bool).tril_()
        self._mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
        self._mask = self._mask.to(device)
        self._eps = torch.full((1,), self.weights.norm_eps, device=device)
        self._nothing = torch.zeros(1, device=device, dtype=dtype)
        self.allocate()

    def _rotations(self, model: Any) -> torch.Tensor:
        """Complex rotations [max_context, 1, D / 2] from the module's own rotary embedding."""
        positions = torch.arange(self.max_context).unsqueeze(0)
        rotary = model.model.rotary_emb
        like = torch.zeros(1, dtype=torch.float32, device=rotary.inv_freq.device)
        with torch.inference_mode():
            cos, sin = rotary(like, positions.to(like.device))
        half = self.weights.head_dim // 2
        return torch.complex(cos[0, :, :half], sin[0, :, :half]).unsqueeze(1).to(self.device)

    # ------------------------------------------------------------------ cache

    def allocate(self) -> None:
        """Allocate the cache [layers, 2, rows, G, stride, D]."""
        weights = self.weights
        shape = (len(weights.layers), 2, self.num_rows, weights.num_kv_heads, self._stride)
        shape = (*shape, weights.head_dim)
        if self.device.type == "cpu" and self.dtype == torch.float32:
            # numpy asks the kernel for huge pages, torch does not: up to a third of the attention.
            self.cache = torch.from_numpy(np.zeros(shape, np.float32))
        else:
            self.cache = torch.zeros(shape, device=self.device, dtype=self.dtype)
        self._keys = [layer[0].flatten(0, 1) for layer in self.cache]
        self._values = [layer[1].flatten(0, 1) for layer in self.cache]
        self._flat_keys = [keys.flatten(0, 1) for keys in self._keys]
        self._flat_values = [values.flatten(0, 1) for values in self._values]
        self._view_cache: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def free(self) -> None:
        """Give the cache back."""
        self.cache = torch.empty(0, device=self.device, dtype=self.dtype)
        self._keys = self._values = self._flat_keys = self._flat_values = []
        self._view_cache = {}

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one row to another."""
        if source != target:
            self.cache[:, :, target, :, :length] = self.cache[:, :, source, :, :length]

    def save_row(self, row: int, length: int) -> torch.Tensor:
        """Return a copy of the first ``length`` positions: [layers, 2, G, length, D]."""
        return self.cache[:, :, row, :, :length].clone()

    def load_row(self, row: int, saved: torch.Tensor, length: int) -> None:
        """Put the first ``length`` positions of a saved row back."""
        self.cache[:, :, row, :, :length] = saved[:, :, :, :length]

    def num_bytes(self, saved: torch.Tensor) -> int:
        """Size of what :meth:`save_row` returned."""
        return saved.numel() * saved.element_size()

    def keep_prefix(self, row: int, length: int) -> int:
        """Cut a row back to ``length`` positions: nothing to do, what lies behind is unseen."""
        del row
        return length

    def move_row(self, source: int, target: int, length: int) -> None:
        """Let ``target`` hold what ``source`` held."""
        self.copy_prefix(source, target, length)

    @contextmanager
    def first_layers(self, num_layers: int) -> Iterator[None]:
        """Run only the first layers inside the block, for the shape probe."""
        self._depth = min(num_layers, len(self.weights.layers))
        try:
            yield
        finally:
            self._depth = len(self.weights.layers)

    # ------------------------------------------------------------------ weights

    def assign(self, params: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights in place.

        Raises:
            EngineError: a tensor is missing, unknown, of another shape, or not finite.
        """
        self.weights.assign(params)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that are served, under the module's names."""
        return self.weights.named()

    # ------------------------------------------------------------------ forward

    def decode(
        self, ids: np.ndarray, positions: np.ndarray, active: np.ndarray, length: int
    ) -> torch.Tensor:
        """Feed one token to each of the rows 0..B-1.

        Args:
            ids: [B] int64.
            positions: [B] int64, where each token goes; whatever lies before it is its context.
            active: [B] bool; the other rows are computed and leave no trace.
            length: keys that are looked at; above every active position.

        Returns:
            logits [B, V]; those of inactive rows mean nothing.
        """
        batch, groups = len(ids), self.weights.num_kv_heads
        positions = np.where(active, positions, 0)
        places = np.where(active, positions, self.max_context)
        where = self._tensor(positions)
        mask = self._mask[:, :length].index_select(0, where)
        if groups > 1:
            mask = mask.repeat_interleave(groups, dim=0)
        mask = mask.unsqueeze(1)
        views = self._views(batch * groups, length)

        def attend(layer: int, query: torch.Tensor) -> torch.Tensor:
            query = query.reshape(batch * groups, self._rep, -1)
            mixed = self._attention(query, *views[layer], mask)
            return mixed.reshape(batch, -1)

        hidden = self._embed(ids)
        rotation = self._rotation.index_select(0, where)
        slots = self._slots(np.arange(batch, dtype=np.int64), places)
        for index, layer in enumerate(self.weights.layers[: self._depth]):
            query = self._project(hidden, index, layer, rotation, slots)
            self._mix(hidden, layer, attend(index, query))
        return F.linear(self._norm(hidden, self.weights.final_norm), self.weights.head)

    def prefill(
        self,
        ids: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        length: int,
        num_tokens: int,
    ) -> None:
        """Write keys and values of ``counts[p]`` tokens to each of ``P`` distinct rows.

        All but the attention runs on the tokens alone, without the padding.

        Args:
            ids: [P, C] int64, padded with any valid id.
            rows: [P] int64; padding entries have count 0 and may repeat a row.
            starts: [P] int64, position of each first token.
            counts: [P] int64, at most C.
            length: keys that are looked at; above every position that is written.
            num_tokens: rows T of the matrix products, at least the sum of ``counts``.
        """
        num, chunk = ids.shape
        groups, rep = self.weights.num_kv_heads, self._rep
        offsets = np.arange(chunk, dtype=np.int64)
        real = offsets < counts[:, None]
        padded = np.where(real, starts[:, None] + offsets, 0).reshape(-1)
        flat = np.flatnonzero(real)
        from_padded, tokens, places = (np.zeros(num_tokens, np.int64) for _ in range(3))
        from_padded[: len(flat)] = flat
        tokens[: len(flat)] = ids.reshape(-1)[flat]
        places[:] = self.max_context
        places[: len(flat)] = padded[flat]
        to_padded = np.zeros(num * chunk, np.int64)
        to_padded[flat] = np.arange(len(flat))
        pack, unpack = self._tensor(from_padded), self._tensor(to_padded)
        row_index = self._tensor((rows[:, None] * groups + np.arange(groups)).reshape(-1))
        mask = self._mask[:, :length].index_select(0, self._tensor(padded))
        mask = mask.view(num, 1, chunk, 1, length)

        def attend(layer: int, query: torch.Tensor) -> torch.Tensor:
            keys = self._keys[layer][:, :length].index_select(0, row_index)
            values = self._values[layer][:, :length].index_select(0, row_index)
            query = query.index_select(0, unpack).view(num, chunk, groups, rep, -1)
            query = query.transpose(1, 2).reshape(num * groups, chunk * rep, -1)
            mixed = self._attention(query, keys, values, mask)
            mixed = mixed.view(num, groups, chunk, -1).transpose(1, 2)
            return mixed.reshape(num * chunk, -1).index_select(0, pack)

        hidden = self._embed(tokens)
        rotation = self._rotation.index_select(0, self._tensor(places % self.max_context))
        slots = self._slots(rows[from_padded // chunk], places)
        last = self._depth - 1
        for index, layer in enumerate(self.weights.layers[: self._depth]):
            query = self._project(hidden, index, layer, rotation, slots)
            if index != last:  # of the last layer only keys and values are wanted
                self._mix(hidden, layer, attend(index, query))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _slots(self, rows: np.ndarray, places: np.ndarray) -> torch.Tensor:
        """Flat cache indices [T * G] of token t, group g: (row * G + g) * stride + place."""
        first = rows * (self.weights.num_kv_heads * self._stride) + places
        return self._tensor((first[:, None] + self._group_offset).reshape(-1))

    def _embed(self, ids: np.ndarray) -> torch.Tensor:
        return self.weights.embed.index_select(0, self._tensor(ids))

    def _views(self, num: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values [num, length, D] of the first rows, per layer.

        Kept, since views are not free at two dozen a step.
        """
        key = (num, length)
        if key not in self._view_cache:
            pairs = zip(self._keys, self._values, strict=True)
            self._view_cache[key] = [(k[:num, :length], v[:num, :length]) for k, v in pairs]
        return self._view_cache[key]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last axis, in a third of the operations of ``F.rms_norm``."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        return (x * scale).to(x.dtype).mul_(weight)

    def _attention(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Masked attention of N sequences.

        Args:
            query: [N, R, D].
            keys: [N, L, D].
            values: [N, L, D].
            mask: additive; [N, 1, L], or [P, 1, C, 1, L] where N is P G and R is C times heads.

        Returns:
            [N, R, D].
        """
        num_query, length = query.shape[1], keys.shape[1]
        if num_query < _MIN_QUERY_ROWS:
            query = F.pad(query, (0, 0, 0, _MIN_QUERY_ROWS - num_query))
        keys, scale = keys.transpose(1, 2), self.weights.scale
        if mask.ndim == 3:
            scores = torch.baddbmm(mask, query, keys, alpha=scale)
        else:
            scores = torch.baddbmm(self._nothing, query, keys, beta=0, alpha=scale)
            num, _, chunk, _, _ = mask.shape
            scores.view(num, -1, chunk, self._rep, length).add_(mask)
        shares = torch.softmax(scores, dim=-1)
        if length <= KEY_BLOCK:
            mixed = torch.bmm(shares, values)
        else:
            mixed = torch.bmm(shares[:, :, :KEY_BLOCK], values[:, :KEY_BLOCK])
            for start in range(KEY_BLOCK, length, KEY_BLOCK):
                block = slice(start, start + KEY_BLOCK)
                mixed.baddbmm_(shares[:, :, block], values[:, block])
        return mixed[:, :num_query]

    def _project(
        self,
        x: torch.Tensor,
        index: int,
        layer: LayerWeights,
        rotation: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Write keys and values of ``x`` [T, E] to the cache; return the queries [T, H, D]."""
        weights = self.weights
        heads, groups, dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
        qkv = F.linear(self._norm(x, layer.attn_norm), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(-1, heads + 2 * groups, dim)
        qk, value = qkv[:, : heads + groups], qkv[:, heads + groups :]
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        pairs = torch.view_as_complex(qk.float().view(-1, heads + groups, dim // 2, 2))
        qk = torch.view_as_real(pairs * rotation).view(-1, heads + groups, dim).to(self.dtype)
        self._flat_keys[index].index_copy_(0, slots, qk[:, heads:].reshape(-1, dim))
        self._flat_values[index].index_copy_(0, slots, value.reshape(-1, dim))
        return qk[:, :heads]

    def _mix(self, x: torch.Tensor, layer: LayerWeights, attended: torch.Tensor) -> None:
        """Add attention [T, H D] and feed-forward of one layer to ``x`` [T, E] in place."""
        _add_linear(x, attended, layer.out, layer.out_bias)
        gate_up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias)
        gate, up = gate_up.chunk(2, dim=-1)
        _add_linear(x, F.silu(gate).mul_(up), layer.down, layer.down_bias)


def _add_linear(
    x: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """``x += inputs @ weight.T + bias`` without a temporary."""
    x.addmm_(inputs, weight.t())
    if bias is not None:
        x.add_(bias)
