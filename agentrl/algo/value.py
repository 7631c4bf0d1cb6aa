"""The loss of a critic, and how well it predicts.

Legend: ``N`` tokens of a micro-batch, ``M`` trained ones of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.batch import Batch
from agentrl.errors import ConfigError


def clipped_value_loss(
    values: Tensor, old_values: Tensor, targets: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the loss of each prediction and whether the clip acts, both of the inputs' shape.

    ``0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)``: a prediction that moved far from
    where it was is not pulled further in that direction.

    Args:
        values: float, with gradient.
        old_values: predictions before the step's first update.
        targets: what is to be predicted, ``R``.
        clip: ``c``, in units of the return; None for the plain squared error.
    """
    values, old_values, targets = values.float(), old_values.float(), targets.float()
    free = (values - targets).square()
    if clip is None:
        return 0.5 * free, torch.zeros_like(free, dtype=torch.bool)
    near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    bounded = (near - targets).square()
    return 0.5 * torch.maximum(free, bounded), bounded > free


@dataclass(slots=True, frozen=True, kw_only=True)
class ValueLoss:
    """The loss of a critic: a :class:`~agentrl.dist.engine.LossFn` that reads values.

    Reads the token fields ``loss_mask`` (where the critic is trained), ``values`` (its predictions
    before the first update), ``value_targets``, ``loss_weights``
    (:func:`~agentrl.algo.aggregate.token_weights` over the whole mini-batch).

    Metrics are shares of the mini-batch: those of its micro-batches add up.
    """

    num_tokens: int
    """Trained tokens of the whole mini-batch, over all ranks."""
    clip: float | None = 0.5
    """How far a prediction may move from where it was before it is held; None for no bound."""

    def __post_init__(self) -> None:
        """Refuse a bound that lets nothing move."""
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(
                f"the clip of the value loss is {self.clip!r}: must be above 0, in units of the "
                "return, or null for none"
            )

    @property
    def fields(self) -> tuple[str, ...]:
        """What the model is asked for at every trained token."""
        return ("values",)

    def __call__(
        self, scores: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the micro-batch's share of the loss, and of the metrics.

        Args:
            scores: ``values``, float [N], with gradient; ignored where ``loss_mask`` is False.
            batch: the micro-batch.
        """
        trained = batch.trained
        predicted = scores["values"][trained].float()
        per_token, clipped = clipped_value_loss(
            predicted,
            batch.tokens["values"][trained],
            batch.tokens["value_targets"][trained],
            clip=self.clip,
        )
        loss = (per_token * batch.tokens["loss_weights"][trained]).sum()
        total = max(self.num_tokens, 1)
        return loss, {
            "loss": loss.detach(),
            "vf_clipfrac": torch.count_nonzero(clipped) / total,
            "vpred_mean": predicted.detach().sum() / total,
        }


def explained_variance(values: Tensor, targets: Tensor) -> float:
    """Return ``1 - Var(targets - values) / Var(targets)``: 1 is perfect, 0 no better than the mean.

    A mean over shares of a mini-batch would not be it, so it takes the trained tokens of all ranks.

    Args:
        values, targets: float [M].

    Returns:
        0 where the targets do not vary: there is nothing to explain.
    """
    if not len(targets):
        return 0.0
    targets = targets.detach().double()
    variance = float(targets.var(correction=0))
    if variance == 0:
        return 0.0
    return 1 - float((targets - values.detach().double()).var(correction=0)) / variance
