"""What a model is told of arguments that do not fit: one sentence that says what would."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tool.schema import ArgumentValidator

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "line_start": {"type": "integer", "minimum": 1},
        "mode": {"enum": ["view", "edit", "search"]},
        "at": {
            "type": "object",
            "properties": {"row": {"type": "number"}},
            "required": ["row"],
            "additionalProperties": False,
        },
        "rows": {"type": "array", "items": {"type": ["number", "null"]}, "maxItems": 3},
        "any": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "number"}}]},
    },
    "required": ["path"],
}
VALIDATOR = ArgumentValidator(PARAMETERS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "missing argument 'path' (a string); got nothing"),
        ({"mode": "view"}, "missing argument 'path' (a string); got mode"),
        ({"path": 3}, "argument 'path' must be a string, got an integer: 3"),
        ({"path": None}, "argument 'path' must be a string, got null"),
        (
            {"path": "a", "line_start": "4"},
            "argument 'line_start' must be an integer, got a string: \"4\"",
        ),
        (
            {"path": "a", "line_start": True},
            "argument 'line_start' must be an integer, got a boolean: true",
        ),
        (
            {"path": "a", "line_start": 0},
            "argument 'line_start' must be at least 1, got an integer: 0",
        ),
        (
            {"path": "a", "mode": "veiw"},
            'argument \'mode\' must be one of "view", "edit", "search", got a string: "veiw" '
            '(did you mean "view"?)',
        ),
        (
            {"path": "a", "at": {}},
            "missing argument 'row' (a number) in argument 'at'; got nothing",
        ),
        (
            {"path": "a", "rows": [1, "2"]},
            "argument 'rows[1]' must be a number or null, got a string: \"2\"",
        ),
        (
            {"path": "a", "rows": [1, 2, 3, 4]},
            "argument 'rows' must have at most 3 items, got an array: [1, 2, 3, 4]",
        ),
        ({"path": "a", "any": 5}, "argument 'any' must be a string or an array, got an integer: 5"),
        (
            {"path": "a", "any": ["x"]},
            "argument 'any[0]' must be a number, got a string: \"x\"",
        ),
    ],
)
def test_the_sentence_names_the_argument_the_type_and_what_was_got(
    arguments: dict[str, Any], sentence: str
):
    assert VALIDATOR.problem(arguments) == sentence


def test_a_misspelt_name_gets_the_nearest_and_the_list():
    told = VALIDATOR.problem({"pth": "a", "LineStart": 2}) or ""
    assert "unknown arguments 'pth' (did you mean 'path'?), 'LineStart'" in told
    assert "did you mean 'line_start'?" in told
    assert "it takes 'path' (a string), 'line_start' (an integer, optional)" in told
    assert '\'mode\' ("view", "edit" or "search", optional)' in told


def test_a_tool_without_arguments_says_so():
    validator = ArgumentValidator({"type": "object", "properties": {}})
    assert validator.problem({"x": 1}) == "unknown argument 'x'; it takes none"


def test_what_fits_is_no_problem():
    assert VALIDATOR.problem({"path": "a", "mode": "edit", "at": {"row": 0.5}}) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*PARAMETERS["properties"], "x"]), json_values))
def test_whatever_a_model_writes_gets_a_short_sentence_or_none(arguments: dict[str, Any]):
    told = VALIDATOR.problem(arguments)
    assert told is None or 0 < len(told) < 600


def test_a_megabyte_of_argument_is_not_repeated():
    assert len(VALIDATOR.problem({"path": "a", "line_start": "9" * 2**20}) or "") < 300
