"""Our parsers beside SGLang's (``llm-router-utils``) and the families' own encoders.

On turns that are well formed, the two read the same calls, but for one class of turns: arguments
that are written as plain text. Where the schema says string, a text that spells a literal of
another kind (``null``, ``true``, ``'q'``) is a string here, as the template wrote it; SGLang's
parsers turn ``null`` into None whatever the schema says, and GLM's reads every text as JSON or as
a Python literal first.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import random
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentrl.testing.call_forms import CALL_FORMS, TOOLS, random_call
from agentrl.tool.parsers import TurnContext, make_parser
from agentrl.types import ToolCall

NUM_TURNS = 5_000 if os.environ.get("AGENTRL_SOAK") else 400
CONTEXT = TurnContext.of(TOOLS)
SGLANG = "llm_router_utils.sglang.srt"
ORACLES = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3_json": "llama3",
    "mistral_list": "mistral",
    "mistral_args": "mistral",
    "harmony": "gpt-oss",
    "deepseek_v3": "deepseekv3",
    "deepseek_v31": "deepseekv31",
    "glm45": "glm45",
    "glm47": "glm47",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax-m2",
}
"""Form to SGLang's name; it has no parser of MiniMax-M1."""
WRITTEN_AS_TEXT = {"qwen3_coder", "glm45", "glm47", "minimax_m2"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def oracle(name: str, text: str) -> list[ToolCall]:
    protocol = import_module(f"{SGLANG}.entrypoints.openai.protocol")
    parsing = import_module(f"{SGLANG}.function_call.function_call_parser")
    tools = [protocol.Tool.model_validate(tool) for tool in TOOLS]
    if name == "harmony":  # it wants the header that the prompt wrote, and the stop token
        text = f"<|start|>assistant{text}<|call|>"
    _, calls = parsing.FunctionCallParser(tools, ORACLES[name]).parse_non_stream(text)
    return [ToolCall(name=str(c.name), arguments=json.loads(c.parameters)) for c in calls]


def has_literal_string(calls: Sequence[ToolCall]) -> bool:
    return any(is_literal(v) for call in calls for v in call.arguments.values())


def is_literal(value: Any) -> bool:
    """Whether a string is also JSON or a Python literal, as a whole."""
    if not isinstance(value, str):
        return False
    for read in (json.loads, ast.literal_eval):
        try:
            read(value)
            return True
        except (ValueError, SyntaxError):
            continue
    return False


@pytest.mark.parametrize("name", ORACLES)
def test_well_formed_turns_are_read_as_by_the_oracle(name: str):
    form, rng = CALL_FORMS[name], random.Random(name)
    parser = make_parser(form.parser)
    num_disagreements = 0
    for _ in range(NUM_TURNS):
        calls = [random_call(rng) for _ in range(1 if form.single else rng.randint(1, 3))]
        text = form.write(calls)
        assert list(parser.parse(text, CONTEXT).tool_calls) == calls, text
        if oracle(name, text) != calls:
            num_disagreements += 1
            assert name in WRITTEN_AS_TEXT and has_literal_string(calls), text
    assert num_disagreements < 0.01 * NUM_TURNS


@pytest.mark.parametrize("version", ["v2", "v3", "v7", "tekken"])
def test_what_mistrals_own_encoder_writes_is_read_back(version: str):
    messages = import_module("mistral_common.protocol.instruct.messages")
    tool_calls = import_module("mistral_common.protocol.instruct.tool_calls")
    keep = import_module("mistral_common.tokens.tokenizers.base").SpecialTokenPolicy.KEEP
    tokenizers = import_module("mistral_common.tokens.tokenizers.mistral")
    is_tekken = version == "tekken"
    make = getattr(tokenizers.MistralTokenizer, "v3" if is_tekken else version)
    encoder = make(**({"is_tekken": True} if is_tekken else {})).instruct_tokenizer
    parser, rng = make_parser("mistral"), random.Random(version)
    for _ in range(NUM_TURNS // 10):
        calls = [random_call(rng) for _ in range(rng.randint(1, 3))]
        written = [
            tool_calls.ToolCall(
                id=f"call{index:05d}",
                function=tool_calls.FunctionCall(
                    name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False)
                ),
            )
            for index, call in enumerate(calls)
        ]
        message = messages.AssistantMessage(content=None, tool_calls=written)
        ids = encoder.encode_assistant_message(message, False)
        decode = encoder.tokenizer.decode
        text = decode(ids, special_token_policy=keep).removesuffix("</s>")
        if not is_tekken:  # it spells pieces: "▁" is a space
            text = text.replace("▁", " ")
            calls = [
                c for c in calls if "🙂" not in str(c.arguments) and "北" not in str(c.arguments)
            ]
        assert [c for c in parser.parse(text).tool_calls if c in calls] == calls


@pytest.mark.skipif(find_spec("litellm") is None, reason="litellm has the vocabulary of gpt-oss")
def test_what_harmonys_own_encoder_writes_is_read_back(tmp_path: Path, monkeypatch: Any):
    spec = find_spec("litellm")
    assert spec is not None and spec.origin is not None
    ranks = Path(spec.origin).parent / "litellm_core_utils/tokenizers"
    link = tmp_path / "o200k_base.tiktoken"
    link.symlink_to(ranks / "fb374d419588a4632f3f557e76b4b70aebbca790")
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    harmony = import_module("openai_harmony")
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    parser, rng = make_parser("harmony"), random.Random(0)
    for _ in range(NUM_TURNS // 10):
        call = random_call(rng)
        body = json.dumps(call.arguments, ensure_ascii=False)
        said = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, body)
        said = said.with_channel("commentary").with_recipient(f"functions.{call.name}")
        thought = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, "Let me see.")
        ids = [
            *encoding.render(thought.with_channel("analysis")),
            *encoding.render(said.with_content_type("<|constrain|>json")),
        ]
        text = encoding.decode(ids).removeprefix("<|start|>assistant")
        assert text.endswith("<|call|>")
        assert parser.parse(text.removesuffix("<|call|>")).tool_calls == (call,)
