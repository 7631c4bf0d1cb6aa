"""Scoring a batch without gradients: by the policy in training, or by one that is frozen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from agentrl.batch import Batch, RowView
from agentrl.dist.config import Precision
from agentrl.dist.micro_batch import dummy_batch, plan_trained_rows
from agentrl.dist.packed_model import PackedModel
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
        self._scorer = TokenScorer(PackedModel(model), temperature=temperature)

    def infer_batch(
        self, batch: Batch, *, tokens_per_micro_batch: int, fields: Sequence[str] = ("logprobs",)
    ) -> dict[str, Tensor]:
        """Score every trained token; see :meth:`~agentrl.dist.engine.TrainEngine.infer_batch`."""
        with _autocast(self._scorer.device, self._precision):
            return infer_batch(
                self._scorer, batch, tokens_per_micro_batch=tokens_per_micro_batch, fields=fields
            )


@torch.no_grad()
def infer_batch(
    scorer: TokenScorer,
    batch: Batch | RowView,
    *,
    tokens_per_micro_batch: int,
    fields: Sequence[str],
    num_passes: Callable[[int], int] = lambda planned: planned,
) -> dict[str, Tensor]:
    """Score every trained token: field -> float32 [N] on the CPU, 0 where not trained.

    Args:
        num_passes: micro-batches that this rank has rows for -> those that all ranks take.
    """
    plan = plan_trained_rows(batch, tokens_per_micro_batch)
    num_dummies = num_passes(len(plan)) - len(plan)  # ranks agree before any of them starts
    found: list[dict[str, Tensor]] = [scorer(batch.select(rows), fields=fields) for rows in plan]
    for _ in range(num_dummies):
        scorer(dummy_batch(), fields=fields)
    out = {name: torch.zeros(batch.num_tokens) for name in fields}
    if plan:
        places = _places(batch, [row for rows in plan for row in rows])
        for name in fields:
            # One transfer at the end: the device is not waited for in between.
            out[name][places] = torch.cat([scores[name] for scores in found]).cpu()
    return out


def _places(batch: Batch | RowView, rows: Sequence[int]) -> Tensor:
    """Return where the tokens of ``rows``, behind one another, stand in ``batch``: int64."""
    wanted = torch.tensor(rows)
    lengths, starts = batch.lengths[wanted], batch.cu_seqlens[wanted]
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1])) + torch.repeat_interleave(starts - ends + lengths, lengths)


def _autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision is Precision.bf16)
