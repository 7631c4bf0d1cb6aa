"""The renderer on downloaded tokenizers, where a person has some.

Set ``AGENTRL_TEST_TOKENIZERS`` to directories with a tokenizer and its chat template, separated by
colons.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from test_renderer import TOOL, answer, call, tool, user

from agentrl.agent.renderer import Renderer

PATHS = [path for path in os.environ.get("AGENTRL_TEST_TOKENIZERS", "").split(":") if path]
pytestmark = pytest.mark.skipif(not PATHS, reason="AGENTRL_TEST_TOKENIZERS is not set")


def load(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


@pytest.mark.parametrize("path", PATHS)
def test_the_first_prompt_is_the_one_shot_encoding(path: str):
    tokenizer = load(path)
    messages = [user("How much (is) 6*7?)\n")]
    expected = tokenizer.apply_chat_template(
        messages, tools=[TOOL], add_generation_prompt=True, return_dict=False
    )
    renderer = Renderer(tokenizer)
    assert renderer.begin(messages, [TOOL]).record.ids == expected


@pytest.mark.parametrize("path", PATHS)
def test_a_conversation_with_tools_has_no_drift_but_for_the_last_answer(path: str):
    renderer = Renderer(load(path))
    renderer.check([TOOL])
    conversation = renderer.begin([user("q <|im_end|>")], [TOOL])
    for said, reply in (
        (answer("", call("6 * 7")), tool("42)<|im_end|>")),
        (answer("42"), user("k")),
    ):
        conversation.append_taught(said)
        conversation.append(conversation.render_next(conversation.add_messages([reply])))
    assert conversation.verify() == []
