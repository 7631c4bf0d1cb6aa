"""Estimators and losses of a user's that are wrong: one message, and nothing trained in silence."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algo.config import CreditConfig
from agentrl.algo.loss import PolicyLoss, make_loss
from agentrl.batch import Batch
from agentrl.errors import ConfigError, RegistryError, TrainingError
from agentrl.testing.sessions import make_group, make_session
from agentrl.train.assemble import assemble
from agentrl.train.credit import estimate
from agentrl.train.learner import _refuse_fields

Write = Callable[[str], str]


@pytest.fixture
def plug_in(tmp_path: Path) -> Write:
    """Write a module with one definition; returns its path."""

    def write(source: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(
            "import asyncio, sys, torch\n"
            "from dataclasses import dataclass\n"
            "from typing import ClassVar\n"
            "from agentrl.algo.credit import Credit, CreditBatch, estimator\n"
            "from agentrl.algo.loss import TokenLoss\n" + textwrap.dedent(source)
        )
        return str(path)

    return write


def credited(name: str) -> torch.Tensor:
    config = CreditConfig(advantage=name)
    group = make_group(make_session("a", 1.0, [[0, 1, 1]]), make_session("b", 0.0))
    made = assemble([group], {"e": config})
    return estimate(made.credit, ["e", "e"], {"e": config}).advantages


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return torch.zeros(batch.num_tokens)", "returned Tensor; return Credit"),
        ("return None", "returned NoneType; return Credit"),
        ("return Credit([0.0] * batch.num_tokens)", "returned list; return Credit"),
        ("return Credit(torch.zeros(batch.num_tokens, dtype=torch.int64))", "return Credit"),
        ("return Credit(torch.zeros(batch.num_tokens).to_sparse())", "return Credit"),
        ("return Credit(torch.zeros(5))", r"shape \(5,\).*each of the 3 sampled tokens"),
        ("return Credit(torch.zeros(3, 1))", r"shape \(3, 1\)"),
        ("return Credit(torch.zeros(3, device='meta'))", "on meta"),
        ("return Credit(torch.full((3,), 1e300, dtype=torch.float64))", "no finite float32"),
        ("return Credit(torch.full((3,), torch.nan))", "3 advantages that are no finite"),
        ("raise KeyError('lost')", r"raised KeyError: 'lost' \(.*mine.py:7, in estimate\)"),
        ("sys.exit(0)", "raised SystemExit: 0"),
        ("raise asyncio.CancelledError", "raised CancelledError"),
        ("return estimate(batch)", "raised RecursionError"),
    ],
)
def test_a_faulty_estimator_ends_the_run_with_one_message(
    plug_in: Write, body: str, message: str
) -> None:
    path = plug_in(f"def estimate(batch):\n    {body}\n")
    with pytest.raises(TrainingError, match=message):
        credited(f"{path}:estimate")


def test_what_an_estimator_does_to_its_inputs_changes_nothing(plug_in: Write) -> None:
    path = plug_in(
        """
        def estimate(batch):
            batch.outcome_rewards.fill_(7)
            return Credit(batch.spread_sessions(batch.outcome_rewards))
        """
    )
    config = CreditConfig(advantage=f"{path}:estimate")
    made = assemble([make_group(make_session("a", 1.0))], {"e": config})
    assert estimate(made.credit, ["e"], {"e": config}).advantages.tolist() == [7.0]
    assert made.credit.outcome_rewards.tolist() == [1.0]


def test_an_estimator_with_a_gradient_is_cut_off_from_it(plug_in: Write) -> None:
    path = plug_in(
        "def estimate(batch):\n    return Credit(torch.ones(3, requires_grad=True) * 2.0)\n"
    )
    found = credited(f"{path}:estimate")
    assert found.tolist() == [2.0, 2.0, 2.0] and not found.requires_grad


def test_something_that_cannot_be_an_estimator_is_refused() -> None:
    with pytest.raises(RegistryError, match="cannot be marked"):
        credited("math:fsum")


def loss_of(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = Batch.from_rows(
        {
            "loss_mask": [torch.tensor([False, True, True, True])],
            "advantages": [torch.tensor([0.0, 1.0, -1.0, 0.5])],
            "old_logprobs": [torch.full((4,), -1.0)],
            "loss_weights": [torch.full((4,), 1 / 3)],
        }
    )
    logprobs = torch.full((4,), -1.0, requires_grad=True)
    return PolicyLoss(token_loss=make_loss(name, {}), num_tokens=3)({"logprobs": logprobs}, batch)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return TokenLoss(x.loss[:, None], x.ratio, x.clipped)", r"loss of \(3, 1\)"),
        ("return TokenLoss(x.loss.mean(), x.ratio, x.clipped)", r"loss of \(\)"),
        ("return TokenLoss(x.loss[1:], x.ratio, x.clipped)", r"loss of \(2,\)"),
        ("return TokenLoss(x.loss.detach(), x.ratio, x.clipped)", "without a gradient"),
        ("return TokenLoss(x.loss, None, x.clipped)", "ratio of NoneType"),
        ("return x.loss", "returned Tensor; return TokenLoss"),
        ("raise ValueError('no')", r"raised ValueError: no \(.*mine.py:\d+, in __call__\)"),
        ("sys.exit(0)", "raised SystemExit"),
    ],
)
def test_a_faulty_loss_ends_the_run_with_one_message(
    plug_in: Write, body: str, message: str
) -> None:
    path = plug_in(
        f"""
        @dataclass(frozen=True)
        class Mine:
            uses_ratio: ClassVar[bool] = True

            def __call__(self, inputs):
                ratio = (inputs.logprobs - inputs.old_logprobs).exp()
                x = TokenLoss(-inputs.advantages * ratio, ratio.detach(), ratio > 9)
                {body}
        """
    )
    with pytest.raises(TrainingError, match=message):
        loss_of(f"{path}:Mine")


def test_a_function_is_no_loss(plug_in: Write) -> None:
    with pytest.raises(ConfigError, match="give a class"):
        make_loss(plug_in("def mine(inputs):\n    return 1\n") + ":mine", {})


def test_a_setting_beyond_all_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"clip_high=1e\+39: must be a finite number"):
        make_loss("cispo", {"clip_high": 1e39})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"advantages": torch.zeros(2)}, "names of its own"),
        ({"mine": torch.zeros(3)}, r"shape \(2,\)"),
        ({"mine": [0.0, 0.0]}, "with list"),
        ({7: torch.zeros(2)}, "the field 7"),
        ([], "returned list"),
    ],
)
def test_prepared_fields_fit_and_replace_nothing(fields: Any, message: str) -> None:
    batch = Batch.from_rows({"advantages": [torch.zeros(4)]})
    with pytest.raises(TrainingError, match=message):
        _refuse_fields(fields, batch, num_tokens=2, loss="mine")
