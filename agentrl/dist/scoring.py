"""Scores of the trained tokens of a micro-batch.

Legend: ``N`` tokens, ``M`` trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from agentrl.batch import Batch
from agentrl.dist.layers import ROUND_TO
from agentrl.dist.packed_model import PackedInputs, PackedModel, Share, pack, to_device
from agentrl.dist.sequence_parallel import SequenceGroup


class Scorer(Protocol):
    """Scores trained tokens, with gradients where those are on."""

    def __call__(self, batch: Batch, *, fields: Sequence[str]) -> dict[str, Tensor]:
        """Return the ``fields`` asked for, float32 [N], 0 where not trained."""
        ...


class TokenScorer:
    """Scores trained tokens with a model over packed rows.

    Args:
        model: with a head for language or for values; called as a module, so that its hooks run.
        temperature: logits are divided by it, as the rollout engine does.
        group: ranks that share every micro-batch; all of them call with the same one.
    """

    def __init__(
        self, model: PackedModel, *, temperature: float = 1.0, group: ProcessGroup | None = None
    ) -> None:
        self._model = model
        self._temperature = temperature
        self._group = None if group is None else SequenceGroup.of(group)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self._model.device

    def __call__(self, batch: Batch, *, fields: Sequence[str]) -> dict[str, Tensor]:
        """Return the ``fields`` asked for, float32 [N], 0 where not trained.

        Takes the batch on the CPU; returns tensors on the model's device.

        Args:
            fields: of a policy ``logprobs``, ``entropy`` (nats), ``sum_pi_squared`` (sum over the
                vocabulary of squared probabilities); of a critic ``values`` (before the token)
                and ``next_values`` (after it).

        Raises:
            ValueError: the first token of a row is to be trained: nothing predicts it; or a
                field that the model's head does not know.
        """
        trained = batch.tokens["loss_mask"].nonzero().squeeze(1)
        if bool(torch.isin(trained, batch.cu_seqlens[:-1]).any()):
            raise ValueError("loss_mask is set at the first token of a row, which nothing predicts")
        places = to_device(trained, self.device)
        scores = self._model(
            self._inputs(batch, trained, places),
            fields=tuple(fields),
            temperature=self._temperature,
        )
        zeros = torch.zeros(batch.num_tokens, device=self.device)
        return {
            name: zeros.index_copy(0, places, score)
            for name, score in zip(fields, scores, strict=True)
        }

    def _inputs(self, batch: Batch, trained: Tensor, places: Tensor) -> PackedInputs:
        """Lay the rows out, with a row of filling up to a round length where one is needed.

        Args:
            trained: int64 [M] on the CPU, ascending; ``places``: the same on the device.
        """
        ids, lengths = batch.tokens["ids"].long(), batch.lengths
        round_to = ROUND_TO if self._model.compiled else 1
        if self._group is not None:
            round_to = math.lcm(round_to, self._group.size)
        if round_to > 1:
            filling = -len(ids) % round_to
            # Always there, if need be empty: so the number of rows says nothing of the filling.
            lengths = torch.cat([lengths, torch.tensor([filling])])
            ids = torch.cat([ids, ids.new_zeros(filling)])
        positions, packing = pack(lengths, self.device)
        inputs = PackedInputs(to_device(ids[None], self.device), positions, packing, places)
        if self._group is None:
            return inputs
        share = _share_of(trained, len(ids), self._group)
        return inputs._replace(packing=packing._replace(group=self._group), share=share)


def _share_of(trained: Tensor, num_tokens: int, group: SequenceGroup) -> Share:
    """Find the part of ``trained`` (int64 [M], ascending) that a rank has states for."""
    part = group.part(num_tokens)
    bounds = torch.tensor([part.start, part.stop])
    first, last = torch.searchsorted(trained, bounds).tolist()
    first_before, last_before = torch.searchsorted(trained, bounds + 1).tolist()
    return Share(group, part, (first_before, last_before), (first, last))
