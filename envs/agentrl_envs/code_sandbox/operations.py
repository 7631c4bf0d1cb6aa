"""The list operations that generated tasks are made of.

Each has a phrase and one to three *readings*: programs that an honest reader of the phrase could
mean ("take 2": the first two or the last two). Which one is meant can only be told from examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache


@dataclass(slots=True, frozen=True)
class Operation:
    """A phrase, the values its parameter ``{k}`` may take, and its readings.

    Readings are Python expressions over the list ``x``.
    """

    phrase: str
    values: tuple[int, ...]
    """Empty where the phrase has no parameter."""
    readings: tuple[str, ...]

    @property
    def name(self) -> str:
        """The phrase's first word, unique among the operations."""
        return self.phrase.split()[0]


def _operation(phrase: str, values: Iterable[int], *readings: str) -> Operation:
    return Operation(phrase, tuple(values), readings)


OPERATIONS: tuple[Operation, ...] = (
    # Two readings.
    _operation("rotate by {k}", range(1, 4), "x[{k}:] + x[:{k}]", "x[-{k}:] + x[:-{k}]"),
    _operation(
        "filter by {k}", range(2, 8), "[i for i in x if i > {k}]", "[i for i in x if i < {k}]"
    ),
    _operation("take {k}", range(1, 4), "x[:{k}]", "x[-{k}:]"),
    _operation("drop {k}", range(1, 3), "x[{k}:]", "x[:-{k}]"),
    _operation("sort", (), "sorted(x)", "sorted(x)[::-1]"),
    _operation("divide by {k}", range(2, 6), "[i // {k} for i in x]", "[-(-i // {k}) for i in x]"),
    _operation("shift by {k}", range(1, 10), "[i + {k} for i in x]", "[i - {k} for i in x]"),
    _operation("insert {k}", range(1, 10), "[{k}] + x", "x + [{k}]"),
    _operation("clamp at {k}", range(2, 8), "[min(i, {k}) for i in x]", "[max(i, {k}) for i in x]"),
    _operation("alternate", (), "x[::2]", "x[1::2]"),
    _operation(
        "differences",
        (),
        "[b - a for a, b in zip(x, x[1:])]",
        "[a - b for a, b in zip(x, x[1:])]",
    ),
    _operation("repeat {k} times", range(2, 4), "x * {k}", "[i for i in x for _ in range({k})]"),
    # Three readings.
    _operation(
        "round to {k}",
        range(2, 6),
        "[i // {k} * {k} for i in x]",
        "[-(-i // {k}) * {k} for i in x]",
        "[(i + {k} // 2) // {k} * {k} for i in x]",
    ),
    _operation(
        "combine with {k}",
        range(2, 10),
        "[i + {k} for i in x]",
        "[i * {k} for i in x]",
        "[abs(i - {k}) for i in x]",
    ),
    _operation(
        "merge neighbours",
        (),
        "[a + b for a, b in zip(x, x[1:])]",
        "[a * b for a, b in zip(x, x[1:])]",
        "[max(a, b) for a, b in zip(x, x[1:])]",
    ),
    _operation(
        "compare with {k}",
        range(2, 8),
        "[int(i > {k}) for i in x]",
        "[int(i < {k}) for i in x]",
        "[int(i == {k}) for i in x]",
    ),
    # One reading.
    _operation("reverse", (), "x[::-1]"),
    _operation("multiply by {k}", range(2, 10), "[i * {k} for i in x]"),
    _operation("remainder by {k}", range(2, 10), "[i % {k} for i in x]"),
    _operation("square", (), "[i * i for i in x]"),
    _operation("negate", (), "[-i for i in x]"),
)


@cache
def _compiled(expression: str) -> Callable[[list[int]], list[int]]:
    # Only expressions of the table above get here: they are ours, so plain eval is safe.
    return eval(f"lambda x: {expression}")


def apply_program(program: Iterable[str], x: list[int]) -> list[int]:
    """Run ``program``, one expression over ``x`` after the other, in this process."""
    for expression in program:
        x = _compiled(expression)(x)
    return x


def program_source(program: Iterable[str]) -> str:
    """Return the Python source of ``program`` as a function ``f``."""
    steps = "".join(f"    x = {expression}\n" for expression in program)
    return f"def f(x):\n{steps}    return x"
