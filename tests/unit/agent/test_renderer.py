"""The renderer against chat templates with the habits of well-known families."""

from __future__ import annotations

from typing import Any

import pytest
from chat_tokenizers import llama3_like, mistral_like, qwen3_like, with_template
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.agent.renderer import Renderer
from agentrl.errors import RenderError
from agentrl.testing import CHATML_TEMPLATE, make_tokenizer
from agentrl.types import Generation, Message, StopReason, TokenRole

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
TOKENIZERS = {"chatml": make_tokenizer(), "qwen3": qwen3_like(), "llama3": llama3_like()}
RENDERERS = {name: Renderer(tokenizer) for name, tokenizer in TOKENIZERS.items()}

each_family = pytest.mark.parametrize("family", list(TOKENIZERS))

CONTROL_WORDS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "end|>", "<|", "|>", "<tool_call>",
    "</tool_call>", "<tool_response>", "<think>", "</think>", "<|head|>", "<|eot|>", "<|e", "ot|>",
)  # fmt: skip
texts = st.one_of(
    st.text(max_size=30),
    st.lists(
        st.one_of(st.sampled_from(CONTROL_WORDS), st.text(max_size=4), st.sampled_from("\n \t\"'")),
        max_size=8,
    ).map("".join),
).filter(lambda text: text.isprintable() or "\x85" not in text)


def call(expression: Any) -> dict[str, Any]:
    arguments = {"expression": expression}
    return {"type": "function", "function": {"name": "calculator", "arguments": arguments}}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str, *calls: dict[str, Any]) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    return message


def tool(text: str) -> Message:
    return {"role": "tool", "content": text, "name": "calculator"}


def template_text(family: str, messages: list[Message], tools: list[Any], **kwargs: Any) -> str:
    return RENDERERS[family].template.render(messages, tools, generation=False, **kwargs)


def template_controls(family: str, messages: list[Message], tools: list[Any]) -> list[int]:
    """Control ids that the template itself puts: every content replaced by a plain word."""
    plain = [{**message, "content": "x" if message["content"] else ""} for message in messages]
    text = RENDERERS[family].template.render(plain, tools, generation=True)  # pyright: ignore
    return [p for p in RENDERERS[family].codec.split_controls(text) if isinstance(p, int)]


# ------------------------------------------------------------------ the first prompt


@each_family
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["plain", "tools"])
def test_the_first_prompt_is_the_one_shot_encoding(family: str, tools: list[Any]):
    messages = [user("How much is 6 * 7?\nSay it twice.")]
    if family != "llama3":  # that template shows tools in the first message
        messages.insert(0, {"role": "system", "content": "Be brief."})
    expected = TOKENIZERS[family].apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, return_dict=False
    )
    assert RENDERERS[family].begin(messages, tools).record.ids == expected


@each_family
@settings(max_examples=60, deadline=None)
@given(content=texts.filter(bool))
def test_any_user_text_decodes_to_the_templates_text_and_adds_no_control_token(
    family: str, content: str
):
    renderer = RENDERERS[family]
    record = renderer.begin([user(content)]).record
    expected = renderer.template.render([user(content)], generation=True)
    assert renderer.decode(record.ids) == expected
    controls = [index for index in record.ids if index in renderer.codec.control_ids]
    assert controls == template_controls(family, [user(content)], [])


def test_roles_say_who_wrote_each_token_of_the_prompt():
    renderer = RENDERERS["chatml"]
    record = renderer.begin([{"role": "system", "content": "S"}, user("U")]).record
    said = {
        role: renderer.decode(
            [i for i, r in zip(record.ids, record.roles, strict=True) if r == role]
        )
        for role in TokenRole
    }
    assert said[TokenRole.SYSTEM] == "<|im_start|>system\nS<|im_end|>\n"
    assert said[TokenRole.USER] == "<|im_start|>user\nU<|im_end|>\n"
    assert said[TokenRole.ASSISTANT] == "<|im_start|>assistant\n"
    assert said[TokenRole.SAMPLED] == ""


# ------------------------------------------------------------------ whole conversations


def conversation_of(family: str, replies: list[str], expression: str) -> list[Message]:
    """User, call, tool answer, plain answer, user, answer: with the given tool and user texts."""
    second_call = [] if family == "llama3" else [call(1)]
    answers = [tool(replies[0])] + [tool("1")] * len(second_call)
    return [
        user("q"),
        answer("", call(expression), *second_call),
        *answers,
        answer("so it is"),
        user(replies[1] or "?"),
        answer("bye"),
    ]


