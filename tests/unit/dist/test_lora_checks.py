from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from agentrl.dist.config import LoraConfig
from agentrl.dist.lora_checks import lora_problems


@pytest.mark.parametrize(
    "how", [{}, {"rank": 8}, {"rank": 1, "alpha": 0.5, "target_modules": r".*\.(q_proj|v_proj)"}]
)
def test_what_can_work_has_no_problem(how: dict[str, Any]) -> None:
    assert list(lora_problems(LoraConfig(**how))) == []


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ({"rank": -2, "alpha": -1.0, "target_modules": "*"}, ["rank=-2", "alpha=-1.0", "='*' is"]),
        ({"rank": 2, "alpha": float("inf"), "target_modules": ""}, ["alpha=inf", "is empty"]),
        ({"alpha": 16.0}, ["lora.alpha=16.0 with lora.rank=0"]),
        ({"target_modules": ".*"}, ["lora.target_modules=.* with lora.rank=0"]),
    ],
)
def test_every_problem_is_named(how: dict[str, Any], found: list[str]) -> None:
    problems = list(lora_problems(LoraConfig(**how)))
    assert len(problems) == len(found)
    assert all(part in problem for part, problem in zip(found, problems, strict=True))


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [problem] = lora_problems(LoraConfig(rank=4))
    assert "pip install -e '.[peft]'" in problem
