from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algo.aggregate import AGGREGATIONS, denominators, token_weights
from agentrl.algo.kl import KL_KINDS
from agentrl.algo.loss import LOSSES, PolicyLoss, TokenLossFn, make_loss
from agentrl.algo.policy_losses import Reinforce, Vanilla
from agentrl.batch import Batch
from agentrl.errors import ConfigError

NAMES = LOSSES.names()


def _make(name: str) -> TokenLossFn:
    return make_loss(name, {"beta": 0.3} if name == "dro" else {})


def _batch(mode: str, seed: int = 0) -> tuple[Batch, Tensor, Tensor]:
    """Six rows, two of one session, one without a trained token; and new log-probs, entropy.

    Turn 1 of session 0 is in its second row; of the other sessions, each row has two turns.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths, sessions = [5, 3, 9, 4, 1, 7], torch.tensor([0, 0, 1, 2, 3, 4])
    num_tokens = sum(lengths)

    def rows(values: Tensor) -> list[Tensor]:
        return list(values.split(lengths))

    mask = torch.rand(num_tokens, generator=generator) < 0.6
    mask[sum(lengths[:3]) : sum(lengths[:4])] = False
    session_of_token = sessions.repeat_interleave(torch.tensor(lengths))
    turn = torch.cat([torch.arange(n) * 2 // n for n in lengths])
    turn[: lengths[0]], turn[lengths[0] : sum(lengths[:2])] = 0, 1
    totals = denominators(mask, session_of_token, turn)
    old = -3 * torch.rand(num_tokens, generator=generator)
    fields = {
        "loss_mask": mask,
        "old_logprobs": old,
        "logprobs": old + 0.1 * torch.randn(num_tokens, generator=generator),
        "ref_logprobs": old + 0.3 * torch.randn(num_tokens, generator=generator),
        "advantages": torch.randn(num_tokens, generator=generator),
        "turn": torch.where(mask, turn, -1),
        "cov_selected": torch.rand(num_tokens, generator=generator) < 0.2,
        "loss_weights": token_weights(mask, session_of_token, turn, mode, totals, norm_tokens=10),
    }
    batch = Batch.from_rows({name: rows(value) for name, value in fields.items()})
    new = old + 0.4 * torch.randn(num_tokens, generator=generator)
    return batch, new, torch.rand(num_tokens, generator=generator)


def _policy_loss(batch: Batch, name: str = "vanilla", **how: Any) -> PolicyLoss:
    mask, turn = batch.tokens["loss_mask"], batch.tokens["turn"]
    extra = ("cov_selected",) if name.endswith("_cov") else ()
    return PolicyLoss(
        token_loss=_make(name),
        num_tokens=int(mask.sum()),
        num_turn_tokens={index: int((turn[mask] == index).sum()) for index in (0, 1)},
        extra=extra,
        **how,
    )


FULL = {"entropy_coef": 0.01, "kl_coef": 0.05, "kl_kind": "k3+"}


def _gradient(parts: list[list[int]], mode: str, name: str) -> tuple[Tensor, dict[str, float]]:
    batch, new, entropy = _batch(mode)
    loss_fn = _policy_loss(batch, name, **FULL)
    logprobs = new.clone().requires_grad_()
    starts = batch.cu_seqlens
    metrics: dict[str, float] = {}
    for part in parts:
        index = torch.cat([torch.arange(int(starts[r]), int(starts[r + 1])) for r in part])
        loss, found = loss_fn(
            {"logprobs": logprobs[index], "entropy": entropy[index]}, batch.select(part)
        )
        loss.backward()
        for key, value in found.items():
            merge = max if key.endswith("_max") else float.__add__
            metrics[key] = merge(float(metrics.get(key, 0.0)), float(value))
    assert logprobs.grad is not None
    return logprobs.grad, metrics


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_gradient_and_metrics_do_not_depend_on_micro_batches_or_order(name: str, mode: str) -> None:
    whole, whole_metrics = _gradient([[0, 1, 2, 3, 4, 5]], mode, name)
    for parts in ([[0], [1], [2], [3], [4], [5]], [[5, 2, 3], [4, 1, 0]]):
        split, split_metrics = _gradient(parts, mode, name)
        torch.testing.assert_close(split, whole, atol=1e-6, rtol=1e-6)
        assert split_metrics == pytest.approx(whole_metrics, abs=1e-6, rel=1e-5)


def test_loss_equals_the_formula_on_padded_rows() -> None:
    batch, new, entropy = _batch("token-mean")
    weights = torch.rand(len(new), generator=torch.Generator().manual_seed(1)) * 2
    batch.tokens["is_weights"] = weights
    loss_fn = _policy_loss(batch, entropy_coef=0.01, kl_coef=0.05)
    got, metrics = loss_fn({"logprobs": new, "entropy": entropy}, batch)
    mask = batch.tokens["loss_mask"].double()
    r = (new - batch.tokens["old_logprobs"]).double().exp()
    a = batch.tokens["advantages"].double()
    policy = torch.max(-a * r, -a * r.clamp(0.8, 1.28))
    policy = torch.where(a < 0, torch.min(policy, -3 * a), policy)
    d = (new - batch.tokens["ref_logprobs"]).double()
    # The importance weight is the policy loss's alone: not of the KL, not of the entropy.
    token = policy * weights - 0.01 * entropy.double() + 0.05 * ((-d).exp() + d - 1)
    want = float((token * mask).sum() / mask.sum())
    assert float(got) == pytest.approx(want, abs=1e-6)
    assert float(metrics["loss"]) == pytest.approx(want, abs=1e-6)
    assert float(metrics["entropy"]) == pytest.approx(float((entropy * mask).sum() / mask.sum()))
    assert float(metrics["ref_kl"]) == pytest.approx(
        float((((-d).exp() + d - 1) * mask).sum() / mask.sum())
    )


def test_the_entropy_of_each_turn_is_the_mean_over_its_tokens() -> None:
    batch, new, entropy = _batch("token-mean")
    _, metrics = _policy_loss(batch)({"logprobs": new, "entropy": entropy}, batch)
    mask, turn = batch.tokens["loss_mask"], batch.tokens["turn"]
    for index in (0, 1):
        want = float(entropy[mask & (turn == index)].mean())
        assert float(metrics[f"entropy/turn_{index + 1}"]) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf")])
def test_untrained_tokens_get_no_gradient_whatever_stands_there(name: str, junk: float) -> None:
    batch, new, entropy = _batch("seq-mean-token-mean")
    batch.tokens["is_weights"] = torch.ones_like(new)
    clean, _ = _policy_loss(batch, name, **FULL)({"logprobs": new, "entropy": entropy}, batch)
    mask = batch.tokens["loss_mask"]
    for field in ("advantages", "old_logprobs", "logprobs", "ref_logprobs", "is_weights"):
        batch.tokens[field][~mask] = junk
    batch.tokens["loss_weights"][~mask] = junk
    logprobs = torch.where(mask, new, junk).requires_grad_()
    loss, metrics = _policy_loss(batch, name, **FULL)(
        {"logprobs": logprobs, "entropy": torch.where(mask, entropy, junk)}, batch
    )
    loss.backward()
    assert float(loss.detach()) == float(clean)
    assert logprobs.grad is not None
    assert bool((logprobs.grad[~mask] == 0).all()) and bool(logprobs.grad.isfinite().all())
    assert all(value == value and abs(value) < 1e6 for value in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_inputs_are_computed_in_float32(name: str) -> None:
    batch, new, _ = _batch("token-mean")
    fields = ("advantages", "old_logprobs", "ref_logprobs")
    for field in fields:
        batch.tokens[field] = batch.tokens[field].bfloat16()
    batch.tokens["is_weights"] = torch.rand(len(new)).bfloat16()
    rounded = new.bfloat16()
    got, _ = _policy_loss(batch, name, kl_coef=0.1)({"logprobs": rounded}, batch)
    for field in (*fields, "is_weights"):
        batch.tokens[field] = batch.tokens[field].float()
    want, _ = _policy_loss(batch, name, kl_coef=0.1)({"logprobs": rounded.float()}, batch)
    assert got.dtype == torch.float32 and float(got) == float(want)


@pytest.mark.parametrize("name", NAMES)
def test_a_micro_batch_without_trained_tokens_is_zero_with_a_graph(name: str) -> None:
    batch, new, _ = _batch("token-mean")
    empty = batch.select([3])
    logprobs = new[17:21].clone().requires_grad_()
    loss, metrics = _policy_loss(batch, name)({"logprobs": logprobs}, empty)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert metrics["ratio_max"] == 0.0


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_cov")])
def test_on_policy_nothing_is_clipped_and_the_gradient_is_the_policy_gradient(name: str) -> None:
    batch, _, _ = _batch("token-mean")
    logprobs = batch.tokens["old_logprobs"].clone().requires_grad_()
    loss, metrics = _policy_loss(batch, name)({"logprobs": logprobs}, batch)
    loss.backward()
    found = [float(metrics[name]) for name in ("pg_clipfrac", "kl", "ratio_max")]
    assert found == pytest.approx([0.0, 0.0, 1.0])
    want = -batch.tokens["advantages"] * batch.tokens["loss_weights"]
    want = torch.where(batch.tokens["loss_mask"], want, 0.0)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, want, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_the_kl_is_in_the_gradient_by_its_kind(kind: str) -> None:
    batch, new, _ = _batch("token-mean")
    batch.tokens["advantages"].zero_()
    logprobs = new.clone().requires_grad_()
    loss, _ = _policy_loss(batch, "reinforce", kl_coef=0.5, kl_kind=kind)(
        {"logprobs": logprobs}, batch
    )
    loss.backward()
    d = new - batch.tokens["ref_logprobs"]
    slopes = {"k1": torch.ones_like(d), "k3": 1 - (-d).exp(), "abs": d.sign()}
    want = 0.5 * slopes.get(kind, d) * batch.tokens["loss_weights"]
    assert logprobs.grad is not None
    torch.testing.assert_close(
        logprobs.grad, torch.where(batch.tokens["loss_mask"], want, 0.0), atol=1e-6, rtol=1e-5
    )


def test_an_entropy_bonus_without_entropy_is_refused() -> None:
    batch, new, _ = _batch("token-mean")
    with pytest.raises(ValueError, match="entropy"):
        PolicyLoss(token_loss=Vanilla(), num_tokens=1, entropy_coef=0.1)({"logprobs": new}, batch)


PLUG_IN = """
from dataclasses import dataclass
from typing import ClassVar

