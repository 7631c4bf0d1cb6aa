"""Scoring a batch without gradients: by the policy in training, or by one that is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from agentrl.batch import Batch
from agentrl.dist.config import Precision
from agentrl.dist.micro_batch import micro_batches
from agentrl.dist.scoring import TokenScorer


class FrozenPolicy:
    """A policy that is only asked what it thinks of tokens: the reference of a KL.

    Args:
        model: an ``AutoModelForCausalLM``; its parameters are frozen here.
        temperature: of the distribution whose log-probabilities are computed.
        precision: of the forward pass.
    """

    def __init__(self, model: Any, *, temperature: float, precision: Precision) -> None:
        self.model = model.eval().requires_grad_(False)
        self._precision = precision
        self._scorer = TokenScorer(model, temperature=temperature)

    def infer_batch(
        self, batch: Batch, *, tokens_per_micro_batch: int, fields: Sequence[str] = ("logprobs",)
    ) -> dict[str, Tensor]:
        """Score every trained token; see :meth:`~agentrl.dist.engine.TrainEngine.infer_batch`."""
        return infer_batch(
            self._scorer,
            batch,
            tokens_per_micro_batch=tokens_per_micro_batch,
            fields=fields,
            precision=self._precision,
        )


@torch.no_grad()
def infer_batch(
    scorer: TokenScorer,
    batch: Batch,
    *,
    tokens_per_micro_batch: int,
    fields: Sequence[str],
    precision: Precision,
) -> dict[str, Tensor]:
    """Score every trained token: field -> float32 [N] on the CPU, 0 where not trained."""
    out = {name: torch.zeros(batch.num_tokens) for name in fields}
    for part, rows in micro_batches(batch, tokens_per_micro_batch):
        with autocast(scorer.device, precision):
            scores = scorer(part, fields=fields)
        spans = [range(int(batch.cu_seqlens[r]), int(batch.cu_seqlens[r + 1])) for r in rows]
        places = torch.tensor([i for span in spans for i in span])
        for name in fields:
            out[name][places] = scores[name].cpu()
    return out


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """Return the context in which a forward pass runs at ``precision``."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision is Precision.bf16)


