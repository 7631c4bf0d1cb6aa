"""The vocabulary pass on a GPU against the same arithmetic with torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentrl.dist.head import scores_of_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FIELDS = ("logprobs", "entropy", "sum_pi_squared")


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(37, 10_001, generator=generator)  # no multiple of a block
    logits[3] = -1e4  # all but one token impossible
    logits[3, 5] = 0.0
    targets = torch.randint(0, 10_001, (37,), generator=generator)
    targets[3] = 5
    grads = [torch.randn(37, generator=generator) for _ in FIELDS]
    return logits.to("cuda", dtype), targets.cuda(), [grad.cuda() for grad in grads]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_and_gradients_are_those_of_the_formula(
    dtype: torch.dtype, temperature: float
) -> None:
    from agentrl.dist.head_kernels import gradient_of_logits, statistics

    logits, targets, grads = _inputs(dtype)
    exact = logits.double().requires_grad_()
    log_probs = (exact / temperature).log_softmax(-1)
    probs = log_probs.exp()
    want = [
        log_probs.gather(1, targets[:, None]).squeeze(1),
        -(probs * log_probs).sum(-1),
        probs.square().sum(-1),
    ]
    found = statistics(logits, targets, temperature, True)
    for got, value in zip(found, want, strict=False):
        torch.testing.assert_close(got.double(), value.detach(), atol=1e-4, rtol=1e-4)
    for wanted in ([True, False, False], [True, True, False], [True, True, True]):
        given = [grad if want_it else None for grad, want_it in zip(grads, wanted, strict=True)]
        total = sum(
            (value * grad.double()).sum()
            for value, grad in zip(want, given, strict=True)
            if grad is not None
        )
        assert isinstance(total, Tensor)
        (expected,) = torch.autograd.grad(total, exact, retain_graph=True)
        got = gradient_of_logits(logits, targets, found, temperature, given)
        assert got.dtype == dtype
        tolerance = 1e-4 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_the_cpu_formula_agrees() -> None:
    from agentrl.dist.head_kernels import statistics

    logits, targets, _ = _inputs(torch.float32)
    found = statistics(logits, targets, 1.0, True)
    want = scores_of_logits(logits.cpu(), targets.cpu(), temperature=1.0, fields=FIELDS)
    for got, value in zip(found, want, strict=False):
        torch.testing.assert_close(got.cpu(), value, atol=1e-4, rtol=1e-4)
