from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agentrl.algo.mismatch import mismatch


def measured(trainer: Tensor, engine: Tensor, *, num_tokens: int) -> dict[str, float]:
    found = mismatch(trainer, engine, num_tokens=num_tokens)
    return {name: float(value) for name, value in found.items()}


def test_hand_worked_values() -> None:
    trainer = torch.tensor([-1.0, -2.0, -0.5])
    engine = torch.tensor([-1.0, -1.0, -1.0])
    got = measured(trainer, engine, num_tokens=3)
    differences = [0.0, -1.0, 0.5]  # log of trainer's over engine's probability
    k3 = [math.exp(x) - 1 - x for x in differences]
    assert got == pytest.approx(
        {
            "mismatch/logprob_abs_mean": 1.5 / 3,
            "mismatch/logprob_abs_max": 1.0,
            "mismatch/k3_kl": sum(k3) / 3,
            "mismatch/ratio_oob_fraction": 1 / 3,  # e^-1 < 1/2
        },
        abs=1e-6,
    )


def test_equal_probabilities_show_nothing() -> None:
    logprobs = torch.tensor([-1.0, -2.0])
    got = measured(logprobs, logprobs, num_tokens=2)
    assert set(got.values()) == {0.0}


def test_no_trained_tokens_give_zeros() -> None:
    got = measured(torch.zeros(0), torch.ones(0), num_tokens=0)
    assert set(got.values()) == {0.0}
