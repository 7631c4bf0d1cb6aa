"""Arguments checked against the schema of a tool's parameters."""

from __future__ import annotations

from typing import Any

from agentrl.tool.schema import ArgumentValidator

STRING = {"type": "string"}


def obj(**extra: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": STRING}, **extra}


def test_arguments_beyond_the_schema_are_refused_unless_it_allows_them():
    assert "unknown argument 'z'" in (ArgumentValidator(obj()).problem({"z": 1}) or "")
    assert ArgumentValidator(obj(additionalProperties=True)).problem({"z": 1}) is None


def test_a_problem_names_the_argument_and_stays_short():
    problem = ArgumentValidator(obj()).problem({"a": ["x" * 10_000]})
    assert problem is not None
    assert "argument 'a'" in problem and len(problem) < 400


def test_a_pattern_that_takes_for_ever_costs_a_moment():
    validator = ArgumentValidator(obj(properties={"a": {"type": "string", "pattern": "^(a+)+$"}}))
    assert validator.problem({"a": "aaaa"}) is None
    assert "match" in (validator.problem({"a": "b"}) or "")
    assert "'a'" in (validator.problem({"a": "a" * 60 + "!"}) or "")