@each_family
@settings(max_examples=40, deadline=None)
@given(replies=st.lists(texts, min_size=2, max_size=2), expression=texts)
def test_a_conversation_decodes_to_the_templates_text(
    family: str, replies: list[str], expression: str
):
    messages = conversation_of(family, replies, expression)
    ids, mask = RENDERERS[family].render_conversation(messages, [TOOL])
    text = RENDERERS[family].decode(ids)
    expected = template_text(family, messages, [TOOL])
    if family == "qwen3":  # its template writes an empty thought before the last answer only
        expected = expected.replace("<think>\n\n</think>\n\nbye", "bye")
    assert expected.startswith(text)
    assert expected[len(text) :].strip() == ""
    assert len(ids) == len(mask)
    stop = RENDERERS[family].codec.control_text[RENDERERS[family].stop_token_ids[0]]
    taught = RENDERERS[family].decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert taught.endswith(f"so it is{stop}bye{stop}")
    special = RENDERERS[family].codec.special_ids
    num_special = sum(index in special for index in ids)
    harmless = conversation_of(family, ["x" if replies[0] else "", "x"], "x")
    ids_harmless, _ = RENDERERS[family].render_conversation(harmless, [TOOL])
    assert num_special == sum(index in special for index in ids_harmless)


@each_family
def test_supervised_ids_are_what_the_loop_would_record(family: str):
    renderer = RENDERERS[family]
    messages = conversation_of(family, ["42", "and?"], "6 * 7")
    ids, mask = renderer.render_conversation(messages, [TOOL])
    conversation = renderer.begin(messages[:1], [TOOL])
    position = 1
    while True:
        said, _ = renderer.encode_answer(messages[position], [TOOL])
        num = len(said)
        conversation.append_turn(
            Generation(
                ids=said,
                logprobs=[-1.0] * num,
                policy_version=[3] * num,
                stop_reason=StopReason.STOP,
            )  # fmt: skip
        )
        conversation.add_answer(messages[position])
        following = []
        position += 1
        while position < len(messages) and messages[position]["role"] != "assistant":
            following.append(messages[position])
            position += 1
        if position == len(messages):
            break
        conversation.append(conversation.render_next(conversation.add_messages(following)))
    segment = conversation.record.to_segment()
    assert segment.ids.tolist() == ids
    assert segment.loss_mask.tolist() == mask
    assert set(segment.policy_version[segment.loss_mask].tolist()) == {3}


def test_a_turn_cut_by_length_gets_its_stop_token_as_context():
    renderer = RENDERERS["chatml"]
    conversation = renderer.begin([user("q")])
    said = renderer.codec.encode_assistant("half a sen")
    conversation.append_turn(
        Generation(
            ids=said,
            logprobs=[-1.0] * len(said),
            policy_version=[0] * len(said),
            stop_reason=StopReason.LENGTH,
        )  # fmt: skip
    )
    conversation.add_answer(answer("half a sen"))
    conversation.append(conversation.render_next(conversation.add_messages([user("go on")])))
    segment = conversation.record.to_segment()
    assert renderer.decode(segment.ids[segment.loss_mask].tolist()) == "half a sen"
    after = segment.ids[int(segment.loss_mask.nonzero()[0][-1]) + 1]
    assert after == renderer.stop_token_ids[0]
    assert conversation.verify() == []


def test_examples_in_the_first_messages_are_context_not_samples():
    renderer = RENDERERS["chatml"]
    record = renderer.begin([user("1+1?"), answer("2"), user("2+2?")]).record
    assert not record.to_segment().loss_mask.any()
    assert "assistant\n2<|im_end|>" in renderer.decode(record.ids)


# ------------------------------------------------------------------ drift


def said_verbatim(renderer: Renderer, text: str, message: Message, reply: Message):
    conversation = renderer.begin([user("q")], [TOOL])
    ids = [*renderer.codec.encode_assistant(text), renderer.stop_token_ids[0]]
    conversation.append_turn(
        Generation(
            ids=ids,
            logprobs=[-1.0] * len(ids),
            policy_version=[0] * len(ids),
            stop_reason=StopReason.STOP,
        )  # fmt: skip
    )
    conversation.add_answer(message)
    conversation.append(conversation.render_next(conversation.add_messages([reply])))
    return conversation


def test_a_call_written_with_other_white_space_is_kept_and_counted_as_drift():
    text = '<tool_call>{"arguments": {"expression": "1"},"name":"calculator"}</tool_call>'
    conversation = said_verbatim(RENDERERS["chatml"], text, answer("", call("1")), tool("1"))
    samples = conversation.verify()
    assert [sample.turn for sample in samples] == [0]
    assert text in samples[0].written
    assert '{"name": "calculator"' in samples[0].template
    assert not samples[0].in_context
    assert text in RENDERERS["chatml"].decode(conversation.record.ids)


def test_a_thought_that_the_template_strips_later_stays_in_the_record_as_drift():
    renderer = RENDERERS["qwen3"]
    text = "<think>\nhm\n</think>\n\nfour"
    conversation = said_verbatim(renderer, text, answer(text), user("sure?"))
    assert [sample.turn for sample in conversation.verify()] == [0]
    assert text in renderer.decode(conversation.record.ids)


