from __future__ import annotations

import math

import pytest
import torch

from agentrl.algo.mismatch import mismatch


def test_hand_worked_values_ignore_masked_tokens() -> None:
    trainer = torch.tensor([-1.0, -2.0, -0.5, 9.0])
    engine = torch.tensor([-1.0, -1.0, -1.0, -9.0])
    mask = torch.tensor([True, True, True, False])
    got = mismatch(trainer, engine, mask, num_tokens=3)
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
    got = mismatch(logprobs, logprobs, torch.tensor([True, True]), num_tokens=2)
    assert set(got.values()) == {0.0}


def test_no_trained_tokens_give_zeros() -> None:
    got = mismatch(torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.bool), num_tokens=0)
    assert set(got.values()) == {0.0}
