"""Which parser is chosen for a template, what is refused, and what ends a turn."""

from __future__ import annotations

import pytest
from chat_tokenizers import with_template

from agentrl.agent.call_format import choose_parser, opens_thought, stop_token_ids
from agentrl.agent.renderer import Renderer
from agentrl.errors import ConfigError
from agentrl.testing import make_tokenizer
from agentrl.testing.call_forms import TOOLS
from agentrl.tool.parsers import TurnContext, make_parser
from agentrl.types import Message

FRAME = """
{%- for message in messages %}
    {{- '<s>' + message.role + ' ' + (message.tool_call_id or '') + message.content }}
    {%- if message.role == 'system' or loop.first %}{{- (tools or '') | tojson }}{%- endif %}
    {%- if message.tool_calls %}CALLS{%- endif %}
    {{- '</s>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<s>assistant ' }}{%- endif %}
"""
CALLS = {
    "kimi_k2": "{{- '<|tool_calls_section_begin|>' }}{%- for call in message.tool_calls %}"
    "{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}"
    "{{- (call.function.arguments | tojson) + '<|tool_call_end|>' }}{%- endfor %}"
    "{{- '<|tool_calls_section_end|>' }}",
    "mistral": "{{- '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}"
    "{%- if call.id | length != 9 %}{{- raise_exception('nine letters') }}{%- endif %}"
    '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) + ', \"id\": \"' + call.id + '\"}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}",
    "minimax": "{{- '<minimax:tool_call>\\n' }}{%- for call in message.tool_calls %}"
    "{{- '<invoke name=\"' + call.function.name + '\">\\n' }}"
    "{%- for key, value in call.function.arguments.items() %}"
    "{{- '<parameter name=\"' + key + '\">' }}"
    "{{- (value if value is string else value | tojson) + '</parameter>\\n' }}{%- endfor %}"
    "{{- '</invoke>\\n' }}{%- endfor %}{{- '</minimax:tool_call>' }}",
    "unheard_of": "{{- '@call ' + message.tool_calls[0].function.name }}",
    "silent": "",
}


def renderer(calls: str) -> Renderer:
    template = FRAME.replace("CALLS", CALLS[calls])
    return Renderer(with_template(template, special=("<s>", "</s>", "<|eom_id|>"), eos="</s>"))


@pytest.mark.parametrize("name", ["kimi_k2", "mistral", "minimax"])
def test_the_parser_that_reads_what_the_template_writes_is_chosen(name: str):
    chosen = choose_parser(renderer(name), TOOLS)
    assert type(chosen) is type(make_parser(name))


def test_the_embedded_models_template_is_hermes():
    chosen = choose_parser(Renderer(make_tokenizer()), TOOLS)
    assert type(chosen) is type(make_parser("hermes"))


def test_an_unknown_form_is_refused_with_what_it_writes_and_what_to_set():
    with pytest.raises(ConfigError, match=r"'@call probe_tool'.*no parser.*set it to the format"):
        choose_parser(renderer("unheard_of"), TOOLS)


def test_a_template_that_drops_calls_needs_a_parser_by_name():
    with pytest.raises(ConfigError, match="does not show the calls.*qwen3_coder"):
        choose_parser(renderer("silent"), TOOLS)
    chosen = choose_parser(renderer("silent"), TOOLS, "qwen3_coder")
    assert type(chosen) is type(make_parser("qwen3_coder"))


def test_a_parser_that_the_template_contradicts_is_refused():
    with pytest.raises(ConfigError, match="'hermes' does not read.*'kimi_k2' does"):
        choose_parser(renderer("kimi_k2"), TOOLS, "hermes")


def test_without_tools_every_turn_is_text():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert choose_parser(renderer("silent"), []).parse(text).tool_calls == ()


def test_kimis_ids_name_the_function_and_its_results():
    message: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {}}}],
    }
    _, text = renderer("kimi_k2").encode_answer(message, TOOLS)
    assert "functions.now:0" in text
    (call,) = make_parser("kimi_k2").parse(text, TurnContext.of(TOOLS)).tool_calls
    assert call.name == "now"


def test_stop_tokens_of_the_format_are_added_where_the_tokenizer_has_them():
    made = renderer("silent")
    controls = made.codec.control_tokens
    ids = stop_token_ids(made, make_parser("llama3_json"))
    assert set(ids) == {controls["</s>"], controls["<|eom_id|>"]}
    assert stop_token_ids(made, make_parser("hermes")) == made.stop_token_ids


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|assistant|>[THINK]", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("a page that says <think>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_a_prompt_opens_a_thought_only_at_its_very_end(prompt: str, expected: bool):
    assert opens_thought(prompt) is expected
