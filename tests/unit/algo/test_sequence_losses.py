from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from agentrl.algo.loss import LossInput
from agentrl.algo.sequence_losses import GSPO, GeoMean

ROW = torch.tensor([0, 0, 0, 2, 2])  # row 1 has no trained token
NEW = [-1.0, -2.0, -0.5, -3.0, -1.0]
OLD = [-1.3, -1.9, -0.6, -2.9, -1.8]
ROWS = [[0, 1, 2], [3, 4]]


def _inputs(new: Tensor, advantages: list[float]) -> LossInput:
    return LossInput(
        logprobs=new,
        old_logprobs=torch.tensor(OLD, dtype=new.dtype),
        advantages=torch.tensor(advantages, dtype=new.dtype),
        row=ROW,
        num_rows=3,
    )


def _mean_of_rows(values: Tensor) -> Tensor:
    """Mean over rows of the mean over their tokens, as the papers aggregate."""
    return torch.stack([values[row].mean() for row in ROWS]).mean()


def test_gspo_by_hand() -> None:
    # Mean log ratios: (0.3 - 0.1 + 0.1) / 3 = 0.1 and (-0.1 + 0.8) / 2 = 0.35
    out = GSPO(clip_low=0.2, clip_high=0.2)(_inputs(torch.tensor(NEW), [2.0] * 3 + [1.0] * 2))
    assert out.ratio.tolist() == pytest.approx([math.exp(0.1)] * 3 + [math.exp(0.35)] * 2)
    assert out.loss.tolist() == pytest.approx([-2 * math.exp(0.1)] * 3 + [-1.2] * 2)
    assert out.clipped.tolist() == [False] * 3 + [True] * 2


def test_geo_mean_by_hand() -> None:
    # Row 0 (A > 0): log ratios 0.3, -0.1, 0.1, cut at most 0.2 -> mean 0.2 / 3.
    # Row 2 (A < 0): log ratios -0.1, 0.8, cut at least -0.05 -> mean 0.375.
    loss = GeoMean(clip_low=0.05, clip_high=0.2)
    out = loss(_inputs(torch.tensor(NEW), [2.0] * 3 + [-1.0] * 2))
    assert out.loss.tolist() == pytest.approx(
        [-2 * math.exp(0.2 / 3)] * 3 + [math.exp(0.375)] * 2, rel=1e-5
    )
    assert out.clipped.tolist() == [True, False, False, True, False]


def _gspo_paper(new: list[float], advantages: list[float]) -> float:
    total = 0.0
    for row in ROWS:
        s = math.exp(sum(new[t] - OLD[t] for t in row) / len(row))
        a = advantages[row[0]]
        total += max(-a * s, -a * min(max(s, 0.8), 1.2))
    return total / len(ROWS)


def _geo_mean_paper(new: list[float], advantages: list[float]) -> float:
    total = 0.0
    for row in ROWS:
        a = advantages[row[0]]
        sign = math.copysign(1.0, a)
        logs = []
        for t in row:
            log_ratio = new[t] - OLD[t]
            clipped = min(max(log_ratio, -0.05), 0.2)
            logs.append(sign * min(sign * log_ratio, sign * clipped))
        total += -a * math.exp(sum(logs) / len(logs))
    return total / len(ROWS)


PAPERS: list[tuple[GSPO | GeoMean, Callable[[list[float], list[float]], float]]] = [
    (GSPO(clip_low=0.2, clip_high=0.2), _gspo_paper),
    (GeoMean(clip_low=0.05, clip_high=0.2), _geo_mean_paper),
]


@pytest.mark.parametrize(("loss", "paper"), PAPERS, ids=["gspo", "geo_mean"])
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
def test_value_and_gradient_are_those_of_the_paper(
    loss: GSPO | GeoMean, paper: Callable[..., float], signs: tuple[int, int]
) -> None:
    advantages = [2.0 * signs[0]] * 3 + [0.7 * signs[1]] * 2
    new = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    got = _mean_of_rows(loss(_inputs(new, advantages)).loss)
    got.backward()
    assert float(got.detach()) == pytest.approx(paper(NEW, advantages), abs=1e-12)
    step, want = 1e-6, []
    for token in range(len(NEW)):
        up, down = ([v + s * (i == token) for i, v in enumerate(NEW)] for s in (step, -step))
        want.append((paper(up, advantages) - paper(down, advantages)) / (2 * step))
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx(want, abs=1e-8)


@pytest.mark.parametrize("loss", [GSPO(clip_low=1.0, clip_high=9.0), GeoMean()])
def test_each_token_keeps_its_own_advantage(loss: GSPO | GeoMean) -> None:
    """Credit per turn: two turns in a row with opposite advantages are pushed opposite ways."""
    new = torch.tensor(NEW, requires_grad=True)
    loss(_inputs(new, [1.0, 1.0, -1.0, 0.0, 0.0])).loss.sum().backward()
    assert new.grad is not None
    assert (new.grad[:3] < 0).tolist() == [True, True, False]
    assert new.grad[3:].tolist() == [0.0, 0.0]


def test_the_value_of_geo_mean_is_the_mean_advantage_times_the_ratio_of_the_row() -> None:
    advantages = [1.0, 0.5, 2.0, -1.0, -3.0]
    out = GeoMean(clip_low=0.05, clip_high=0.2)(_inputs(torch.tensor(NEW), advantages))
    want = (-(3.5 / 3) * math.exp(0.2 / 3) + 2 * math.exp(0.375)) / 2
    assert float(_mean_of_rows(out.loss)) == pytest.approx(want, rel=1e-5)


def test_a_token_without_advantage_counts_in_the_geometric_mean_as_unchanged() -> None:
    # Log ratios of row 0: 0.3, -0.1 (no advantage: 0), 0.1
    out = GeoMean()(_inputs(torch.tensor(NEW), [2.0, 0.0, 2.0, -1.0, -1.0]))
    row_ratio = math.exp(0.4 / 3)
    assert out.loss[:3].tolist() == pytest.approx([-2 * row_ratio, 0.0, -2 * row_ratio], rel=1e-5)


def test_a_row_far_beyond_the_old_policy_has_no_gradient_and_stays_finite() -> None:
    new = torch.zeros(5, requires_grad=True)
    inputs = LossInput(
        logprobs=new,
        old_logprobs=torch.full((5,), -30.0),
        advantages=torch.full((5,), -1.0),
        row=ROW,
        num_rows=3,
    )
    out = GSPO()(inputs)
    out.loss.sum().backward()
    assert new.grad is not None and not new.grad.any()
    assert bool(out.loss.isfinite().all()) and bool(out.clipped.all())


@pytest.mark.parametrize("loss", [GSPO(), GeoMean()])
def test_nothing_trained_gives_nothing(loss: GSPO | GeoMean) -> None:
    none = torch.zeros(0)
    row = torch.zeros(0, dtype=torch.int64)
    inputs = LossInput(logprobs=none, old_logprobs=none, advantages=none, row=row, num_rows=2)
    assert len(loss(inputs).loss) == 0
