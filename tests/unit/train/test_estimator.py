"""One estimator of a run: what it is given, and what it may answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentrl.algo.config import CreditConfig
from agentrl.algo.credit import Credit, CreditBatch, estimator
from agentrl.errors import TrainingError
from agentrl.testing.credit import SessionCredit, make_credit
from agentrl.train import estimator as estimator_module
from agentrl.train.estimator import run_estimator

TWO_TOKENS = make_credit(SessionCredit(tokens=[2], values=[0.5, 0.25], bootstrap=0.0))


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Credit]:
    """Run an estimator that answers what it is told, on :data:`TWO_TOKENS`."""

    def run(credit: Any, *, needs: tuple[str, ...] = ()) -> Credit:
        @estimator(needs=needs)
        def told(batch: CreditBatch) -> Credit:
            return credit

        monkeypatch.setattr(estimator_module, "get_estimator", lambda name: told)
        return run_estimator(TWO_TOKENS, CreditConfig(advantage="told"))

    return run


def test_a_discount_reaches_the_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    @estimator()
    def probe(batch: CreditBatch, *, gamma: float = 1.0, scale: float = 1.0) -> Credit:
        seen.update(gamma=gamma, scale=scale)
        return Credit(torch.zeros(batch.num_tokens))

    monkeypatch.setattr(estimator_module, "get_estimator", lambda name: probe)
    config = CreditConfig(advantage="probe", gamma=0.5, advantage_kwargs={"scale": 3.0})
    run_estimator(TWO_TOKENS, config)
    assert seen == {"gamma": 0.5, "scale": 3.0}


@pytest.mark.parametrize("values", [torch.zeros(3), torch.tensor([1.0, torch.nan])])
def test_advantages_are_one_finite_number_per_token(
    values: torch.Tensor, answer: Callable[..., Credit]
) -> None:
    with pytest.raises(TrainingError, match="each of the 2 sampled tokens|no finite float32"):
        answer(Credit(values))


@pytest.mark.parametrize(
    ("credit", "words"),
    [
        (Credit(torch.zeros(2)), "the critic would learn nothing"),
        (Credit(torch.zeros(2), value_targets=torch.zeros(3)), "value targets of shape"),
        (Credit(torch.zeros(2), value_targets=torch.tensor([0.0, torch.inf])), "no finite float32"),
        (
            Credit(torch.zeros(2), value_targets=torch.zeros(2), value_mask=torch.ones(2)),
            r"a value mask of torch.float32 \(2,\)",
        ),
    ],
)
def test_an_estimator_that_reads_values_says_what_the_critic_is_to_learn(
    credit: Credit, words: str, answer: Callable[..., Credit]
) -> None:
    with pytest.raises(TrainingError, match=words):
        answer(credit, needs=("values",))


def test_a_critic_learns_at_every_token_unless_told_otherwise(
    answer: Callable[..., Credit],
) -> None:
    targets = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = answer(Credit(torch.zeros(2), value_targets=targets), needs=("values",))
    assert found.value_targets is not None and found.value_mask is not None
    assert found.value_targets.tolist() == [1.0, 2.0] and bool(found.value_mask.all())
    some = replace(found, value_mask=torch.tensor([True, False]))
    found = answer(some, needs=("values",))
    assert found.value_mask is not None and found.value_mask.tolist() == [True, False]


def test_value_targets_without_a_critic_are_refused(answer: Callable[..., Credit]) -> None:
    with pytest.raises(TrainingError, match=r"no critic to learn them: .*@estimator\(needs="):
        answer(Credit(torch.zeros(2), value_targets=torch.zeros(2)))


def test_who_does_not_ask_for_values_sees_none_though_the_run_has_a_critic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[CreditBatch] = []

    @estimator()
    def probe(batch: CreditBatch) -> Credit:
        seen.append(batch)
        return Credit(torch.zeros(batch.num_tokens))

    monkeypatch.setattr(estimator_module, "get_estimator", lambda name: probe)
    run_estimator(TWO_TOKENS, CreditConfig(advantage="probe"))
    assert seen[0].values is None and seen[0].bootstrap_values is None
