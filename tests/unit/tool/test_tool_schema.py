"""Schemas of tool parameters, and arguments checked against them."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.errors import ToolSpecError
from agentrl.tool.schema import ArgumentValidator, check_schema

STRING = {"type": "string"}


def obj(**extra: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": STRING}, **extra}


@pytest.mark.parametrize(
    "schema",
    [
        obj(),
        obj(required=["a"]),
        {"type": "object"},
        {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": STRING}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": STRING}},
        {"type": "object", "properties": {"a": {"anyOf": [STRING, {"type": "null"}]}}},
    ],
)
def test_a_valid_schema_is_not_refused(schema: dict[str, Any]):
    check_schema(schema, where="t.yaml")


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        (None, "must be a JSON Schema"),
        ([], "must be a JSON Schema"),
        ({"properties": {"a": STRING}}, "must be 'object'"),
        ({"type": "string"}, "must be 'object'"),
        (obj(required=["b"]), "names 'b'"),
        (obj(required="a"), "required"),
        ({"type": "object", "properties": {"a": {}}}, "says no type"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "properties.a"),
        ({"type": "object", "properties": {"a": True}}, "says no type"),
        ({"type": "object", "properties": {"a": {"type": "array", "items": {}}}}, "items"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}}, "leads nowhere"),
        ({"type": "object", "properties": {"a": {"$ref": "http://x/y"}}}, "not local"),
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/x"}},
                "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}},
            },
            "leads back to itself",
        ),
    ],
)
def test_a_schema_that_cannot_mean_anything_is_refused(schema: Any, what: str):
    with pytest.raises(ToolSpecError, match="t.yaml") as caught:
        check_schema(schema, where="t.yaml")
    assert what in str(caught.value)


def test_arguments_beyond_the_schema_are_refused_unless_it_allows_them():
    assert "unknown argument 'z'" in (ArgumentValidator(obj()).problem({"z": 1}) or "")
    assert ArgumentValidator(obj(additionalProperties=True)).problem({"z": 1}) is None


def test_a_problem_names_the_argument_and_stays_short():
    problem = ArgumentValidator(obj()).problem({"a": ["x" * 10_000]})
    assert problem is not None
    assert problem.startswith("a: ") and len(problem) < 400
