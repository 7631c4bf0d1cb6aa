"""Rollout correction: the trainer's policy is not quite the one that sampled.

``r = pi_trainer / pi_engine`` of a sampled token. Either its loss is weighted by ``r`` (importance
sampling, cut or masked), or tokens and trajectories on which the two disagree too much leave the
loss, or both. Which policy is the trainer's depends on ``algo.old_logprobs``:

* ``recompute`` (three policies, "decoupled"): the one before the step's first update. Corrected
  once a step; the loss then clips its own ratio against that policy.
* ``rollout`` (two policies, "bypass"): the present one, before each mini-batch. A clipped loss has
  ``r`` in its own ratio already, so that only rejection applies; ``reinforce`` has none and is
  multiplied by the weight.

What is rejected leaves the mask before anything is divided by its size.

Legend: ``N`` tokens, ``M`` trained ones, ``U`` trajectories (sessions) that hold any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.algo.config import CorrectionConfig, CorrectionWeight, RejectConfig
from agentrl.algo.kl import LOG_RATIO_LIMIT
from agentrl.errors import TrainingError

NEGLIGIBLE_WEIGHT = 1e-8
"""Weights with a mean below this are not normalised: all of them are out of bounds."""


@dataclass(slots=True, frozen=True)
class Correction:
    """What to train on, and with which weight."""

    weights: Tensor | None
    """float32 [N], without gradient, 0 where ``keep`` is False; None for weight ``none``."""
    keep: Tensor
    """bool [N]: the loss mask without what was rejected."""
    metrics: dict[str, float]
    """``correction/...``, means over trained tokens or trajectories *before* rejection."""


def correct(
    trainer_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    session_of_token: Tensor,
    config: CorrectionConfig,
) -> Correction:
    """Compare the two policies on whole sessions, weigh and reject.

    Args:
        trainer_logprobs, rollout_logprobs: float [N]; log ratios are clamped to 20 on both sides.
        loss_mask: bool [N]; other tokens are ignored.
        session_of_token: int64 [N], from 0; a session may have several rows.
        config: bounds, which :func:`~agentrl.algo.config.correction_problems` finds no fault in.

    Raises:
        TrainingError: a log-probability of a trained token is not finite.
    """
    tokens = _trained_tokens(trainer_logprobs, rollout_logprobs, loss_mask, session_of_token)
    metrics = mismatch_metrics(tokens)
    kept = torch.ones_like(tokens.session, dtype=torch.bool)
    for rule in config.reject:
        passed = _passes(tokens, rule)
        metrics[f"rs_{rule.statistic}_masked_fraction"] = _mean((~passed).double())
        kept &= passed
    if config.reject:
        metrics["rs_masked_fraction"] = _mean((~kept).double())
    weights = None
    if config.weight is not CorrectionWeight.none:
        of_token, is_metrics = _importance_weights(tokens, kept, config)
        metrics |= is_metrics
        weights = torch.zeros(len(loss_mask), dtype=torch.float32, device=loss_mask.device)
        weights[loss_mask] = torch.where(kept, of_token, 0.0).float()
    keep = loss_mask.clone()
    keep[loss_mask] = kept
    return Correction(weights, keep, {f"correction/{name}": x for name, x in metrics.items()})


class TrainedTokens(NamedTuple):
    """The M trained tokens of U sessions."""

    trainer: Tensor
    """float64 [M]: log-probabilities."""
    rollout: Tensor
    """float64 [M]"""
    session: Tensor
    """int64 [M], in [0, U)."""
    counts: Tensor
    """float64 [U]: trained tokens of the session, at least 1."""

    @property
    def log_ratio(self) -> Tensor:
        """``log r``: float64 [M]."""
        return self.trainer - self.rollout

    def sums(self, values: Tensor) -> Tensor:
        """Sum by session: [M] -> [U]."""
        return torch.zeros_like(self.counts).index_add(0, self.session, values)

    def means(self, values: Tensor) -> Tensor:
        """Mean by session: [M] -> [U]."""
        return self.sums(values) / self.counts

    def largest(self, values: Tensor) -> Tensor:
        """Largest by session: [M] -> [U]."""
        lowest = torch.full_like(self.counts, -torch.inf)
        return lowest.scatter_reduce(0, self.session, values, "amax")


def _trained_tokens(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, session: Tensor
) -> TrainedTokens:
    trainer = trainer_logprobs.detach()[loss_mask].double()
    rollout = rollout_logprobs.detach()[loss_mask].double()
    for name, values in (("the trainer", trainer), ("the rollout engine", rollout)):
        bad = len(values) - int(values.isfinite().sum())
        if bad:
            raise TrainingError(
                f"{bad} of {len(values)} log-probabilities of {name} are not finite, so that no "
                f"ratio can be taken: look at its weights and its sampling settings"
            )
    mine = session[loss_mask]
    counts = torch.bincount(mine)
    present = counts > 0  # sessions without a trained token have no ratio and count nowhere
    position = present.cumsum(0) - 1
    return TrainedTokens(trainer, rollout, position[mine], counts[present].double())


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _mean(values: Tensor) -> float:
    """Mean of a tensor; 0 of nothing."""
    return float(values.mean()) if len(values) else 0.0


def _passes(tokens: TrainedTokens, rule: RejectConfig) -> Tensor:
    """Return which of the M tokens the rule leaves in: bool [M]."""
    level, kind = rule.statistic.rsplit("_", 1)
    log_ratio = _clamped(tokens.log_ratio)
    if kind == "k1":
        of_token = -log_ratio
    elif kind == "k2":
        of_token = 0.5 * log_ratio.square()
    else:
        of_token = log_ratio.exp() - 1 - log_ratio
    if level == "token":
        return _within(of_token, kind, rule)
    if level == "seq_sum":
        of_session = tokens.sums(of_token)
    elif level == "seq_mean":
        of_session = tokens.means(of_token)
    else:
        of_session = tokens.largest(of_token)
    return _within(of_session, kind, rule)[tokens.session]


def _within(statistic: Tensor, kind: str, rule: RejectConfig) -> Tensor:
    if kind == "k1":  # bounds of the ratio engine / trainer, whose log k1 is
        return (statistic >= math.log(rule.lowest)) & (statistic <= math.log(rule.high))
    return statistic <= rule.high


def _importance_weights(
    tokens: TrainedTokens, kept: Tensor, config: CorrectionConfig
) -> tuple[Tensor, dict[str, float]]:
    """Return float64 [M] weights, and metrics of them before normalisation and rejection."""
    by_token = config.weight is CorrectionWeight.token
    if by_token:
        log_ratio = tokens.log_ratio
    elif config.weight is CorrectionWeight.sequence:
        log_ratio = tokens.sums(tokens.log_ratio)
    else:
        log_ratio = tokens.means(tokens.log_ratio)
    raw = _clamped(log_ratio).exp()  # [M] or [U]
    if config.lower is None:
        bounded = raw.clamp(max=config.upper)
    else:
        inside = (raw >= config.lower) & (raw <= config.upper)
        bounded = torch.where(inside, raw, 0.0)
    of_token = bounded if by_token else bounded[tokens.session]
    metrics = _weight_metrics(raw, of_token, config)
    if config.normalize:
        # The mean over what is trained on: with the rejected in it, the kept would not average 1.
        trained = bounded[kept] if by_token else bounded[tokens.session[kept].unique()]
        mean = _mean(trained)
        if mean > NEGLIGIBLE_WEIGHT:
            of_token = of_token / mean
    return of_token, metrics


def _weight_metrics(raw: Tensor, of_token: Tensor, config: CorrectionConfig) -> dict[str, float]:
    """Describe weights: ``raw`` before the bounds, [M] or [U], ``of_token`` after them, [M]."""
    lower = 1 / config.upper if config.lower is None else config.lower
    square = _mean(of_token.square())
    mean = _mean(of_token)
    return {
        "is_mean": mean,
        "is_std": float(of_token.std(correction=0)) if len(of_token) else 0.0,
        "is_max": float(raw.max()) if len(raw) else 0.0,
        "is_min": float(raw.min()) if len(raw) else 0.0,
        # The share of tokens that would carry as much information at equal weights.
        "is_eff_sample_size": mean**2 / square if square else 0.0,
        "is_ratio_fraction_high": _mean((raw > config.upper).double()),
        "is_ratio_fraction_low": _mean((raw < lower).double()),
    }


def mismatch_metrics(tokens: TrainedTokens) -> dict[str, float]:
    """Estimate how far the two policies are apart.

    ``kl`` and ``k3_kl`` estimate KL(engine || trainer) per token; a perplexity is that of one
    session, averaged over sessions; ``chi2`` is ``E[r^2] - 1``, the variance of weights.
    """
    log_ratio = _clamped(tokens.log_ratio)
    trainer, rollout = tokens.means(tokens.trainer), tokens.means(tokens.rollout)
    log_ppl_diff = rollout - trainer
    sequence = _clamped(tokens.sums(tokens.log_ratio))
    some = len(log_ratio) > 0
    return {
        "kl": _mean(-tokens.log_ratio),
        "k3_kl": _mean(log_ratio.exp() - 1 - log_ratio),
        "training_ppl": _mean((-trainer).exp()),
        "rollout_ppl": _mean((-rollout).exp()),
        "log_ppl_diff": _mean(log_ppl_diff),
        "ppl_ratio": _mean(log_ppl_diff.exp()),
        "chi2_token": _mean((2 * log_ratio).exp()) - some,
        "chi2_seq": _mean((2 * sequence).exp()) - some,
    }
