"""What every parser must do with a turn of its own format, as its family writes it."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.testing.call_forms import CALL_FORMS, TOOLS, random_call
from agentrl.tool.parsers import FORMATS, ParsedTurn, TurnContext, make_parser
from agentrl.types import ToolCall

CONTEXT = TurnContext.of(TOOLS)
IN_THOUGHT = TurnContext.of(TOOLS, in_thought=True)
SEARCH = ToolCall(name="search", arguments={"query": "a river", "limit": 3})
NOW = ToolCall(name="now", arguments={})
every_form = pytest.mark.parametrize("name", CALL_FORMS)


def parse(name: str, text: str, context: TurnContext = CONTEXT) -> ParsedTurn:
    return make_parser(CALL_FORMS[name].parser).parse(text, context)


def test_every_format_has_a_form():
    assert {form.parser for form in CALL_FORMS.values()} == set(FORMATS)


@every_form
@given(seed=st.integers(0, 2**32))
def test_calls_come_back_as_they_were_written(name: str, seed: int):
    form, rng = CALL_FORMS[name], random.Random(seed)
    calls = [random_call(rng) for _ in range(1 if form.single else rng.randint(1, 4))]
    assert list(parse(name, form.write(calls)).tool_calls) == calls


@every_form
def test_text_without_calls_is_content_as_it_is(name: str):
    assert parse(name, "  3 < 4, {1} [2]\n") == ParsedTurn(
        content="  3 < 4, {1} [2]\n", tool_calls=()
    )


@every_form
def test_a_thought_before_a_call_is_passed_over(name: str):
    form = CALL_FORMS[name]
    opened, closed = form.thought
    text = f"{opened}I {form.write([NOW])} will{closed}{form.write([SEARCH])}"
    calls = parse(name, text).tool_calls
    # A call among Harmony's messages is told that it is not run.
    assert calls == (SEARCH,) or (name == "harmony" and calls[-1] == SEARCH)


@every_form
def test_nothing_in_a_thought_is_a_call(name: str):
    form = CALL_FORMS[name]
    opened, closed = form.thought
    inner = form.write([SEARCH])
    assert not executed(parse(name, f"{opened}{inner}{closed}Done."))
    assert not executed(parse(name, f"{opened}{inner}"))  # cut off while thinking
    if name == "harmony":
        return
    # The prompt had opened the thought.
    assert not executed(parse(name, inner, IN_THOUGHT))
    assert not executed(parse(name, f"{inner}{closed}Done.", IN_THOUGHT))
    assert not executed(parse(name, f"{inner}{closed}Done."))
    assert parse(name, f"{inner}{closed}{form.write([NOW])}", IN_THOUGHT).tool_calls == (NOW,)


def executed(turn: ParsedTurn) -> list[ToolCall]:
    return [call for call in turn.tool_calls if call.error is None]


@pytest.mark.parametrize("name", [name for name in CALL_FORMS if name != "harmony"])
def test_a_thought_stays_in_the_content_word_for_word(name: str):
    opened, closed = CALL_FORMS[name].thought
    text = f"{opened}call {CALL_FORMS[name].write([SEARCH])}?{closed}No."
    assert parse(name, text) == ParsedTurn(content=text, tool_calls=())


@every_form
def test_text_before_calls_is_content(name: str):
    form = CALL_FORMS[name]
    said = "I shall look it up.\n"
    before = "<|channel|>commentary<|message|>I shall look it up.<|end|><|start|>assistant"
    text = (before if name == "harmony" else said) + form.write([SEARCH])
    if name == "llama3_json":
        text = f"{said}<|python_tag|>{form.write([SEARCH])}"
    assert parse(name, text) == ParsedTurn(content=said.strip(), tool_calls=(SEARCH,))


TAILS = {
    "hermes": "\n</tool_call>",
    "qwen3_coder": "</function>\n</tool_call>",
    "mistral_list": "]",
    "deepseek_v3": "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁end｜>",
    "glm45": "</tool_call>",
    "glm47": "</tool_call>",
    "kimi_k2": "<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m1": "</tool_calls>",
    "minimax_m2": "</invoke>\n</minimax:tool_call>",
}


@pytest.mark.parametrize("name", TAILS)
def test_closing_tags_may_be_missing_where_the_turn_ends(name: str):
    text = CALL_FORMS[name].write([SEARCH])
    assert text.endswith(TAILS[name])
    assert parse(name, text.removesuffix(TAILS[name])).tool_calls == (SEARCH,)


@every_form
def test_a_call_that_breaks_off_is_told_the_right_form(name: str):
    text = CALL_FORMS[name].write([SEARCH])
    (call,) = parse(name, text[: text.index("river")]).tool_calls
    assert call.error is not None and "write " in call.error
    marker = {
        "hermes": '"arguments"',
        "llama3_json": '"parameters"',
        "harmony": "commentary to=functions.name",
        "deepseek_v3": "<｜tool▁sep｜>",
        "deepseek_v31": "<｜tool▁sep｜>",
        "kimi_k2": "functions.name:0",
    }
    assert marker.get(name, CALL_FORMS[name].controls[0]) in call.error
    assert len(call.error) < 400 and call.arguments == {}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": -Infinity}', "-Infinity is no JSON number"),
        ('{"a": 1e999}', "too large"),
        ('{"a": ' + "9" * 5000 + "}", "JSON"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ('{"a":' * 1000 + "1" + "}" * 1000, "nested"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"a": 1,}', "JSON"),
        ("{'a': 1}", "JSON"),
    ],
    ids=range(10),
)
@every_form
def test_json_that_could_mean_two_things_is_refused(name: str, value: str, told: str):
    form = CALL_FORMS[name]
    text = form.write([ToolCall(name="run_code", arguments={"env": {"here": 1}})])
    if '{"here": 1}' not in text:
        pytest.fail(f"the form {name} writes objects otherwise")
    calls = parse(name, text.replace('{"here": 1}', value)).tool_calls
    assert not [call for call in calls if call.error is None]
    assert told in (calls[0].error or "")


ONE_LIST = {"mistral_list", "minimax_m1", "llama3_json", "harmony"}


@pytest.mark.parametrize("name", [name for name in CALL_FORMS if name not in ONE_LIST])
def test_a_good_call_after_a_broken_one_still_runs(name: str):
    form = CALL_FORMS[name]
    broken = form.write([SEARCH]).replace("search", "").replace("function=", "functio=")
    calls = parse(name, broken + "\n" + form.write([NOW])).tool_calls
    assert calls[0].error is not None and calls[-1] == NOW


@every_form
def test_a_form_quoted_in_prose_without_its_marker_is_no_call(name: str):
    form = CALL_FORMS[name]
    arguments = json.dumps({"name": "now", "arguments": {}, "parameters": {}})
    for fence in ("```json\n", "```xml\n"):
        quoted = f"Write this:\n{fence}{arguments}\n<function=now>\n</function>\n```\n"
        assert parse(name, quoted) == ParsedTurn(content=quoted, tool_calls=())
    assert form.write([NOW]) not in quoted