from agentrl.algo.loss import TokenLoss
from agentrl.algo.policy_losses import Reinforce

@dataclass(frozen=True)
class Doubled:
    uses_ratio: ClassVar[bool] = False
    factor: float = 2.0

    def __call__(self, inputs):
        plain = Reinforce()(inputs)
        return TokenLoss(self.factor * plain.loss, plain.ratio, plain.clipped)

class Silent:
    def __call__(self, inputs):
        raise AssertionError("is refused before it is called")
"""


def test_a_loss_of_the_users_comes_by_path_with_its_arguments_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLUG_IN)
    batch, new, _ = _batch("token-mean")
    total = int(batch.tokens["loss_mask"].sum())
    losses = [make_loss(f"{path}:Doubled", {"factor": 3.0}), Reinforce()]
    tripled, plain = (
        PolicyLoss(token_loss=x, num_tokens=total)({"logprobs": new}, batch) for x in losses
    )
    assert float(tripled[0]) == pytest.approx(3 * float(plain[0]))
    with pytest.raises(ConfigError, match=r"algo\.loss_kwargs\.factr.*did you mean 'factor'"):
        make_loss(f"{path}:Doubled", {"factr": 3.0})
    with pytest.raises(ConfigError, match=r"Silent.*uses_ratio"):
        make_loss(f"{path}:Silent", {})
