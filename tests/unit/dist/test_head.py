from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import agentrl.dist.head as head
from agentrl.dist.head import POLICY_FIELDS, scores_of_logits, token_scores

TOKENS, WIDTH, VOCABULARY = 23, 8, 41


def _inputs(*, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return random(TOKENS, WIDTH), random(VOCABULARY, WIDTH), random(VOCABULARY), targets


@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1, 2)])
def test_gradients_are_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch, chunk: int, temperature: float, wanted: tuple[int, ...]
) -> None:
    monkeypatch.setitem(head.MAX_LOGITS, "cpu", chunk * VOCABULARY)
    states, weight, bias, targets = _inputs(dtype=torch.float32)
    got = token_scores(states, weight, bias, targets, temperature=temperature, fields=POLICY_FIELDS)
    want = scores_of_logits(
        states @ weight.T + bias, targets, temperature=temperature, fields=POLICY_FIELDS
    )
    scale = torch.linspace(-1, 1, TOKENS)
    gradients = [
        torch.autograd.grad(
            sum(((score[index] * scale).sum() for index in wanted), torch.zeros(())),
            (states, weight, bias),
        )
        for score in (got, want)
    ]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    for one, other in zip(*gradients, strict=True):
        assert float(one.norm()) > 0
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


class _Largest(TorchDispatchMode):
    """Remembers the largest floating-point tensor that comes to be."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in found if isinstance(found, tuple | list) else (found,):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.numel = max(self.numel, value.numel())
        return found


def test_no_more_than_a_chunk_of_logits_ever_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head.MAX_LOGITS, "cpu", 3 * VOCABULARY)
    states, weight, bias, targets = _inputs(dtype=torch.float32)
    with _Largest() as largest:
        scores = token_scores(states, weight, bias, targets, temperature=0.7, fields=POLICY_FIELDS)
        torch.stack(scores).sum().backward()
    assert largest.numel == VOCABULARY * WIDTH < TOKENS * VOCABULARY


def test_a_graph_can_be_gone_through_twice() -> None:
    states, weight, _, targets = _inputs(dtype=torch.float32)
    (score,) = token_scores(states, weight, None, targets, temperature=1.0, fields=("logprobs",))
    once, again = (torch.autograd.grad(score.sum(), states, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again)


def test_no_tokens_give_a_gradient_of_zero() -> None:
    states, weight, bias, targets = _inputs(dtype=torch.float32)
    scores = token_scores(
        states[:0], weight, bias, targets[:0], temperature=1.0, fields=POLICY_FIELDS
    )
    sum(score.sum() for score in scores).backward()  # pyright: ignore[reportAttributeAccessIssue]
    assert weight.grad is not None and not weight.grad.any()


def test_frozen_weights_get_no_gradient() -> None:
    states, weight, _, targets = _inputs(dtype=torch.float32)
    weight = weight.detach()
    (score,) = token_scores(states, weight, None, targets, temperature=1.0, fields=("logprobs",))
    score.sum().backward()
    assert weight.grad is None and states.grad is not None and bool(states.grad.any())
