"""From a step's sessions to optimizer steps: values, credit, correction, losses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from agentrl.algo.aggregate import denominators, token_weights
from agentrl.algo.config import AlgoConfig, CorrectionWeight, CreditConfig, KLPlace, OldLogprobs
from agentrl.algo.correction import correct
from agentrl.algo.credit import Credit, CreditBatch
from agentrl.algo.kl import KLController, kl_estimate
from agentrl.algo.loss import MAX_TURN_KEYS, PolicyLoss, PreparedLoss, TokenLossFn
from agentrl.algo.plug_in import blamed
from agentrl.batch import Batch
from agentrl.dist.config import ActorConfig
from agentrl.dist.engine import TrainEngine
from agentrl.errors import TrainingError
from agentrl.seeding import derive_seed
from agentrl.train.assemble import TrainBatch, split_sessions
from agentrl.train.credit import (
    credit_metrics,
    estimate,
    fields_to_infer,
    keep_rows,
    needs_of,
    of_sampled,
    reads_values,
    with_advantages,
)
from agentrl.train.critic import Critic, critic_batch
from agentrl.train.mismatch import record_mismatch, scored_where, some_sessions
from agentrl.train.update_metrics import combine

Metrics = dict[str, Any]


class ReferencePolicy(Protocol):
    """Scores tokens with the policy that the run started from."""

    def infer_batch(
        self, batch: Batch, *, tokens_per_micro_batch: int, fields: Sequence[str] = ("logprobs",)
    ) -> dict[str, Tensor]:
        """See :meth:`~agentrl.dist.engine.TrainEngine.infer_batch`."""
        ...

    def offload(self) -> None:
        """See :meth:`~agentrl.dist.engine.TrainEngine.offload`."""
        ...


class Learner:
    """The algorithm of one step, on the training engines of policy and critic.

    Args:
        actor: the policy.
        algo: loss, KL, correction, choice of groups.
        credit: by environment: how rewards become advantages.
        token_loss: the loss of a token.
        optimization: mini-batches, epochs, tokens of a micro-batch.
        loss_agg_tokens: what ``seq-mean-token-sum-norm`` divides by.
        seed: of the run.
        reference: needed where ``algo.kl.coef`` is not 0.
        critic: needed where an estimator reads values.
    """

    def __init__(
        self,
        actor: TrainEngine,
        *,
        algo: AlgoConfig,
        credit: Mapping[str, CreditConfig],
        token_loss: TokenLossFn,
        optimization: ActorConfig,
        loss_agg_tokens: int,
        seed: int,
        reference: ReferencePolicy | None = None,
        critic: Critic | None = None,
    ) -> None:
        self.actor = actor
        self.algo = algo
        self.credit = credit
        self.token_loss = token_loss
        self.optimization = optimization
        self.loss_agg_tokens = loss_agg_tokens
        self.seed = seed
        self.reference = reference
        self.critic = critic
        self._compared = False
        self.kl = KLController(algo.kl.coef, target=algo.kl.target, horizon=algo.kl.horizon)

    def assign_credit(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """Return the rows that train, with advantages and all that the losses need, and metrics.

        What an estimator needs of a model is inferred before it runs; what only the loss needs,
        after the groups without signal are left out. Those still train the critic.
        """
        metrics: Metrics = {}
        packed, credit = batch.batch, Credit(torch.zeros(0))
        if packed is not None:
            needs = self._needs()
            self._infer(packed, self._fields_of_credit(needs), reference=self._kl_in_reward)
            metrics |= self._correct_once(packed) if "old_logprobs" in needs else {}
            inputs, found = self._model_inputs(batch, needs)
            metrics |= found
            credit = estimate(inputs, [s.env_id for s in batch.sessions], self.credit)
            batch = replace(batch, critic=critic_batch(packed, credit))
        metrics |= credit_metrics(batch, credit.advantages)
        batch = with_advantages(batch, credit.advantages, self.algo.groups)
        if batch.batch is not None:
            self._infer(batch.batch, self._fields_of_loss, reference=self.kl.value != 0)
            metrics |= self._correct_once(batch.batch)
            batch = _finish_masks(batch, batch.batch, decoupled=self._decoupled)
        return batch, metrics

    def measure_mismatch(self, batch: TrainBatch, step: int) -> Metrics:
        """Compare the engine's probabilities with the trainer's, before anything is updated.

        All tokens, where the trainer's are there already. Else one micro-batch is scored if it will
        not be measured for nothing in the update: at the first step of a process, so that a set-up
        that is broken trains nothing; and where the policy is not updated. :meth:`update` measures
        all other steps. Completes ``batch.trainer_logprobs``.

        Args:
            step: updates done so far: the version that the weights are of.

        Returns:
            ``mismatch/...``; nothing where the update will measure, or nothing was sampled.
        """
        is_first, self._compared = not self._compared, True
        for packed in (batch.batch, batch.sampled):
            if packed is not None and "trainer_logprobs" in packed.tokens:
                known = packed.tokens["trainer_logprobs"]
                known = scored_where(known, packed.tokens["turn"] >= 0)
                return record_mismatch(batch, packed, known, version=step)
        will_update = batch.batch is not None and not self._is_head_start(step)
        if batch.sampled is None or (will_update and not is_first):
            return {}
        budget = self.optimization.tokens_per_micro_batch
        part = some_sessions(batch.sampled, budget)
        found = self.actor.infer_batch(part, tokens_per_micro_batch=budget)["logprobs"]
        known = scored_where(found, part.tokens["loss_mask"])
        return record_mismatch(batch, part, known, version=step)

    def update(self, train_batch: TrainBatch, step: int) -> Metrics:
        """Update the critic, then the policy, ``epochs * updates_per_step`` times each.

        In the critic's head start the policy stays as it is, which ``critic/head_start`` says.
        Completes ``train_batch.trainer_logprobs``.

        Returns:
            See :func:`combine`; and the mismatch in the first mini-batch, unless
            :meth:`measure_mismatch` knew that of all tokens.
        """
        metrics: Metrics = {}
        if self.critic is not None and train_batch.critic is not None:
            metrics |= self.critic.update(train_batch.critic, step)
        if self._is_head_start(step):
            return metrics | combine([], role="actor") | {"critic/head_start": 1}
        if train_batch.batch is None:
            return metrics | combine([], role="actor")
        return metrics | self._update_policy(train_batch, train_batch.batch, step)

    def _update_policy(self, train_batch: TrainBatch, batch: Batch, step: int) -> Metrics:
        """Update the policy ``epochs * updates_per_step`` times.

        The first mini-batch is computed with the weights that the step starts from, so the mismatch
        between the engine's and the trainer's probabilities is measured there, at no extra cost.
        """
        updates: list[Metrics] = []
        mismatch: Metrics = {}
        is_known = "trainer_logprobs" in batch.tokens
        for epoch in range(self.optimization.epochs):
            order = derive_seed(self.seed, "mini-batches", step, epoch)
            for part in split_sessions(batch, self.optimization.updates_per_step, seed=order):
                choices = derive_seed(order, "choices", len(updates))
                measure = not updates and not is_known
                found, logprobs = self._update_once(part, seed=choices, measure=measure)
                updates.append(found)
                if logprobs is not None:
                    # In place of what the check of a process's first step scored: the record of a
                    # step is the same whether or not a process began with it.
                    train_batch.trainer_logprobs.clear()
                    mismatch = record_mismatch(train_batch, part, logprobs, version=step)
        metrics = combine(updates, role="actor") | mismatch
        if "actor/ref_kl" in metrics:  # the KL is in the loss
            metrics["actor/kl_coef"] = self.kl.value
            self.kl.update(metrics["actor/ref_kl"], num_sessions=len(train_batch.trained_ids))
        return metrics

    def _needs(self) -> frozenset[str]:
        """Everything that is asked of models before credit is assigned.

        What the correction rejects trains neither policy nor critic, so with a critic it is known
        before the groups without signal are left out.
        """
        needs = needs_of(self.credit)
        early = self.critic is not None and self._decoupled and self.algo.correction.reject
        return needs | {"old_logprobs"} if early else needs

    def _is_head_start(self, step: int) -> bool:
        return self.critic is not None and step < self.critic.config.head_start_steps

    @property
    def _decoupled(self) -> bool:
        """Whether ratios are against the trainer's own probabilities of the old policy."""
        return self.algo.old_logprobs is OldLogprobs.recompute

    @property
    def _corrects(self) -> bool:
        correction = self.algo.correction
        return correction.weight is not CorrectionWeight.none or bool(correction.reject)

    @property
    def _kl_in_reward(self) -> bool:
        return self.kl.value != 0 and self.algo.kl.where is KLPlace.reward

    def _fields_of_credit(self, needs: Collection[str]) -> list[str]:
        """Return what the estimator needs of the policy.

        A KL in the reward compares the trainer with the reference, never the engine: two scorers
        that round alike, so that equal weights give exactly 0.
        """
        fields = fields_to_infer(needs)
        return fields if fields or not self._kl_in_reward else ["logprobs"]

    @property
    def _fields_of_loss(self) -> list[str]:
        return ["logprobs"] if self._decoupled else []

    def _infer(self, batch: Batch, fields: Sequence[str], *, reference: bool) -> None:
        """Put what is asked for and not there yet into the batch's token fields."""
        budget = self.optimization.tokens_per_micro_batch
        missing = [name for name in fields if _TOKEN_FIELDS[name] not in batch.tokens]
        if missing:
            found = self.actor.infer_batch(batch, tokens_per_micro_batch=budget, fields=missing)
            batch.tokens |= {_TOKEN_FIELDS[name]: value for name, value in found.items()}
        if reference and "ref_logprobs" not in batch.tokens:
            assert self.reference is not None, "algo.kl.coef is set, but no reference was loaded"
            found = self.reference.infer_batch(batch, tokens_per_micro_batch=budget)
            batch.tokens["ref_logprobs"] = found["logprobs"]
            self.reference.offload()  # as far as actor.offload says: the policy's turn is next

    def _model_inputs(
        self, batch: TrainBatch, needs: Collection[str]
    ) -> tuple[CreditBatch, Metrics]:
        """Complete the estimator's inputs by what models say of the sampled tokens."""
        packed, inputs = batch.batch, {}
        assert packed is not None
        if "old_logprobs" in needs:
            inputs["old_logprobs"] = of_sampled(packed, "trainer_logprobs")
        if "sum_pi_squared" in needs:
            inputs["sum_pi_squared"] = of_sampled(packed, "sum_pi_squared")
        if "is_weights" in packed.tokens:
            inputs["is_weights"] = of_sampled(packed, "is_weights")
        credit = replace(batch.credit, **inputs)
        if "values" in needs:
            assert self.critic is not None, "an estimator reads values, but no critic was built"
            reads = reads_values([s.env_id for s in batch.sessions], self.credit)
            credit = self.critic.read(credit, packed, reads)
        if not self._kl_in_reward:
            return credit, {}
        distance = kl_estimate(
            of_sampled(packed, "trainer_logprobs"),
            of_sampled(packed, "ref_logprobs"),
            self.algo.kl.kind,
        )
        credit = replace(credit, token_penalties=-self.kl.value * distance)
        measured = float(distance.mean())
        metrics = {"credit/ref_kl": measured, "actor/kl_coef": self.kl.value}
        self.kl.update(measured, num_sessions=len(batch.sessions))
        return credit, metrics

    def _correct_once(self, batch: Batch) -> Metrics:
        """Decoupled: one correction a step, between the trainer's old policy and the engine's."""
        if not (self._corrects and self._decoupled) or "keep" in batch.tokens:
            return {}
        return self._correct(batch, batch.tokens["trainer_logprobs"], weigh=True)

    def _correct(self, batch: Batch, trainer_logprobs: Tensor, *, weigh: bool) -> Metrics:
        found = correct(
            trainer_logprobs,
            batch.tokens["logprobs"],
            batch.tokens["loss_mask"],
            batch.rows["session"][batch.row_of_token],
            self.algo.correction,
        )
        batch.tokens["keep"] = found.keep
        if weigh and found.weights is not None:
            batch.tokens["is_weights"] = found.weights
            if not found.weights.any():  # nothing is left to train: as if all were rejected
                batch.tokens["keep"] = torch.zeros_like(found.keep)
        return found.metrics

    def _update_once(
        self, batch: Batch, *, seed: int, measure: bool
    ) -> tuple[Metrics, Tensor | None]:
        """Make one optimizer step.

        Returns:
            Metrics; and where ``measure`` the log-probabilities before the step, float32 [N], NaN
            where not scored.
        """
        mask = batch.tokens["loss_mask"]
        metrics, extra, present = self._look_ahead(batch, seed)
        keep = ("logprobs",) if measure and present is None else ()
        metrics |= self.actor.train_mini_batch(
            batch,
            self._loss_of(batch, extra),
            tokens_per_micro_batch=self.optimization.tokens_per_micro_batch,
            keep=keep,
        )
        if keep:
            present = metrics.pop("logprobs/tokens")
        if not measure or present is None:
            return metrics, None
        return metrics, scored_where(present, mask)

    def _look_ahead(
        self, batch: Batch, seed: int
    ) -> tuple[Metrics, tuple[str, ...], Tensor | None]:
        """Score the mini-batch with the present policy, where something depends on all of it.

        That is a correction against the engine's probabilities themselves (bypass), and a loss that
        chooses tokens. Returns metrics, the names of the loss's token fields, and the scores, [N].
        """
        bypass = self._corrects and not self._decoupled
        loss = self.token_loss
        if not bypass and not isinstance(loss, PreparedLoss):
            return {}, (), None
        budget = self.optimization.tokens_per_micro_batch
        present = self.actor.infer_batch(batch, tokens_per_micro_batch=budget)["logprobs"]
        metrics: Metrics = {}
        if bypass:  # a loss with a ratio to the engine's policy is weighed already
            metrics = self._correct(batch, present, weigh=not loss.uses_ratio)
            batch.tokens["loss_mask"] = batch.tokens["loss_mask"] & batch.tokens["keep"]
        if not isinstance(loss, PreparedLoss):
            return metrics, (), present
        mask = batch.tokens["loss_mask"]
        generator = torch.Generator().manual_seed(seed)
        with blamed(f"algo.loss={self.algo.loss!r}: prepare()", loss):
            fields = loss.prepare(
                present[mask],
                batch.tokens["advantages"][mask].clone(),
                old_logprobs=batch.tokens["old_logprobs"][mask],
                generator=generator,
            )
        _refuse_fields(fields, batch, num_tokens=int(mask.sum()), loss=self.algo.loss)
        for name, value in fields.items():
            empty = torch.zeros(batch.num_tokens, dtype=value.dtype)
            batch.tokens[name] = empty.masked_scatter(mask, value)
        return metrics, tuple(fields), present

    def _loss_of(self, batch: Batch, extra: tuple[str, ...]) -> PolicyLoss:
        """Put each token's weight into the batch, by the final mask, and close over the totals."""
        mask, turn = batch.tokens["loss_mask"], batch.tokens["turn"]
        sessions = batch.rows["session"][batch.row_of_token]
        totals = denominators(mask, sessions, turn)
        batch.tokens["loss_weights"] = token_weights(
            mask, sessions, turn, self.algo.loss_agg, totals, norm_tokens=self.loss_agg_tokens
        )
        counts = turn[mask].bincount()[:MAX_TURN_KEYS].tolist()
        in_loss = self.kl.value if self.algo.kl.where is KLPlace.loss else 0.0
        return PolicyLoss(
            token_loss=self.token_loss,
            num_tokens=totals.num_tokens,
            num_turn_tokens={index: count for index, count in enumerate(counts) if count},
            extra=extra,
            entropy_coef=self.algo.entropy_coef,
            kl_coef=in_loss,
            kl_kind=self.algo.kl.kind,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs beyond the engine's own state."""
        return {"kl": self.kl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        self.kl.load_state_dict(state["kl"])


_TOKEN_FIELDS = {"logprobs": "trainer_logprobs", "sum_pi_squared": "sum_pi_squared"}
"""What the engine infers -> token field; ``logprobs`` are the rollout engine's own."""


def _refuse_fields(fields: Any, batch: Batch, *, num_tokens: int, loss: str) -> None:
    """Refuse token fields of a loss that would replace another one, or do not fit.

    Raises:
        TrainingError: names the field.
    """
    if not isinstance(fields, Mapping):
        raise TrainingError(
            f"algo.loss={loss!r}: prepare() returned {type(fields).__name__}; return a mapping of "
            "names to tensors of one value for each trained token"
        )
    for name, value in fields.items():
        fits = isinstance(value, Tensor) and value.shape == (num_tokens,)
        if not isinstance(name, str) or name in batch.tokens or not fits:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TrainingError(
                f"algo.loss={loss!r}: prepare() gave the field {name!r} with {got}; give names of "
                f"its own (not {', '.join(batch.tokens)}) and tensors of shape ({num_tokens},)"
            )


def _finish_masks(batch: TrainBatch, packed: Batch, *, decoupled: bool) -> TrainBatch:
    """Name the policy that ratios are against, and leave out what the correction rejected."""
    packed.tokens["old_logprobs"] = packed.tokens["trainer_logprobs" if decoupled else "logprobs"]
    if "keep" not in packed.tokens:
        return batch
    packed.tokens["loss_mask"] = packed.tokens["loss_mask"] & packed.tokens["keep"]
    rows = packed.row_of_token[packed.tokens["loss_mask"]].unique()
    why = f"algo.correction rejected every token of the others; {batch.why_empty}"
    return replace(keep_rows(batch, packed, rows), why_empty=why)
