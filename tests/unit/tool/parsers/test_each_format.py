"""What is peculiar to a format: its slips, and what they may mean."""

from __future__ import annotations

import pytest

from agentrl.errors import RegistryError
from agentrl.testing.call_forms import TOOLS
from agentrl.tool.parsers import ParsedTurn, TurnContext, make_parser, parser_registry
from agentrl.types import ToolCall

CONTEXT = TurnContext.of(TOOLS)


def parse(name: str, text: str) -> ParsedTurn:
    return make_parser(name).parse(text, CONTEXT)


def one(name: str, text: str) -> ToolCall:
    (call,) = parse(name, text).tool_calls
    return call


NOW = ToolCall(name="now", arguments={})
SEARCH = ToolCall(name="search", arguments={"query": "x"})


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "hermes",
            '<tool_call>\n```json\n{"name": "now", "arguments": {}}\n```\n</tool_call>',
            NOW,
        ),
        ("qwen3_coder", "So:\n\n<function=now>\n</function>\n</tool_call>", NOW),
        ("qwen3_coder", "<tool_call><function=now></function></tool_call>", NOW),
        (
            "qwen3_coder",
            "<tool_call>\n<function=search>\n<parameter=query>\nx\n</function>\n</tool_call>",
            SEARCH,
        ),
        ("llama3_json", '  {"name": "now", "parameters": {}}', NOW),
        ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', NOW),
        ("llama3_json", '<|python_tag|>{"name": "search", "arguments": {"query": "x"}}', SEARCH),
        ("llama3_json", '{"name": "search", "parameters": "{\\"query\\": \\"x\\"}"}', SEARCH),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abcdefghi"}]', NOW),
        ("mistral", '[TOOL_CALLS]{"name": "now", "arguments": {}}', NOW),
        ("mistral", '[TOOL_CALLS]search[CALL_ID]abc12[ARGS]{"query": "x"}', SEARCH),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": "{}"}]', NOW),
        (
            "harmony",
            ' to=functions.search<|channel|>commentary json<|message|>{"query": "x"}<|call|>',
            SEARCH,
        ),
        ("harmony", "<|start|>assistant<|channel|>commentary to=now<|message|>{}", NOW),
        ("deepseek", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>", NOW),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{}<｜tool▁call▁end｜>", NOW),
        ("glm", "<tool_call>now</tool_call>", NOW),
        (
            "glm",
            "<tool_call>search\\n<arg_key>query</arg_key>\\n<arg_value>x</arg_value>\\n</tool_call>",
            SEARCH,
        ),
        ("kimi_k2", "<|tool_call_begin|>now:3<|tool_call_argument_begin|>{}<|tool_call_end|>", NOW),
        ("kimi_k2", "<|tool_call_begin|> functions.now <|tool_call_argument_begin|> {}", NOW),
        (
            "minimax",
            "<minimax:tool_call><invoke name='search'><parameter name=\"query\">\nx\n</parameter>"
            "</invoke></minimax:tool_call>",
            SEARCH,
        ),
    ],
)
def test_slips_that_mean_one_thing_only_are_accepted(name: str, text: str, expected: ToolCall):
    assert one(name, text) == expected


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("qwen3_coder", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "<function="),
        ("qwen3_coder", "<tool_call></tool_call>", "empty"),
        (
            "qwen3_coder",
            "<tool_call><function=search><parameter=query>x</tool_call>",
            "'query' is not closed",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=search><parameter=query>x</parameter><parameter=query>y"
            "</parameter></function></tool_call>",
            "given twice",
        ),
        ("qwen3_coder", "<tool_call><function=now>query: x</function></tool_call>", "other text"),
        ("llama3_json", '<|python_tag|>search.call(query="x")', '"parameters"'),
        ("llama3_json", '{"name": "now", "parameters": [1]}', "must be an object, got a list"),
        ("mistral", "[TOOL_CALLS]now", "no valid JSON"),
        ("mistral", "[TOOL_CALLS]", "no tool call follows"),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}} and', "not closed"),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>now()", "commentary to="),
        ("harmony", "<|channel|>analysis to=functions.now<|message|>{}", "analysis channel"),
        ("harmony", "<|channel|>commentary to=functions.<|message|>{}", "not name its function"),
        ("deepseek", "<｜tool▁call▁begin｜>now{}<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>[]<｜tool▁call▁end｜>", "got a list"),
        ("glm", '<tool_call>{"name": "now"}</tool_call>', "no name"),
        ("glm", "<tool_call>search<arg_key>query</arg_key></tool_call>", "other text"),
        ("kimi_k2", "<|tool_call_begin|>3<|tool_call_argument_begin|>{}", "name its function"),
        ("minimax", "<minimax:tool_call>now()</minimax:tool_call>", "does not follow"),
        ("minimax", "<tool_calls></tool_calls>", "empty"),
        ("minimax", '<tool_calls>\n{"name": "now", "parameters": {}}\n</tool_calls>', "has no"),
    ],
)
def test_what_could_mean_something_else_is_told_so(name: str, text: str, told: str):
    call = parse(name, text).tool_calls[-1]
    assert call.error is not None and told in call.error


