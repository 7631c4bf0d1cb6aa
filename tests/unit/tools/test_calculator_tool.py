"""The calculator tool: arithmetic, bounded, and nothing else."""

from __future__ import annotations

import asyncio
import random

import pytest
from agentrl_tools.calculator.tool import calculate

from agentrl.errors import ToolError


def value(expression: str) -> str:
    return asyncio.run(calculate(expression))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("1 + 2 * 3", "7"),
        (" (1 + 2) * 3\n", "9"),
        ("7 // 2", "3"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("-7 % 3", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("+-3", "-3"),
        ("1e3", "1000"),
        ("0 ** 1000", "0"),
        ("1_000 + 1", "1001"),
        ("+".join(map(str, range(1, 81))), "3240"),
        ("10 ** -300", "1e-300"),
    ],
)
def test_values(expression: str, expected: str):
    assert value(expression) == expected


def test_random_expressions_agree_with_python():
    source = random.Random(0)
    for _ in range(300):
        text = str(source.randint(0, 99))
        for _ in range(source.randint(1, 6)):
            text = f"({text} {source.choice('+-*')} {source.randint(1, 99)})"
        assert value(text) == str(eval(text))


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("", "not an arithmetic"),
        ("1 +", "not an arithmetic"),
        ("1; 2", "not an arithmetic"),
        ("x", "only numbers"),
        ("f(1)", "only numbers"),
        ("__import__('os').system('true')", "only numbers"),
        ("(1).__class__", "only numbers"),
        ("[1]", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("True", "only numbers"),
        ("1j", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("lambda: 1", "only numbers"),
        ("1 @ 2", "only the operators"),
        ("1 << 99", "only the operators"),
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("10 ** 10 ** 10", "too large"),
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("2 ** 2000", "too large"),
        ("1e308 * 10", "too large"),
        ("1e999", "too large"),
        ("9" * 400, "too large"),
        ("(-1) ** 0.5", "not a real number"),
        ("1.5 ** 1e9", "too large"),
        ("(" * 230 + "1" + ")" * 230, "not an arithmetic"),
        ("-" * 100 + "1", "nest"),
        ("1" * 501, "characters"),
        ("1\x00", "not an arithmetic"),
    ],
)
def test_everything_else_is_the_models_mistake(expression: str, told: str):
    with pytest.raises(ToolError) as caught:
        value(expression)
    assert told in str(caught.value)
