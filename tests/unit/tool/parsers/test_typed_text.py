"""Arguments written as text, typed by a schema."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.tool.parsers.typed_text import ParameterTypes, types_of


def value(schema: Any, text: str, **root: Any) -> Any:
    return ParameterTypes(schema={"properties": {"x": schema}, **root}).value("x", text)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, ' "a" ', ' "a" '),
        ({"type": "integer"}, " 5\n", 5),
        ({"type": "integer"}, "1e3", 1000),
        ({"type": "integer"}, "5.0", 5.0),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "-0.5", -0.5),
        ({"type": "number"}, "007", "007"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "TRUE", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nullable", "nullable"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": True}, "true", True),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"items": {}}, "[1]", [1]),
        ({"properties": {}}, "{}", {}),
        ({"type": ["array", "string"]}, "[1", "[1"),
        ({}, "5", "5"),
        (None, "5", "5"),
        ({"$ref": "#/$defs/N"}, "5", 5),
        ({"$ref": "#/$defs/loop"}, "5", "5"),
        ({"$ref": "http://x"}, "5", "5"),
    ],
)
def test_text_becomes_what_the_schema_says(schema: Any, text: str, expected: Any):
    definitions = {"N": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    got = value(schema, text, **{"$defs": definitions})
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1', "{} {}", '{"a": 1, "a": 1}'])
def test_an_object_that_is_no_json_is_refused(text: str):
    with pytest.raises(ValueError):
        value({"type": "object"}, text)


def test_schemas_that_are_none_say_nothing():
    for schema in (True, 5, "string", {"type": 5}, {"anyOf": [True]}, {"enum": []}):
        assert types_of(schema, {}) == set()
