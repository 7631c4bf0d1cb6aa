"""The Hermes parser: right on good calls, never raising on anything."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import RegistryError
from agentrl.tool.parsers import make_parser
from agentrl.types import ToolCall

PARSER = make_parser("hermes")


def wrap(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def one(text: str) -> ToolCall:
    parsed = PARSER.parse(text)
    assert len(parsed.tool_calls) == 1
    return parsed.tool_calls[0]


def test_text_without_calls_is_content_as_it_is():
    parsed = PARSER.parse("  just text\n")
    assert (parsed.content, parsed.tool_calls) == ("  just text\n", ())


def test_a_call_and_the_text_around_it():
    parsed = PARSER.parse("Let me see.\n" + wrap('{"name": "f", "arguments": {"x": 1}}'))
    assert parsed.content == "Let me see."
    assert parsed.tool_calls == (ToolCall(name="f", arguments={"x": 1}),)


def test_several_calls_in_order():
    text = wrap('{"name": "f", "arguments": {}}') + "\n" + wrap('{"name": "g", "arguments": {}}')
    assert [call.name for call in PARSER.parse(text).tool_calls] == ["f", "g"]


def test_tags_inside_a_string_are_part_of_the_string():
    code = "print('<tool_call></tool_call>')"
    call = one(wrap(json.dumps({"name": "f", "arguments": {"code": code}})))
    assert call.error is None and call.arguments == {"code": code}


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {}}',
        '<tool_call>\n{"arguments": {}, "name": "f"}\n',
        wrap('{"name": "f"}'),
        wrap('{\n "name":"f",\n "arguments":{}\n}'),
    ],
)
def test_forms_that_mean_one_thing_only_are_accepted(text: str):
    assert one(text) == ToolCall(name="f", arguments={})


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('{"name": "f", "arguments": {"x": 1}', "no valid JSON"),
        ('{"name": "f", "arguments": {"x": 1,}}', "no valid JSON"),
        ("{'name': 'f', 'arguments': {}}", "no valid JSON"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is no JSON number"),
        ('{"name": "f", "arguments": {"x": -Infinity}}', "-Infinity is no JSON number"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "too large"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "no valid JSON"),
        ('{"name": "f", "arguments": {"x": 1, "x": 2}}', "'x' is given twice"),
        ('{"name": "f", "name": "g", "arguments": {}}', "'name' is given twice"),
        ('{"name": "f", "arguments": ' + '{"a":' * 1000 + "1" + "}" * 1000 + "}", "nested"),
        ('{"name": "f", "arguments": ' + "[" * 100_000, "no valid JSON"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "surrogate"),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', "must be an object, got a string"),
        ('{"name": "f", "arguments": [1]}', "must be an object, got a list"),
        ('{"name": "f", "arguments": null}', "must be an object, got null"),
        ('{"arguments": {}}', "no name"),
        ('{"name": 5, "arguments": {}}', "no name"),
        ('{"name": "", "arguments": {}}', "no name"),
        ('{"name": "f", "parameters": {}}', "has no 'parameters'"),
        ('["f", {}]', "got a list"),
        ("5", "got a number"),
        ("", "no valid JSON"),
        ('{"name": "f", "arguments": {}} and more', "text follows"),
        ('{"name": "f", "arguments": {}}{"name": "g"}', "text follows"),
    ],
)
def test_a_broken_call_says_what_is_wrong(body: str, told: str):
    call = one(wrap(body))
    assert call.error is not None and told in call.error
    assert call.arguments == {}
    assert len(call.error) < 300


def test_a_call_without_its_end_is_told_so():
    assert "no </tool_call>" in (one('<tool_call>\n{"name": "f", "argu').error or "")


def test_a_good_call_after_a_broken_one_still_runs():
    text = wrap("{broken") + wrap('{"name": "f", "arguments": {}}')
    first, second = PARSER.parse(text).tool_calls
    assert first.error is not None and second == ToolCall(name="f", arguments={})


fragments = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {}}',
        "{",
        "}",
        '"',
        "[",
        "\\u",
        ",",
    ]
)


@given(st.lists(st.one_of(fragments, st.text(max_size=5)), max_size=12).map("".join))
def test_no_text_makes_the_parser_raise(text: str):
    parsed = PARSER.parse(text)
    assert isinstance(parsed.content, str)
    assert bool(parsed.tool_calls) == ("<tool_call>" in text)


plain = st.text(max_size=5)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), plain
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(plain, json_values, max_size=4))
def test_any_arguments_survive(arguments: dict):
    call = one(wrap(json.dumps({"name": "f", "arguments": arguments})))
    assert call.error is None and call.arguments == arguments


def test_an_unknown_parser_lists_close_matches():
    with pytest.raises(RegistryError, match="hermes"):
        make_parser("herms")