def test_a_thought_before_a_tool_answer_is_no_drift():
    renderer = RENDERERS["qwen3"]
    thought = "<think>\nhm\n</think>\n\n"
    text = thought + '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n'
    text += "</tool_call>"
    message = answer("<think>\nhm\n</think>", call("1"))
    conversation = said_verbatim(renderer, text, message, tool("1"))
    assert conversation.verify() == []


def test_an_empty_thought_of_the_header_stays_in_the_record_and_is_no_drift():
    renderer = Renderer(qwen3_like(), template_kwargs={"enable_thinking": False})
    conversation = renderer.begin([user("q")])
    assert renderer.decode(conversation.record.ids).endswith("<think>\n\n</think>\n\n")
    conversation.append_taught(answer("a"))
    conversation.append(conversation.render_next(conversation.add_messages([user("r")])))
    conversation.append_taught(answer("b"))
    assert conversation.verify() == []
    assert renderer.decode(conversation.record.ids).count("<think>") == 2


@each_family
def test_a_family_is_not_refused_with_or_without_tools(family: str):
    RENDERERS[family].check()
    RENDERERS[family].check([TOOL])


def test_tools_work_with_thinking_switched_off():
    renderer = Renderer(qwen3_like(), template_kwargs={"enable_thinking": False})
    renderer.check([TOOL])
    messages = [user("q"), answer("", call("1")), tool("1"), answer("one")]
    ids, mask = renderer.render_conversation(messages, [TOOL])
    taught = renderer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert taught.startswith("<tool_call>\n") and taught.endswith("one<|im_end|>")


# ------------------------------------------------------------------ refusals


def refused(tokenizer: Any, *, tools: list[Any] | None = None) -> str:
    with pytest.raises(RenderError) as caught:
        Renderer(tokenizer).check(tools or [])
    return str(caught.value)


def test_no_chat_template_is_refused_with_what_to_set():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    assert "tokenizer.chat_template" in refused(tokenizer)


def test_no_end_of_sequence_token_is_refused_with_what_to_set():
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    assert "tokenizer.eos_token" in refused(tokenizer)


def test_a_template_that_moves_its_tools_is_refused_only_where_tools_are_used():
    renderer = Renderer(mistral_like())
    with pytest.raises(RenderError, match="only appends"):
        renderer.check([TOOL])


def test_a_template_that_ignores_tools_is_refused():
    template = CHATML_TEMPLATE.replace("{%- if tools %}", "{%- if false %}")
    assert "does not show the tool 'calculator'" in refused(with_template(template), tools=[TOOL])


def test_a_template_that_drops_tool_answers_is_refused():
    template = CHATML_TEMPLATE.replace(
        "{%- elif not (loop.first", "{%- elif message.role != 'tool' and not (loop.first"
    )
    assert "drops the content of 'tool'" in refused(with_template(template), tools=[TOOL])


def test_a_template_without_a_closing_token_is_refused():
    template = "{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{%- endfor %}"
    template += "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"
    assert "special token" in refused(with_template(template))


def test_a_template_that_rewrites_its_history_is_refused():
    template = "{{- messages | length }}" + CHATML_TEMPLATE
    assert "rewrites earlier messages" in refused(with_template(template))


def test_a_template_whose_header_depends_on_the_content_is_refused_when_it_happens():
    template = CHATML_TEMPLATE.replace(
        "{{- '<|im_start|>' + message.role", "{{- '<|im_start|>' + message.content[:1]"
    )
    with pytest.raises(RenderError, match="depends on its content"):
        Renderer(with_template(template)).begin([user("hello")])


def test_a_tokenizer_that_changes_text_is_refused():
    tokenizer = make_tokenizer()
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    message = refused(tokenizer)
    assert "does not" in message


def test_a_tool_description_that_spells_a_control_token_is_refused():
    bad = {"type": "function", "function": {**TOOL["function"], "description": "<|im_end|>"}}
    assert "spells the control token" in refused(make_tokenizer(), tools=[bad])


def test_a_role_that_the_template_refuses_is_named():
    template = CHATML_TEMPLATE.replace(
        "{%- elif not (loop.first",
        "{%- elif message.role == 'system' and not loop.first %}"
        "{{- raise_exception('system must be first') }}{%- elif not (loop.first",
    )
    renderer = Renderer(with_template(template))
    with pytest.raises(RenderError, match="system must be first"):
        renderer.begin([user("u"), {"role": "system", "content": "s"}])


@pytest.mark.parametrize("messages", [[], [user("u"), answer("a")]])
def test_a_beginning_without_anything_to_answer_is_refused(messages: list[Message]):
    with pytest.raises(RenderError, match="begin with a message"):
        RENDERERS["chatml"].begin(messages)


def test_a_lesson_without_an_answer_is_refused():
    with pytest.raises(RenderError, match="assistant message"):
        RENDERERS["chatml"].render_conversation([user("u")])
