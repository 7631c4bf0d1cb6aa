"""Aggregation, and what it divides by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentrl.algo.aggregate import denominators, token_weights
from tests.parity.bridge import Ragged, ragged
from tests.parity.our_side import NORM_TOKENS
from tests.parity.record import SEEDS, compare
from tests.parity.verl_side import core

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)


def weights(step: Ragged, mode: str, mask: Tensor | None = None) -> Tensor:
    mask = step.flat(step.mask) if mask is None else mask
    totals = denominators(mask, step.session_of_token)
    return token_weights(mask, step.session_of_token, None, mode, totals, norm_tokens=NORM_TOKENS)


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str) -> None:
    for seed in SEEDS:
        step = ragged(seed)
        losses = step.fields["advantages"].clone().requires_grad_()
        want = core.agg_loss(losses, step.maskf, mode, loss_scale_factor=NORM_TOKENS)
        (gradient,) = torch.autograd.grad(want, losses)
        got = weights(step, mode)
        compare(f"agg {mode}", (got * step.flat(losses)).sum(), want)
        compare(f"agg {mode}: gradient", got, step.flat(gradient))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_two_ranks_with_totals_of_both(mode: str) -> None:
    """verl scales each rank's part up by the number of ranks, since their gradients are averaged;
    ours are summed."""
    for seed in SEEDS:
        step = ragged(seed, empty=False)
        cut = len(step.mask) // 2
        losses = step.fields["advantages"]
        parts = [
            core.agg_loss(
                losses[rows],
                step.maskf[rows],
                mode,
                dp_size=2,
                batch_num_tokens=int(step.mask.sum()),
                global_batch_size=len(step.mask),
            )
            for rows in (slice(0, cut), slice(cut, None))
        ]
        got = (weights(step, mode) * step.flat(losses)).sum()
        compare(f"agg {mode}: two ranks", got, (parts[0] + parts[1]) / 2)


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean"])
def test_rows_without_a_token_do_not_count(mode: str) -> None:
    """Where we differ: verl counts them as soon as the number of rows is handed in, as its trainer
    does (padding rows too). The gradient of all others then shrinks by rows that train nothing."""
    seen = 0
    for seed in SEEDS:
        step = ragged(seed)
        trained = int((~step.empty).sum())
        seen += trained < len(step.mask)
        losses = step.fields["advantages"]
        want = core.agg_loss(losses, step.maskf, mode, global_batch_size=len(step.mask))
        got = (weights(step, mode) * step.flat(losses)).sum()
        shrunk = got * trained / len(step.mask)
        compare(f"agg {mode} (verl counts empty rows)", shrunk, want)
    assert seen > 20


def test_the_fixed_factor_does_not_depend_on_padding() -> None:
    """Where we differ: verl's default divides by the padded width, so that one long answer in the
    batch makes the gradient of all others smaller. We ask for a number (by default the longest
    response that the configuration allows)."""
    mode = "seq-mean-token-sum-norm"
    for seed in SEEDS:
        step = ragged(seed)
        losses, width = step.fields["advantages"], step.mask.shape[1]
        got = (weights(step, mode) * step.flat(losses)).sum()
        pad = torch.zeros(len(step.mask), width)
        want = core.agg_loss(losses, step.maskf, mode)
        wider = core.agg_loss(torch.cat([losses, pad], 1), torch.cat([step.maskf, pad], 1), mode)
        compare(f"agg {mode} (verl by padded width)", got * NORM_TOKENS / width, want)
        compare(f"agg {mode} (verl padded twice as wide)", got * NORM_TOKENS / width / 2, wider)


def test_rejected_tokens_leave_the_denominator() -> None:
    """Where we differ: verl's trainer counts tokens before rejection, and divides by that count.

    Its count comes from a copy of the mask that rejection does not touch: a stale denominator, with
    which the gradient shrinks by the share rejected. ``agg_loss`` itself, given the mask alone,
    agrees with ours.
    """
    for seed in SEEDS:
        step = ragged(seed)
        keep = step.mask & (step.fields["advantages"] > -0.5)
        if not bool(keep.any()):
            continue
        losses, before, left = step.fields["advantages"], int(step.mask.sum()), int(keep.sum())
        got = (weights(step, "token-mean", step.flat(keep)) * step.flat(losses)).sum()
        compare("agg token-mean after rs", got, core.agg_loss(losses, keep.float(), "token-mean"))
        stale = core.agg_loss(losses, keep.float(), "token-mean", batch_num_tokens=before)
        compare("agg token-mean after rs (verl's stale count)", got * left / before, stale)


def test_nothing_to_train_gives_zero() -> None:
    """Where we differ: verl gives NaN, which the optimizer then spreads over all weights."""
    step = ragged(0)
    nothing = torch.zeros_like(step.mask)
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        assert core.agg_loss(step.fields["advantages"], nothing.float(), mode).isnan()
        assert not weights(step, mode, step.flat(nothing)).any()
