"""Messages to token ids and back, exact to the token.

What the model produced is never encoded again: a turn's ids enter the record as they were sampled,
and what comes after them is the *difference of two renderings* of the chat template, found once per
shape of messages (:mod:`agentrl.agent.layout`) and filled in from then on. A turn therefore costs
the same whether it is the first or the hundredth.

The rule needs three things of a template, and refuses one that lacks them: new messages are only
appended; an assistant message starts where its generation prompt ends; it is closed by a special
token, on which sampling stops.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentrl.agent.codec import TokenCodec, clean_text
from agentrl.agent.conversation import Conversation, split_at_answers
from agentrl.agent.layout import Layout, find_role_ends, sentinel
from agentrl.agent.template import ChatTemplate, ToolSchema, tools_key
from agentrl.errors import RenderError
from agentrl.types import Message

_BASE: Message = {"role": "user", "content": sentinel(900)}
_ANSWER = sentinel(901)
_MAX_LAYOUTS = 1024
_MAX_ANSWERS = 4096

PROBE_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "number": {"type": "integer"}},
        },
    },
}


class Renderer:
    """Renders conversations with one tokenizer; shared by every trajectory of a process.

    Args:
        tokenizer: a fast tokenizer of transformers with a chat template.
        template_kwargs: handed to the template, for example ``{"enable_thinking": False}``.

    Raises:
        RenderError: no chat template, no end-of-sequence token, or a template or tokenizer that
            cannot be followed exactly; the message says what to add.
    """

    def __init__(self, tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.template = ChatTemplate(tokenizer, template_kwargs)
        self.codec = TokenCodec(tokenizer)
        self.header_tail = self._find_header_tail()
        """What the template writes after the header of an answer only while one is awaited (an
        empty thought, with thinking switched off): it stays in the record and is no drift."""
        self.stop_token_ids = self._find_stop_tokens(tokenizer)
        self._history_closing = self._find_history_closing()
        self._answers: dict[tuple[str, str], tuple[list[int], str]] = {}
        self._base_prompts: dict[str, str] = {}
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        self.check()

    # ------------------------------------------------------------------ conversations

    def begin(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Conversation:
        """Render the first prompt.

        Args:
            messages: may hold assistant messages (examples); the last one must not be one.
            tools: schemas of the tools that the model may call.

        Raises:
            RenderError: the template refuses these messages.
        """
        conversation = Conversation(self, tools)
        conversation.begin(messages)
        return conversation

    def render_conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[list[int], list[bool]]:
        """Render a whole conversation for supervised training.

        Returns:
            ``(ids, loss_mask)``, both of length T, up to the last assistant token; the mask is
            True on what assistants said, stop tokens included. The ids are those that the agent
            loop records where the model says the same.

        Raises:
            RenderError: no assistant message, or the template refuses the conversation.
        """
        first, rest = split_at_answers(messages)
        if not rest or not first:
            raise RenderError(
                "a conversation to learn from needs messages before an assistant message; "
                f"got the roles {[m['role'] for m in messages]}"
            )
        conversation = Conversation(self, tools)
        conversation.start(first)
        for position, (answer, following) in enumerate(rest):
            conversation.append_taught(answer)
            if position < len(rest) - 1:
                conversation.append(conversation.render_next(following))
        return conversation.record.ids, conversation.taught_mask()

    # ------------------------------------------------------------------ pieces

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, control tokens spelled out."""
        return self.codec.decode(ids)

    def decode_turn(self, ids: Sequence[int]) -> str:
        """Return what the model said in a turn, without its stop token."""
        if ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        return self.codec.decode(ids)

    def cut(self, text: str, max_tokens: int) -> tuple[str, int]:
        """See :meth:`TokenCodec.cut`."""
        return self.codec.cut(text, max_tokens)

    def prompt_layout(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], key: str
    ) -> Layout:
        """Return the layout of a first prompt; ``key`` stands for the tools."""
        return self._layout(("prompt", key, *_shape(messages)), messages, tools)

    def next_layout(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], key: str
    ) -> Layout:
        """Return the layout of what follows an assistant turn, from its stop token on."""
        return self._layout(("next", key, *_shape(messages)), messages, tools)

    def encode_answer(
        self, message: Message, tools: Sequence[ToolSchema] = ()
    ) -> tuple[list[int], str]:
        """Return the ids with which a model would say ``message``, stop token last, and the text.

        Raises:
            RenderError: the template refuses the message or drops its content.
        """
        # Scripted episodes say the same few things over and over.
        key = (tools_key(tools), json.dumps(message, sort_keys=True))
        known = self._answers.get(key)
        if known is None:
            if len(self._answers) >= _MAX_ANSWERS:
                self._answers.clear()
            known = self._answers[key] = self._encode_answer(message, tools)
        ids, text = known
        return list(ids), text

    def _encode_answer(
        self, message: Message, tools: Sequence[ToolSchema]
    ) -> tuple[list[int], str]:
        content = clean_text(message["content"])
        calls, spelled = self._without_controls(message.get("tool_calls") or [])
        probe: Message = {"role": "assistant", "content": _ANSWER if content else ""}
        if calls:
            probe["tool_calls"] = calls
        text, stop = self._answer_body(probe, tools)
        if content and _ANSWER not in text:
            raise RenderError(
                "the chat template drops the content of an assistant message with tool calls; "
                "leave its content empty, or give the tokenizer a template that shows it"
            )
        ids: list[int] = []
        said: list[str] = []
        for piece in self.codec.split_controls(text):
            if isinstance(piece, int):
                ids.append(piece)
                said.append(self.codec.control_text[piece])
                continue
            for word, value in {_ANSWER: content, **spelled}.items():
                piece = piece.replace(word, value)
            ids.extend(self.codec.encode_assistant(piece))
            said.append(self.codec.normalize(piece))
        return [*ids, stop], "".join(said)

    def check(self, tools: Sequence[ToolSchema] = ()) -> None:
        """Refuse now what could not be followed later.

        Raises:
            RenderError: says which rule the template breaks and what to add.
        """
        key = tools_key(tools)
        user: Message = {"role": "user", "content": "u"}
        following: list[Message] = [user]
        if tools:
            self._check_tools(tools)
            following = [{"role": "tool", "content": "t", "name": "unknown"}]
            self.next_layout([user], tools, key)
        self._check_appending(following, tools)

    # ------------------------------------------------------------------ internals

    def _check_appending(self, following: list[Message], tools: Sequence[ToolSchema]) -> None:
        """Play two turns by the rule and compare with the template's own text of them."""
        answer: Message = {"role": "assistant", "content": "a"}
        if following[0]["role"] == "tool":
            name = following[0].get("name", "")
            answer = {"role": "assistant", "content": "", "tool_calls": [_probe_call(name)]}
        conversation = Conversation(self, tools)
        conversation.start([{"role": "user", "content": "u"}])
        for _ in range(2):
            conversation.append_taught(answer)
            added = conversation.add_messages(following)
            conversation.append(conversation.render_next(added))
        for sample in conversation.verify():
            if sample.in_context:
                raise RenderError(
                    "the chat template is not append-only, so a record of turns cannot follow it: "
                    f"expected {sample.written!r}, the template writes {sample.template!r}; give "
                    "the tokenizer a template that only appends"
                )

    def _check_tools(self, tools: Sequence[ToolSchema]) -> None:
        text = self.template.render([_BASE], tools, generation=True)
        for tool in tools:
            name = tool["function"]["name"]
            if name not in text:
                raise RenderError(
                    f"the chat template does not show the tool {name!r} to the model; give the "
                    "tokenizer a template that renders `tools`, or describe them in the prompt"
                )

    def _refuse_controls_in(self, tools: Sequence[ToolSchema]) -> None:
        """Schemas are scaffolding, so what they spell would become real control tokens."""
        for tool in tools:
            text = json.dumps(tool, ensure_ascii=False)
            spelled = [control for control in self.codec.control_tokens if control in text]
            if spelled:
                raise RenderError(
                    f"the specification of tool {tool['function']['name']!r} spells the control "
                    f"token {spelled[0]!r}; reword its description"
                )

    def _layout(
        self, key: tuple[Any, ...], messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Layout:
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._build_layout(key[0], messages, tools)
            self._layouts[key] = layout
        return layout

    def _build_layout(
        self, kind: str, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Layout:
        def render_prompt(shape: Sequence[Message], generation: bool) -> str:
            return self.template.render(shape, tools, generation=generation)

        def render_next(shape: Sequence[Message], generation: bool) -> str:
            return self._after_answer(shape, tools, generation=generation)

        render = render_prompt if kind == "prompt" else render_next
        self._refuse_controls_in(tools)

        def role_ends(shape: Sequence[Message], text: str) -> list[tuple[int, int]]:
            return find_role_ends(lambda part: render(part, False), shape, text)

        return Layout(self.codec, lambda shape: render(shape, True), messages, role_ends)

    def _after_answer(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, generation: bool
    ) -> str:
        """Return the template's text from the stop token of an assistant turn on."""
        answer = _answer_before(messages)
        text = self.template.render([_BASE, answer, *messages], tools, generation=generation)
        rest = self._after_prompt(text, tools)
        closings = self._closings(with_call=bool(answer.get("tool_calls")))
        for position, piece in _positions(self.codec, rest):
            if piece in closings:
                return rest[position:]
        stops = [self.codec.control_text[stop] for stop in closings]
        raise RenderError(
            "the chat template does not close an assistant message that others follow with "
            f"one of {stops}; give the tokenizer a template that does"
        )

    def _answer_body(self, message: Message, tools: Sequence[ToolSchema]) -> tuple[str, int]:
        """Return the template's text of an assistant message, and its stop token."""
        following: list[Message] = [
            {"role": "tool", "content": sentinel(902), "name": call["function"]["name"]}
            for call in message.get("tool_calls") or []
        ] or [{"role": "user", "content": sentinel(902)}]
        text = self.template.render([_BASE, message, *following], tools, generation=False)
        rest = self._after_prompt(text, tools)
        closings = self._closings(with_call=bool(message.get("tool_calls")))
        for position, piece in _positions(self.codec, rest):
            if piece in closings:
                return rest[:position], closings[piece]
        raise RenderError("the chat template does not close an assistant message")

    def _after_prompt(self, text: str, tools: Sequence[ToolSchema]) -> str:
        """Cut the first prompt off ``text``: what is left begins with the assistant's words."""
        key = tools_key(tools)
        if key not in self._base_prompts:
            self._base_prompts[key] = self.template.render([_BASE], tools, generation=True)
        prompt = self._base_prompts[key]
        if text.startswith(prompt):
            return text[len(prompt) :]
        header = prompt.removesuffix(self.header_tail)
        if text.startswith(header):
            return text[len(header) :]
        raise RenderError(
            "the chat template rewrites earlier messages when later ones are added, so a record "
            "cannot be append-only: a prompt was\n"
            f"  {prompt[-200:]!r}\nand the same messages with an answer became\n  {text[:400]!r}\n"
            "give the tokenizer a template that only appends"
        )

    def _find_header_tail(self) -> str:
        answer: Message = {"role": "assistant", "content": _ANSWER}
        prompt = self.template.render([_BASE], generation=True)
        history = self.template.render([_BASE, answer, _BASE], generation=False)
        before, found, _ = history.partition(_ANSWER)
        return prompt[len(before) :] if found and prompt.startswith(before) else ""

    def _find_stop_tokens(self, tokenizer: Any) -> tuple[int, ...]:
        eos = getattr(tokenizer, "eos_token_id", None)
        if eos is None:
            raise RenderError(
                "the tokenizer has no end-of-sequence token, and none is invented: set "
                "tokenizer.eos_token to the token that ends an assistant turn"
            )
        if eos not in self.codec.control_text:
            raise RenderError(
                f"the end-of-sequence token {tokenizer.eos_token!r} is not a special token of the "
                "tokenizer; add it with tokenizer.add_special_tokens"
            )
        closing = self._closing_token()
        # A template may close tool calls differently from plain answers.
        stops = [closing, int(eos)]
        with contextlib.suppress(RenderError):  # no tool calls: check(tools) decides on that
            stops.append(self._closing_token(with_call=True))
        return tuple(dict.fromkeys(stops))

    def _closings(self, *, with_call: bool) -> dict[int, int]:
        """Return what closes an answer in the template's text, and the stop token it stands for."""
        closings = {stop: stop for stop in self.stop_token_ids}
        if not with_call and self._history_closing is not None:
            closings[self._history_closing] = self.stop_token_ids[0]
        return closings

    def _find_history_closing(self) -> int | None:
        """Return the token that closes a plain answer once others follow, if it is no stop token.

        gpt-oss ends a turn with ``<|return|>``, and history has ``<|end|>`` in its place, which
        ends each part of a turn, too.
        """
        answer: Message = {"role": "assistant", "content": _ANSWER}
        text = self.template.render([_BASE, answer, _BASE], generation=False)
        token = self._first_special(text.partition(_ANSWER)[2])
        return None if token in self.stop_token_ids else token

    def _closing_token(self, *, with_call: bool = False) -> int:
        """Return the special token that ends an answer.

        Where the template writes none, it is the one that the next message begins with (GLM).
        """
        answer: Message = {"role": "assistant", "content": _ANSWER}
        following: Message = _BASE
        if with_call:
            answer = {"role": "assistant", "content": "", "tool_calls": [_probe_call()]}
            following = {"role": "tool", "content": _ANSWER, "name": "probe_tool"}
        text = self.template.render([_BASE, answer], generation=False)
        if not with_call and _ANSWER not in text:
            raise RenderError("the chat template drops the content of assistant messages")
        said = text if with_call else text.partition(_ANSWER)[2]
        pieces = [p for p in self.codec.split_controls(said) if p in self.codec.special_ids]
        if pieces and said.rstrip().endswith(self.codec.control_text[cast(int, pieces[-1])]):
            return cast(int, pieces[-1])
        longer = self.template.render([_BASE, answer, following], generation=False)
        token = self._first_special(longer.removeprefix(text)) if longer.startswith(text) else None
        if token is None:
            raise RenderError(
                "the chat template does not close an assistant message with a special token, so "
                f"the model could never stop: it ends in {text[-80:]!r}; give the tokenizer a "
                "template that ends assistant messages with its end-of-turn token"
            )
        return token

    def _first_special(self, text: str) -> int | None:
        return next(
            (piece for _, piece in _positions(self.codec, text) if piece in self.codec.special_ids),
            None,
        )

    def _without_controls(
        self, calls: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Put words in place of control tokens that arguments spell out."""
        text = json.dumps(list(calls), ensure_ascii=False)
        spelled: dict[str, str] = {}
        for control, index in self.codec.control_tokens.items():
            if index in self.codec.special_ids and control in text:
                word = sentinel(910 + len(spelled))
                spelled[word] = control
                text = text.replace(control, word)
        return json.loads(text), spelled


def _shape(messages: Sequence[Message]) -> tuple[tuple[str, bool, str], ...]:
    return tuple((m["role"], bool(m["content"]), m.get("name", "")) for m in messages)


def _probe_call(name: str = "probe_tool") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {}}}


def _answer_before(messages: Sequence[Message]) -> Message:
    """An answer that the messages may follow: with as many calls as there are tool messages."""
    calls = [_probe_call(m.get("name") or "unknown") for m in messages if m["role"] == "tool"]
    if not calls:
        return {"role": "assistant", "content": _ANSWER}
    # Without content: a template may close that separately.
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _positions(codec: TokenCodec, text: str) -> list[tuple[int, int]]:
    """Return ``(offset, id)`` of every control token in template text."""
    found: list[tuple[int, int]] = []
    position = 0
    for piece in codec.split_controls(text):
        if isinstance(piece, int):
            found.append((position, piece))
            position += len(codec.control_text[piece])
        else:
            position += len(piece)
    return found
