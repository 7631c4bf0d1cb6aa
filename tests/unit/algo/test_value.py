from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentrl.algo.aggregate import denominators, token_weights
from agentrl.algo.value import ValueLoss, clipped_value_loss, explained_variance
from agentrl.batch import Batch
from agentrl.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (1.2, 1.0, 2.0, 0.5 * 0.64, -0.8, False),  # within the bound: the squared error
        (1.8, 1.0, 2.0, 0.5 * 0.25, 0.0, True),  # moved to the target, but too far
        (0.2, 1.0, 2.0, 0.5 * 3.24, -1.8, False),  # moved away: pulled back
        (2.0, 2.0, 2.0, 0.0, 0.0, False),
    ],
)
def test_by_hand(
    value: float, old: float, target: float, loss: float, gradient: float, clipped: bool
) -> None:
    v = torch.tensor([value], requires_grad=True)
    got, acts = clipped_value_loss(v, torch.tensor([old]), torch.tensor([target]), clip=0.5)
    got.sum().backward()
    assert v.grad is not None
    found = float(got.detach()), float(v.grad)
    assert found == pytest.approx((loss, gradient), abs=1e-6)
    assert bool(acts) is clipped


def test_without_a_bound_it_is_the_squared_error() -> None:
    v = torch.tensor([9.0, -1.0])
    got, acts = clipped_value_loss(v, torch.zeros(2), torch.ones(2), clip=None)
    assert got.tolist() == [32.0, 2.0] and not acts.any()


def _batch() -> tuple[Batch, Tensor]:
    """Four rows, one of them not trained; and new values."""
    generator = torch.Generator().manual_seed(0)
    lengths = [4, 1, 6, 3]
    num_tokens = sum(lengths)
    mask = torch.rand(num_tokens, generator=generator) < 0.7
    mask[4] = False
    old, target, new = (torch.randn(num_tokens, generator=generator) for _ in range(3))
    session = torch.tensor([0, 1, 2, 3]).repeat_interleave(torch.tensor(lengths))
    totals = denominators(mask, session)
    weights = token_weights(mask, session, None, "seq-mean-token-mean", totals)
    fields = {
        "loss_mask": mask, "values": old, "value_targets": target, "loss_weights": weights,
    }  # fmt: skip
    rows = {name: list(value.split(lengths)) for name, value in fields.items()}
    return Batch.from_rows(rows), new


def test_loss_and_metrics_equal_the_formula_over_rows() -> None:
    batch, new = _batch()
    mask = batch.tokens["loss_mask"]
    loss, metrics = ValueLoss(num_tokens=int(mask.sum()), clip=0.4)({"values": new}, batch)
    rows, clipped = [], 0
    for row in range(4):
        errors = []
        for i in range(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])):
            if mask[i]:
                v, old, target = (
                    float(x[i])
                    for x in (new, batch.tokens["values"], batch.tokens["value_targets"])
                )
                near = min(max(v, old - 0.4), old + 0.4)
                errors.append(0.5 * max((v - target) ** 2, (near - target) ** 2))
                clipped += (near - target) ** 2 > (v - target) ** 2
        if errors:
            rows.append(sum(errors) / len(errors))
    assert float(loss) == pytest.approx(sum(rows) / len(rows), rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(float(loss))
    assert float(metrics["vf_clipfrac"]) == pytest.approx(clipped / int(mask.sum()))
    assert float(metrics["vpred_mean"]) == pytest.approx(float(new[mask].mean()), rel=1e-5)


def test_gradient_and_metrics_do_not_depend_on_micro_batches() -> None:
    batch, new = _batch()
    loss_fn = ValueLoss(num_tokens=int(batch.tokens["loss_mask"].sum()))
    whole = new.clone().requires_grad_()
    loss, want = loss_fn({"values": whole}, batch)
    loss.backward()
    split, found = new.clone().requires_grad_(), dict.fromkeys(want, 0.0)
    for part in ([3, 0], [1], [2]):
        index = torch.cat(
            [torch.arange(int(batch.cu_seqlens[r]), int(batch.cu_seqlens[r + 1])) for r in part]
        )
        loss, metrics = loss_fn({"values": split[index]}, batch.select(part))
        loss.backward()
        found = {name: found[name] + float(value) for name, value in metrics.items()}
    torch.testing.assert_close(split.grad, whole.grad, atol=1e-7, rtol=1e-6)
    assert found == pytest.approx({name: float(value) for name, value in want.items()}, rel=1e-5)


def test_untrained_tokens_are_ignored_and_half_precision_is_computed_in_float32() -> None:
    batch, new = _batch()
    mask = batch.tokens["loss_mask"]
    loss_fn = ValueLoss(num_tokens=int(mask.sum()))
    want, _ = loss_fn({"values": new.bfloat16().float()}, batch)
    for field in ("values", "value_targets", "loss_weights"):
        batch.tokens[field][~mask] = float("nan")
    values = torch.where(mask, new, float("inf")).bfloat16().requires_grad_()
    got, _ = loss_fn({"values": values}, batch)
    got.backward()
    assert got.dtype == torch.float32 and float(got.detach()) == float(want)
    assert values.grad is not None and not values.grad[~mask].any()


def test_explained_variance() -> None:
    targets = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(targets, targets) == 1.0
    assert explained_variance(targets + 5, targets) == pytest.approx(1.0)  # a bias is no variance
    assert explained_variance(torch.full((4,), 1.5), targets) == pytest.approx(0.0)
    assert explained_variance(-targets, targets) == pytest.approx(-3.0)
    assert explained_variance(torch.tensor([0.0, 1.0, 1.0, 2.0]), targets) == pytest.approx(
        1 - 0.25 / 1.25
    )
    assert explained_variance(targets, torch.ones(4)) == 0.0
    assert explained_variance(torch.zeros(0), torch.zeros(0)) == 0.0


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan")])
def test_a_bound_that_lets_nothing_move_is_refused(clip: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        ValueLoss(num_tokens=1, clip=clip)
