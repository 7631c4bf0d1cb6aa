"""Sampling that depends on what is sampled, never on when.

Token ``i`` of a request is a pure function of (logits, seed, i): the uniform number comes from a
counter (SplitMix64 over the seed and the token's index), not from the state of a generator, so
the neighbours in a batch and the order of arrival cannot change it.

**Which log-probability is recorded.** That of the distribution the token was drawn from: after
temperature, ``log_softmax(logits / temperature)[id]``, and where ``top_p`` or ``top_k`` cut it,
renormalised over what was left. Greedy (temperature 0) records temperature 1, uncut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """Finaliser of SplitMix64 (Steele, Lea and Flood 2014), uint64 [B] -> uint64 [B]."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) for token ``indices`` of the streams ``seeds``.

    Args:
        seeds: [B] uint64.
        indices: [B] uint64, the index of the token within its turn.

    Returns:
        [B] float64 with 53 random bits.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN) + (indices + np.uint64(1)) * _GOLDEN
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * _UNIT


@dataclass(slots=True, kw_only=True)
class SamplingBatch:
    """Sampling parameters of the rows of one batch, each [B]."""

    temperature: np.ndarray
    """float32; 0 is greedy."""
    top_p: np.ndarray
    """float32 in (0, 1]"""
    top_k: np.ndarray
    """int64; 0 keeps the whole vocabulary."""
    seed: np.ndarray
    """uint64"""
    index: np.ndarray
    """uint64, index of the token to draw within its turn."""


def sample(logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Every operation works on rows alone, so that a row's result does not depend on the others.

    Args:
        logits: [B, V] float.
        batch: parameters of the B rows.

    Returns:
        ids [B] int64, and their log-probabilities [B] float32 under the distribution that they
        were drawn from. A row whose logits are not finite gets one that is not finite.
    """
    device = logits.device
    logits = logits.float()
    greedy = batch.temperature == 0.0
    scale = np.where(greedy, np.float32(1.0), batch.temperature).astype(np.float32)
    if (scale != 1.0).any():
        logits = logits / torch.from_numpy(scale).to(device).unsqueeze(1)
    probs = torch.softmax(logits, dim=-1)
    draw = torch.from_numpy(uniforms(batch.seed, batch.index)).to(device)
    ids = _inverse_cdf(probs, draw)

    cut = ((batch.top_p < 1.0) | (batch.top_k > 0)) & ~greedy
    if cut.any():
        rows = torch.from_numpy(np.flatnonzero(cut)).to(device)
        top_p = torch.from_numpy(batch.top_p[cut].astype(np.float32)).to(device)
        top_k = torch.from_numpy(batch.top_k[cut].astype(np.int64)).to(device)
        ids[rows], mass = _sample_cut(probs[rows], draw[rows], top_p, top_k)
        probs[rows] /= mass.unsqueeze(1)
    if greedy.any():
        rows = torch.from_numpy(np.flatnonzero(greedy)).to(device)
        ids[rows] = logits[rows].argmax(dim=-1)
    return ids, probs.gather(1, ids.unsqueeze(1)).squeeze(1).log()


def _inverse_cdf(probs: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """Index of the first cumulative weight above ``draw`` times the total: [B, V], [B] -> [B].

    A token of probability 0 is never returned: its cumulative weight equals its predecessor's.
    """
    cdf = probs.cumsum(dim=-1)
    # Rounding of `draw * total` may reach the total itself, which no entry exceeds: stay below.
    total = cdf[:, -1]
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum((draw * total).float(), below)
    return (
        torch.searchsorted(cdf, target.unsqueeze(1), right=True)
        .squeeze(1)
        .clamp_(max=probs.shape[1] - 1)
    )


def _sample_cut(
    probs: torch.Tensor, draw: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from the smallest set of mass ``top_p`` within the ``top_k`` most likely: [R, V] -> [R].

    Returns the ids, and the mass of each row's set.

    The set is the shortest prefix of the tokens in order of probability (ties by id) whose mass,
    renormalised over the top k, reaches ``top_p``; it is never empty.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    limit = torch.where(top_k > 0, top_k, probs.shape[1]).unsqueeze(1)
    ordered = ordered.masked_fill(rank >= limit, 0.0)
    before = ordered.cumsum(dim=-1) - ordered
    mass = ordered.sum(dim=-1, keepdim=True)
    keep = (before < top_p.unsqueeze(1) * mass) | (rank == 0)
    kept = ordered.masked_fill(~keep, 0.0)
    picked = _inverse_cdf(kept, draw)
    return order.gather(1, picked.unsqueeze(1)).squeeze(1), kept.sum(dim=-1)
