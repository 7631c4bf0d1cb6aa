"""The other arm of ``train_step.py``: the loop that one writes by hand.

A transformers model in bfloat16 without master weights, rows packed, layers and the vocabulary
chunk compiled one by one, policy gradient on every token, no clipping, no metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface

CHUNK = 8_192
"""Rows of logits at a time."""


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    ends, longest = kwargs["ends"], kwargs["longest"]
    out = varlen_attn(
        query, key, value, ends, ends, longest, longest,
        scale=kwargs["scaling"], window_size=(-1, 0),
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out[None], None


AttentionInterface.register("plain_loop", _attention)
AttentionMaskInterface.register("plain_loop", lambda *args, **kwargs: None)


def _chunk(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (states @ weight.T).float()
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(1)


class PlainLoop:
    """Trains on packed ids with AdamW of torch.

    Args:
        model: in bfloat16, on the GPU.
    """

    def __init__(self, model: Any, *, lr: float = 1e-6) -> None:
        self.model = model
        model.set_attn_implementation("plain_loop")
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward)
        self._chunk = torch.compile(_chunk)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    def train(self, micro_batches: Sequence[Sequence[Tensor]]) -> int:
        """Take one optimizer step over micro-batches of rows of ids; return the tokens."""
        total = sum(len(row) for rows in micro_batches for row in rows)
        for rows in micro_batches:
            (-self._logprobs(rows).sum() / total).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _logprobs(self, rows: Sequence[Tensor]) -> Tensor:
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.cat(list(rows)).cuda()[None]
        positions = torch.cat([torch.arange(len(row)) for row in rows]).cuda()[None]
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().cuda()
        states = self.model.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            ends=ends,
            longest=int(lengths.max()),
        ).last_hidden_state[0]
        weight, targets = self.model.lm_head.weight, ids[0].roll(-1)
        parts = [
            checkpoint(self._chunk, part, weight, wanted, use_reentrant=False)
            for part, wanted in zip(states.split(CHUNK), targets.split(CHUNK), strict=True)
        ]
        return torch.cat(parts)
