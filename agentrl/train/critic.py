"""The critic of a run: read before credit is assigned, trained before the policy.

Legend: ``S`` sessions, ``N`` tokens of a batch, ``M`` sampled ones of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from agentrl.algo.aggregate import denominators, token_weights
from agentrl.algo.credit import Credit, CreditBatch
from agentrl.algo.value import ValueLoss, explained_variance
from agentrl.batch import Batch
from agentrl.dist.config import CriticConfig
from agentrl.dist.engine import TrainEngine
from agentrl.errors import TrainingError
from agentrl.seeding import derive_seed
from agentrl.train.assemble import split_sessions
from agentrl.train.update_metrics import combine

Metrics = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Critic:
    """A training engine with a value head, and how it is used."""

    engine: TrainEngine
    """Answers ``values`` and ``next_values``."""
    config: CriticConfig
    seed: int
    """Of the run: decides the order of mini-batches."""

    def read(self, credit: CreditBatch, packed: Batch, reads: Tensor) -> CreditBatch:
        """Add what the critic says of every state in which a token was chosen.

        A truncated session also gets the value of the state after its last sampled token. Leaves
        the token field ``values`` in ``packed``, float32 [N]: of sampled tokens and of those at
        :func:`turn_boundaries`, 0 elsewhere.

        Args:
            credit: of all S sessions.
            packed: their rows.
            reads: bool [S], sessions whose estimator asks for values; others get 0.

        Raises:
            TrainingError: a value is not finite.
        """
        sampled = packed.tokens["loss_mask"]
        row_reads = reads[packed.rows["session"]]
        asked = sampled.clone()
        asked[turn_boundaries(packed)[0]] = True
        part = Batch(packed.cu_seqlens, {"ids": packed.tokens["ids"], "loss_mask": asked})
        part = part.select(row_reads.nonzero().squeeze(1))
        cut = credit.truncated & reads & (credit.tokens_per_session > 0)
        fields = ("values", "next_values") if bool(cut.any()) else ("values",)
        found = self.engine.infer_batch(
            part, tokens_per_micro_batch=self.config.tokens_per_micro_batch, fields=fields
        )
        _refuse_not_finite(found)
        of_token = {
            name: torch.zeros(packed.num_tokens).masked_scatter(
                row_reads[packed.row_of_token], value.float()
            )
            for name, value in found.items()
        }
        packed.tokens["values"] = of_token["values"]
        bootstrap = torch.zeros(credit.num_sessions)
        if bool(cut.any()):
            last = credit.tokens_per_session.cumsum(0)[cut] - 1
            bootstrap[cut] = of_token["next_values"][sampled][last]
        return replace(credit, values=packed.tokens["values"][sampled], bootstrap_values=bootstrap)

    def update(self, batch: Batch, step: int) -> Metrics:
        """Train ``epochs * updates_per_step`` times on what :func:`critic_batch` gave.

        Returns:
            Under ``critic/``: ``loss``, ``vf_clipfrac``, ``vpred_mean``, ``grad_norm``, ``lr``,
            ``updates``, ``skipped_updates`` (see :func:`combine`), and ``explained_variance`` of
            the values before the first update, over all trained tokens of the step.
        """
        updates: list[Metrics] = []
        for epoch in range(self.config.epochs):
            order = derive_seed(self.seed, "critic-mini-batches", step, epoch)
            for part in split_sessions(batch, self.config.updates_per_step, seed=order):
                updates.append(self._update_once(part))
        self.engine.offload()  # as far as critic.offload says: the policy's turn is next
        mask = batch.tokens["loss_mask"]
        explained = explained_variance(
            batch.tokens["values"][mask], batch.tokens["value_targets"][mask]
        )
        return combine(updates, role="critic") | {"critic/explained_variance": explained}

    def _update_once(self, batch: Batch) -> Metrics:
        """Every trained token weighs the same, whatever the aggregation of the policy's loss."""
        mask, sessions = batch.tokens["loss_mask"], batch.rows["session"][batch.row_of_token]
        totals = denominators(mask, sessions)
        batch.tokens["loss_weights"] = token_weights(mask, sessions, None, "token-mean", totals)
        loss = ValueLoss(num_tokens=totals.num_tokens, clip=self.config.value_clip)
        return self.engine.train_mini_batch(
            batch, loss, tokens_per_micro_batch=self.config.tokens_per_micro_batch
        )


def critic_batch(packed: Batch, credit: Credit) -> Batch | None:
    """Return the rows that the critic trains on; None where there is none.

    Groups without a signal for the policy are among them: what they earned is a value like any
    other. Tokens that the correction rejected beforehand are not. The state in which a turn ended
    learns the target of the turn that follows, since that is where the value of a truncated session
    is read.

    Args:
        packed: all rows of the step, with ``values``, and ``keep`` where tokens were rejected.
        credit: what the estimators said.
    """
    if credit.value_targets is None:
        return None
    sampled = packed.tokens["loss_mask"]
    trained = credit.value_mask
    if trained is None:
        trained = torch.ones(len(credit.value_targets), dtype=torch.bool)
    if "keep" in packed.tokens:
        trained = trained & packed.tokens["keep"][sampled]
    mask = torch.zeros_like(sampled).masked_scatter(sampled, trained)
    targets = torch.zeros(packed.num_tokens).masked_scatter(sampled, credit.value_targets.float())
    boundary, following = turn_boundaries(packed)
    mask[boundary], targets[boundary] = trained[following], credit.value_targets.float()[following]
    batch = Batch(
        packed.cu_seqlens,
        {
            "ids": packed.tokens["ids"],
            "loss_mask": mask,
            "values": packed.tokens["values"],
            "value_targets": targets,
        },
        {"session": packed.rows["session"]},
    )
    rows = batch.row_of_token[mask].unique()
    return batch.select(rows) if len(rows) else None


def turn_boundaries(packed: Batch) -> tuple[Tensor, Tensor]:
    """Find the first token after every turn that another one follows in the same session.

    The state before that token is the one in which the turn ended.

    Returns:
        Its position, int64 [E] below N, and the index of the session's next sampled token, int64
        [E] below M. Left out where nothing stands between two turns, or a row ends.
    """
    sampled = packed.tokens["loss_mask"]
    places, row = sampled.nonzero().squeeze(1), packed.row_of_token
    session = packed.rows["session"][row[places]]
    goes_on = session[:-1] == session[1:]
    after = places[:-1] + 1
    found = goes_on & (row[after] == row[places[:-1]]) & ~sampled[after]
    ends = found.nonzero().squeeze(1)
    return after[ends], ends + 1


def _refuse_not_finite(values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        if num_bad := int((~value.isfinite()).sum()):
            raise TrainingError(
                f"the critic gave {num_bad} {name} that are no finite numbers, of {len(value)}: it "
                "has diverged; look at critic/loss and critic/grad_norm in metrics.jsonl, and "
                "lower critic.lr or critic.grad_clip"
            )
