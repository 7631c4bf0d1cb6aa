"""Arguments checked against the schema of a tool's parameters."""

from __future__ import annotations

import sys
from typing import Any

import pytest

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


def chain(num_levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"next": 5}
    for _ in range(num_levels):
        value = {"next": value}
    return value


@pytest.mark.timeout(20)  # two ways at each level would be 2^30
def test_a_recursive_schema_with_a_choice_is_no_way_to_hold_up_the_loop():
    branch = {"anyOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/n"}]}
    node = {"type": "object", "properties": {"next": branch}}
    validator = ArgumentValidator(
        obj(properties={"a": {"$ref": "#/$defs/n"}}, **{"$defs": {"n": node}})
    )
    assert "too long or nested too deeply" in (validator.problem({"a": chain(30)}) or "")
    assert validator.problem({"a": {"next": {}}}) is None  # and the next call is checked as ever


def test_arguments_too_deep_for_the_stack_are_a_mistake_of_the_callers():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}
    validator = ArgumentValidator(
        obj(properties={"a": {"$ref": "#/$defs/n"}}, **{"$defs": {"n": node}})
    )
    assert "too deeply" in (validator.problem({"a": chain(900)}) or "")


@pytest.mark.timeout(20)  # pair by pair it would be half a thousand million comparisons
def test_unique_items_are_compared_in_linear_time_and_by_value():
    validator = ArgumentValidator(obj(properties={"a": {"type": "array", "uniqueItems": True}}))
    assert validator.problem({"a": [{"k": [i]} for i in range(30_000)]}) is None
    assert validator.problem({"a": [1, True, "1", [1], {"k": 1}, None, False, 0]}) is None
    for same in ([1, 1.0], [{"a": 1, "b": 2}, {"b": 2, "a": 1.0}], [[0], [0]]):
        assert "unique" in (validator.problem({"a": same}) or "")


@pytest.mark.parametrize("schema", [STRING, {"enum": ["a"]}, {"anyOf": [STRING]}, {"const": "a"}])
def test_a_value_of_any_depth_is_refused_and_never_an_error(schema: dict[str, Any]):
    """Somewhere below the limit of recursion it can be checked and not be told of."""
    validator = ArgumentValidator(obj(properties={"a": schema}))
    value: Any = 1
    for _ in range(sys.getrecursionlimit() + 10):
        value = [value]
        assert validator.problem({"a": value}) is not None


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan")])
def test_a_number_that_cannot_be_divided_is_refused(value: float):
    schema = {"type": "number", "multipleOf": 0.5}
    problem = ArgumentValidator(obj(properties={"a": schema})).problem({"a": value})
    assert problem is not None and "too large" in problem