def test_an_answer_in_json_is_no_llama_call():
    for text in ('{"answer": 5}', '{"name": "Bob"}', '{"name": "Bob", "age": 5', "{not json"):
        assert parse("llama3_json", text) == ParsedTurn(content=text, tool_calls=())


def test_llama_calls_only_where_its_words_begin():
    text = 'So: {"name": "now", "parameters": {}}'
    assert parse("llama3_json", text).tool_calls == ()
    thought = '<think>hm</think>\n\n{"name": "now", "parameters": {}}'
    assert parse("llama3_json", thought).tool_calls == (NOW,)


def test_a_bare_function_in_a_code_fence_is_an_example():
    text = "Write:\n```\n<function=now>\n</function>\n```\nDone."
    assert parse("qwen3_coder", text) == ParsedTurn(content=text, tool_calls=())


def test_harmony_content_is_what_the_user_reads():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
        "It is 4."
    )
    assert parse("harmony", text) == ParsedTurn(content="It is 4.", tool_calls=())


def test_harmony_takes_nothing_from_another_role():
    text = "<|start|>user<|channel|>commentary to=functions.now<|message|>{}<|end|>"
    assert parse("harmony", text).tool_calls == ()
    unstarted = "<|channel|>analysis<|message|>a<|end|>to=functions.now<|message|>{}"
    assert parse("harmony", unstarted).tool_calls == ()


def test_control_tokens_in_a_json_string_end_nothing():
    for name, text in {
        "harmony": '<|channel|>commentary to=functions.search<|message|>{"query": "<|call|>"}',
        "deepseek": '<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "<｜tool▁call▁end｜>"}',
        "hermes": '<tool_call>{"name": "search", "arguments": {"query": "</think>"}}</tool_call>',
    }.items():
        call = one(name, text)
        assert call.error is None and call.arguments["query"][:1] == "<"


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax"])
def test_text_stays_text_where_the_tool_is_unknown_and_fits_its_schema_where_not(name: str):
    write = {
        "qwen3_coder": "<tool_call><function={0}><parameter={1}>{2}</parameter></function>"
        "</tool_call>",
        "glm": "<tool_call>{0}<arg_key>{1}</arg_key><arg_value>{2}</arg_value></tool_call>",
        "minimax": '<minimax:tool_call><invoke name="{0}"><parameter name="{1}">{2}</parameter>'
        "</invoke></minimax:tool_call>",
    }[name]
    assert one(name, write.format("search", "limit", "5")).arguments == {"limit": 5}
    assert one(name, write.format("search", "query", "5")).arguments == {"query": "5"}
    assert one(name, write.format("search", "exact", "True")).arguments == {"exact": True}
    assert one(name, write.format("search", "limit", "five")).arguments == {"limit": "five"}
    unknown = one(name, write.format("other", "x", "5")).arguments
    assert unknown == {"x": 5 if name == "glm" else "5"}


def test_parsers_are_named_and_close_matches_listed():
    assert "qwen3_coder" in parser_registry.names()
    with pytest.raises(RegistryError, match="kimi_k2"):
        make_parser("kimi_k3")


def test_a_parser_must_say_what_ends_a_turn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("class Parser:\n    def parse(self, text): ...\n")
    with pytest.raises(RegistryError, match="has no tuple stop_tokens"):
        make_parser("./mine.py:Parser")
