from __future__ import annotations

import pytest
import torch

from agentrl.dist.metrics import MetricSum


def test_shares_add_up_and_maxima_are_maxima() -> None:
    total = MetricSum()
    total.add({"loss": torch.tensor(0.25), "ratio_max": torch.tensor(2.0), "count": 1})
    total.add({"loss": torch.tensor(0.5), "ratio_max": torch.tensor(-1.0), "count": 2.0})
    total.add({"kl": torch.tensor([3.0]), "ratio_max": 1.5})
    assert total.result() == {"loss": 0.75, "ratio_max": 2.0, "count": 3.0, "kl": 3.0}
    assert all(type(value) is float for value in total.result().values())


def test_many_small_shares_lose_nothing() -> None:
    total = MetricSum()
    for _ in range(10_000):
        total.add({"loss": torch.tensor(1e-4)})
    total.add({"loss": torch.tensor(1e4)})
    assert total.result()["loss"] == pytest.approx(10_001.0, rel=1e-9, abs=1e-6)


def test_no_share_is_no_metric() -> None:
    assert MetricSum().result() == {}
