"""How far the trainer's probabilities are from those of the engine that sampled.

Both hold the same weights, so anything beyond rounding is a bug: another temperature, another
template, text that was tokenized again, stale or scrambled weights. Tokens that an older version
of the policy sampled differ for a good reason as well, namely by what was learned since: they are
told apart by :attr:`ScoredTokens.lag`.

Legend: ``M`` sampled tokens that both have scored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algo.kl import K3_LIMIT, LOG_RATIO_LIMIT

RATIO_BAND = (0.5, 2.0)
"""Probability ratios outside of this are counted as out of bounds."""
MAX_TURNS = 8
"""Turns that have a key of their own; later ones share one."""
POSITION_EDGES = (0, 256, 1024, 4096, 16_384)
"""Where the buckets of positions begin: rounding that grows with the context shows there."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ScoredTokens:
    """Sampled tokens with both log-probabilities."""

    trainer: Tensor
    """float [M]"""
    engine: Tensor
    """float [M]"""
    turn: Tensor
    """int64 [M], index of the turn in its episode, from 0."""
    position: Tensor
    """int64 [M], index in the token's row: how long its context is."""
    lag: Tensor
    """int64 [M], policy versions from the one that sampled to the one that scored; 0: the same."""

    def __len__(self) -> int:
        """M."""
        return len(self.trainer)

    @property
    def log_ratio(self) -> Tensor:
        """Trainer's minus engine's: float64 [M]."""
        return self.trainer.detach().double() - self.engine.detach().double()

    def select(self, mask: Tensor) -> ScoredTokens:
        """Return the tokens where ``mask``, bool [M]."""
        return ScoredTokens(
            trainer=self.trainer[mask],
            engine=self.engine[mask],
            turn=self.turn[mask],
            position=self.position[mask],
            lag=self.lag[mask],
        )


def mismatch_metrics(tokens: ScoredTokens) -> dict[str, float]:
    """Describe how far two scorers of the same tokens are apart.

    Returns:
        ``mismatch/...``, nothing where there is no token. Over all tokens see
        :func:`distances`; ``num_tokens``; ``by_turn/turn_<k>`` and ``by_position/from_<p>``: mean
        absolute difference of the turn or bucket, whose means, weighted by
        ``num_tokens_by_turn/...``, make the mean over all. Where a token lags:
        ``current/...`` and ``stale/...``, the same distances over the tokens of the present version
        and over those of older ones, ``current_fraction``, and ``learned_kl``: how much further the
        older ones are, in nats per token, which is what the policy has learned meanwhile.
    """
    if not len(tokens):
        return {}
    found = {**distances(tokens), "num_tokens": float(len(tokens))}
    found |= _by_turn(tokens) | _by_position(tokens)
    stale = tokens.lag > 0
    if bool(stale.any()):
        older, current = distances(tokens.select(stale)), distances(tokens.select(~stale))
        found |= {f"stale/{name}": value for name, value in older.items()}
        found |= {f"current/{name}": value for name, value in current.items()}
        found["current_fraction"] = 1 - float(stale.double().mean())
        if current:
            found["learned_kl"] = older["k3_kl"] - current["k3_kl"]
    return {f"mismatch/{name}": value for name, value in found.items()}


def distances(tokens: ScoredTokens) -> dict[str, float]:
    """Return the distances over all of ``tokens``; nothing of nothing.

    Returns:
        ``logprob_abs_mean`` and ``logprob_abs_max`` in nats; ``exp_abs_mean``, the mean of
        ``exp(|difference|)``, which is 1 for equal scorers; ``k3_kl``, an estimate of
        KL(engine || trainer) in nats per token; ``ratio_oob_fraction``, tokens whose ratio of
        probabilities is outside of :data:`RATIO_BAND`. A difference that is not a number makes
        them not a number: no bound holds then.
    """
    if not len(tokens):
        return {}
    log_ratio = tokens.log_ratio
    distance = log_ratio.abs()
    bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = bounded.exp()
    inside = (ratio >= RATIO_BAND[0]) & (ratio <= RATIO_BAND[1])
    return {
        "logprob_abs_mean": float(distance.mean()),
        "logprob_abs_max": float(distance.max()),
        "exp_abs_mean": float(bounded.abs().exp().mean()),
        # In float64: differences of rounding are too small for the cancellation in float32.
        "k3_kl": float((bounded.expm1() - bounded).clamp(max=K3_LIMIT).mean()),
        "ratio_oob_fraction": 1 - float(inside.double().mean()),
    }


def _by_turn(tokens: ScoredTokens) -> dict[str, float]:
    turn = tokens.turn.clamp(max=MAX_TURNS)
    names = {index: f"turn_{index + 1}" for index in range(MAX_TURNS)}
    names[MAX_TURNS] = f"turn_{MAX_TURNS + 1}_on"
    means, counts = _means(tokens, turn, MAX_TURNS + 1)
    return {f"by_turn/{names[index]}": value for index, value in means.items()} | {
        f"num_tokens_by_turn/{names[index]}": value for index, value in counts.items()
    }


def _by_position(tokens: ScoredTokens) -> dict[str, float]:
    edges = torch.tensor(POSITION_EDGES)
    bucket = torch.bucketize(tokens.position, edges, right=True) - 1
    means, _ = _means(tokens, bucket, len(edges))
    return {f"by_position/from_{POSITION_EDGES[index]}": value for index, value in means.items()}


def _means(
    tokens: ScoredTokens, label: Tensor, num_labels: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Mean absolute difference, and number of tokens, of every label that occurs."""
    counts = torch.bincount(label, minlength=num_labels).double()
    sums = torch.zeros(num_labels, dtype=torch.float64)
    sums.index_add_(0, label, tokens.log_ratio.abs())
    present = counts.nonzero().squeeze(1).tolist()
    means = (sums / counts).tolist()
    return {i: means[i] for i in present}, {i: float(counts[i]) for i in present}
