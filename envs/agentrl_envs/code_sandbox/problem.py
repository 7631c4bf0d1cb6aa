"""What a task asks for, whatever it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, frozen=True)
class Example:
    """One call of the function, and what it must return."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    expected: Any


@dataclass(slots=True, frozen=True, kw_only=True)
class Problem:
    """A function to write, with examples to see and tests to pass."""

    prompt: str
    entry_point: str
    visible: tuple[Example, ...]
    hidden: tuple[Example, ...] = ()
    preamble: str = ""
    """Source that the prompt shows as given: runs before the submission."""
    test_program: str | None = field(default=None)
    """Source that defines ``check(candidate)``, in place of ``hidden``."""


def problem_of(data: Mapping[str, Any]) -> Problem:
    """Read ``Task.data`` of any source.

    Generated tasks hold ``visible`` and ``hidden`` as ``[input, output]`` pairs of a function
    ``f`` of one argument; the others hold ``visible_tests``, ``hidden_tests`` and perhaps
    ``test_program`` as :mod:`agentrl_envs.code_sandbox.tasks` describes them.
    """
    if "visible" in data:
        return Problem(
            prompt=data["prompt"],
            entry_point="f",
            visible=_pairs(data["visible"]),
            hidden=_pairs(data["hidden"]),
        )
    return Problem(
        prompt=data["prompt"],
        entry_point=data["entry_point"],
        visible=_tests(data["visible_tests"]),
        hidden=_tests(data["hidden_tests"]),
        preamble=data.get("preamble", ""),
        test_program=data.get("test_program"),
    )


def _pairs(pairs: Sequence[Sequence[Any]]) -> tuple[Example, ...]:
    return tuple(Example([x], {}, y) for x, y in pairs)


def _tests(tests: Sequence[Mapping[str, Any]]) -> tuple[Example, ...]:
    return tuple(Example(t["args"], t.get("kwargs", {}), t["expected"]) for t in tests)
