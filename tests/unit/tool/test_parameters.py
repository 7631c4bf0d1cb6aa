"""Schemas of tool parameters: what a model could not follow is refused, with its place."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.tool.parameters import parameters_problem

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
        {  # a tree: it ends where a value does
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/n"}},
            "$defs": {
                "n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}},
            },
        },
    ],
)
def test_a_valid_schema_is_not_refused(schema: dict[str, Any]):
    assert parameters_problem(schema) is None


@pytest.mark.parametrize(
    ("schema", "what", "path"),
    [
        (None, "must be a JSON Schema", ""),
        ([], "must be a JSON Schema", ""),
        ({"properties": {"a": STRING}}, "must be 'object'", ""),
        ({"type": "string"}, "must be 'object'", "type"),
        (obj(required=["b"]), "names 'b'", "required.0"),
        (obj(required="a"), "not of type", "required"),
        ({"type": "object", "properties": {"a": {}}}, "says no type", "properties.a"),
        (
            {"type": "object", "properties": {"a": {"type": "text"}}},
            "is no type",
            "properties.a.type",
        ),
        ({"type": "object", "properties": {"a": True}}, "says no type", "properties.a"),
        (
            {"type": "object", "properties": {"a": {"type": "array", "items": {}}}},
            "says no type",
            "properties.a.items",
        ),
        (
            {"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}},
            "leads nowhere",
            "properties.a.$ref",
        ),
        (
            {"type": "object", "properties": {"a": {"$ref": "http://x/y"}}},
            "not local",
            "properties.a.$ref",
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/x"}},
                "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}},
            },
            "leads back to itself",
            "properties.a.$ref",
        ),
        (obj(**{"$ref": "#"}), "not local", "$ref"),
        (
            {"type": "object", "properties": {"a": {"not": {"$ref": "#/properties/a"}, **STRING}}},
            "leads back to itself",
            "properties.a.not.$ref",
        ),
        (
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a"}}},
            "is not a 'regex'",
            "properties.a.pattern",
        ),
        (
            obj(additionalProperties={"type": "string", "$ref": "#/$defs/no"}),
            "leads nowhere",
            "additionalProperties.$ref",
        ),
        (obj(patternProperties={"a": STRING}), "is refused", "patternProperties"),
        (obj(**{"$dynamicRef": "#a"}), "is refused", "$dynamicRef"),
        (
            {"type": "object", "properties": {"a": {"type": "number", "maximum": float("nan")}}},
            "no number of JSON",
            "properties.a.maximum",
        ),
    ],
)
def test_a_schema_that_cannot_mean_anything_is_refused_with_its_place(
    schema: Any, what: str, path: str
):
    problem = parameters_problem(schema)
    assert problem is not None
    assert what in problem.problem
    assert ".".join(map(str, problem.path)) == path


BROKEN = {
    "remote": {"$ref": "http://127.0.0.1:1/x"},
    "missing": {"$ref": "#/$defs/none"},
    "pattern": {"type": "string", "pattern": "("},
    "patternProperties": {"type": "object", "patternProperties": {"a": STRING}},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$id": {"$id": "http://example.com/other", "type": "string"},
}
PLACES: dict[str, Any] = {
    "prefixItems": lambda inner: {"type": "array", "prefixItems": [STRING, inner]},
    "unevaluatedItems": lambda inner: {"type": "array", "unevaluatedItems": inner},
    "unevaluatedProperties": lambda inner: {"type": "object", "unevaluatedProperties": inner},
    "dependentSchemas": lambda inner: {"type": "object", "dependentSchemas": {"b": inner}},
    "$defs": lambda inner: {"type": "object", "$defs": {"b": inner}},
    "contains": lambda inner: {"type": "array", "contains": inner},
    "not": lambda inner: {"type": "string", "not": inner},
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("place", PLACES)
def test_what_would_fail_at_a_call_is_refused_wherever_it_stands(kind: str, place: str):
    schema = {"type": "object", "properties": {"a": PLACES[place](BROKEN[kind])}}
    problem = parameters_problem(schema)
    assert problem is not None
    assert problem.path[:3] == ("properties", "a", place)


def test_a_loop_through_dependent_schemas_is_refused():
    node = {"type": "object", "dependentSchemas": {"b": {"$ref": "#/$defs/n"}}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": node}}
    problem = parameters_problem(schema)
    assert problem is not None and "leads back to itself" in problem.problem


def test_a_pattern_too_deep_to_compile_is_refused():
    deep = "(" * 2000 + "a" + ")" * 2000
    problem = parameters_problem(obj(properties={"a": {"type": "string", "pattern": deep}}))
    assert problem is not None and "too deeply" in problem.problem
