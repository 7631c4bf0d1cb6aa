from __future__ import annotations

import pytest

from agentrl.dist.config import OptimizerConfig, Schedule
from agentrl.dist.schedule import learning_rate
from agentrl.errors import ConfigError


def _rates(config: OptimizerConfig, total: int | None, steps: int) -> list[float]:
    return [learning_rate(config, num_updates=n, total_updates=total) for n in range(steps)]


def test_warm_up_rises_on_a_straight_line_then_stays() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert _rates(config, None, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_its_floor_and_no_further() -> None:
    config = OptimizerConfig(lr=1.0, schedule=Schedule.linear, min_lr_fraction=0.5)
    assert _rates(config, 4, 6) == pytest.approx([1.0, 0.875, 0.75, 0.625, 0.5, 0.5])


def test_cosine_is_half_way_in_the_middle() -> None:
    config = OptimizerConfig(lr=2.0, schedule=Schedule.cosine, warmup_steps=2)
    rates = _rates(config, 6, 7)
    assert rates[:3] == pytest.approx([1.0, 2.0, 2.0])
    assert rates[4] == pytest.approx(1.0)
    assert rates[6] == pytest.approx(0.0, abs=1e-12)


def test_a_falling_schedule_without_an_end_is_refused() -> None:
    config = OptimizerConfig(schedule=Schedule.cosine)
    with pytest.raises(ConfigError, match="schedule=constant"):
        learning_rate(config, num_updates=0, total_updates=None)
