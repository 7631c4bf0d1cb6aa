from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agentrl.algo.aggregate import AGGREGATIONS, denominators, token_weights
from agentrl.algo.loss import Clip, PolicyLoss, vanilla
from agentrl.batch import Batch

CLIP = Clip(low=0.2, high=0.28, dual=3.0)


def _token_loss(ratio: float, advantage: float) -> tuple[float, float, bool]:
    """Loss, gradient by the new log-probability, and whether it was clipped."""
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    out = vanilla(new, torch.zeros(1), torch.tensor([advantage]), CLIP)
    out.loss.sum().backward()
    assert new.grad is not None
    return float(out.loss), float(new.grad), bool(out.clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.27, 1.0, -1.27, -1.27, False),  # above 1 + low, still inside: clip-higher
        (1.5, 1.0, -1.28, 0.0, True),
        (0.5, 1.0, -0.5, -0.5, False),  # a good action that became rare is pulled back
        (0.5, -1.0, 0.8, 0.0, True),
        (2.0, -1.0, 2.0, 2.0, False),  # a bad action that became likely is pushed down
        (5.0, -1.0, 3.0, 0.0, True),  # ... up to the dual clip
        (5.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_vanilla_hand_worked_values(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    got = _token_loss(ratio, advantage)
    assert got[:2] == pytest.approx((loss, gradient), abs=1e-6)
    assert got[2] is clipped


def test_a_huge_ratio_stays_finite() -> None:
    new = torch.tensor([500.0], requires_grad=True)
    out = vanilla(new, torch.tensor([-500.0]), torch.tensor([1.0]), CLIP)
    out.loss.sum().backward()
    assert bool(out.loss.isfinite().all())
    assert new.grad is not None and bool(new.grad.isfinite().all())


def _batch(mode: str, seed: int = 0) -> tuple[Batch, Tensor, Tensor]:
    """Six rows, two of one session, one without a trained token; and new log-probs, entropy."""
    generator = torch.Generator().manual_seed(seed)
    lengths, sessions = [5, 3, 9, 4, 1, 7], torch.tensor([0, 0, 1, 2, 3, 4])
    num_tokens = sum(lengths)

    def rows(values: Tensor) -> list[Tensor]:
        return list(values.split(lengths))

    mask = torch.rand(num_tokens, generator=generator) < 0.6
    mask[sum(lengths[:3]) : sum(lengths[:4])] = False
    session_of_token = sessions.repeat_interleave(torch.tensor(lengths))
    totals = denominators(mask, session_of_token)
    old = -3 * torch.rand(num_tokens, generator=generator)
    fields = {
        "loss_mask": mask,
        "old_logprobs": old,
        "logprobs": old + 0.1 * torch.randn(num_tokens, generator=generator),
        "ref_logprobs": old + 0.3 * torch.randn(num_tokens, generator=generator),
        "advantages": torch.randn(num_tokens, generator=generator),
        "loss_weights": token_weights(mask, session_of_token, mode, totals),
    }
    batch = Batch.from_rows({name: rows(value) for name, value in fields.items()})
    new = old + 0.4 * torch.randn(num_tokens, generator=generator)
    return batch, new, torch.rand(num_tokens, generator=generator)


def _policy_loss(batch: Batch) -> PolicyLoss:
    return PolicyLoss(
        num_tokens=int(batch.tokens["loss_mask"].sum()),
        clip=CLIP,
        entropy_coef=0.01,
        kl_coef=0.05,
        measure_mismatch=True,
    )


def _gradient(parts: list[list[int]], mode: str) -> tuple[Tensor, dict[str, float]]:
    batch, new, entropy = _batch(mode)
    logprobs = new.clone().requires_grad_()
    starts = batch.cu_seqlens
    metrics: dict[str, float] = {}
    for part in parts:
        index = torch.cat([torch.arange(int(starts[r]), int(starts[r + 1])) for r in part])
        loss, found = _policy_loss(batch)(logprobs[index], entropy[index], batch.select(part))
        loss.backward()
        for name, value in found.items():
            merge = max if name.endswith("_max") else float.__add__
            metrics[name] = merge(float(metrics.get(name, 0.0)), float(value))
    assert logprobs.grad is not None
    return logprobs.grad, metrics


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("parts", [[[0], [1], [2], [3], [4], [5]], [[5, 2, 3], [4, 1, 0]]])
def test_gradient_and_metrics_do_not_depend_on_micro_batches_or_order(
    mode: str, parts: list[list[int]]
) -> None:
    whole, whole_metrics = _gradient([[0, 1, 2, 3, 4, 5]], mode)
    split, split_metrics = _gradient(parts, mode)
    torch.testing.assert_close(split, whole, atol=1e-6, rtol=0)
    assert split_metrics == pytest.approx(whole_metrics, abs=1e-6)


def test_loss_equals_the_formula_on_padded_rows() -> None:
    batch, new, entropy = _batch("token-mean")
    got, metrics = _policy_loss(batch)(new, entropy, batch)
    mask = batch.tokens["loss_mask"].double()
    r = (new - batch.tokens["old_logprobs"]).double().exp()
    a = batch.tokens["advantages"].double()
    policy = torch.max(-a * r, -a * r.clamp(0.8, 1.28))
    policy = torch.where(a < 0, torch.min(policy, -3 * a), policy)
    d = (new - batch.tokens["ref_logprobs"]).double()
    token = policy - 0.01 * entropy.double() + 0.05 * ((-d).exp() + d - 1)
    want = float((token * mask).sum() / mask.sum())
    assert float(got) == pytest.approx(want, abs=1e-6)
    assert metrics["loss"] == pytest.approx(want, abs=1e-6)
    assert metrics["entropy"] == pytest.approx(float((entropy * mask).sum() / mask.sum()))


def test_untrained_tokens_get_no_gradient_whatever_stands_there() -> None:
    batch, new, _ = _batch("token-mean")
    mask = batch.tokens["loss_mask"]
    batch.tokens["advantages"][~mask] = float("nan")
    batch.tokens["old_logprobs"][~mask] = float("inf")
    logprobs = new.clone().requires_grad_()
    loss, _ = PolicyLoss(num_tokens=int(mask.sum()))(logprobs, None, batch)
    loss.backward()
    assert logprobs.grad is not None
    assert bool((logprobs.grad[~mask] == 0).all())
    assert bool(logprobs.grad.isfinite().all())


def test_a_micro_batch_without_trained_tokens_is_zero_with_a_graph() -> None:
    batch, new, _ = _batch("token-mean")
    empty = batch.select([3])
    logprobs = new[17:21].clone().requires_grad_()
    loss, metrics = PolicyLoss(num_tokens=10)(logprobs, None, empty)
    loss.backward()
    assert float(loss) == 0.0
    assert metrics["ratio_max"] == 0.0


def test_on_policy_nothing_is_clipped_and_kl_is_zero() -> None:
    batch, _, _ = _batch("token-mean")
    num_tokens = int(batch.tokens["loss_mask"].sum())
    _, metrics = PolicyLoss(num_tokens=num_tokens)(batch.tokens["old_logprobs"], None, batch)
    assert (metrics["pg_clipfrac"], metrics["kl"], metrics["ratio_max"]) == (0.0, 0.0, 1.0)


def test_an_entropy_bonus_without_entropy_is_refused() -> None:
    batch, new, _ = _batch("token-mean")
    with pytest.raises(ValueError, match="entropy"):
        PolicyLoss(num_tokens=1, entropy_coef=0.1)(new, None, batch)
