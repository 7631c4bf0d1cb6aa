"""One conversation: its messages, and the token record that grows with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.agent.codec import clean_text
from agentrl.agent.layout import Filled
from agentrl.agent.record import Span, TokenRecord
from agentrl.agent.template import ToolSchema, tools_key
from agentrl.errors import RenderError
from agentrl.types import Generation, Message, StopReason, TokenRole

if TYPE_CHECKING:
    from agentrl.agent.renderer import Renderer

_SAMPLE_CHARS = 400


@dataclass(slots=True, frozen=True, kw_only=True)
class DriftSample:
    """A turn that the chat template would have rendered otherwise."""

    turn: int
    written: str
    """What stands in the record, which is what the model wrote."""
    template: str
    """What the template makes of the same history."""
    in_context: bool = False
    """Whether it is not the model's words that differ, but what stands around them."""


class Conversation:
    """Messages and their tokens. Made by :meth:`Renderer.begin`.

    ``messages`` is the whole conversation; the record holds tokens up to the last answer, since
    what follows it was never read by the model.
    """

    def __init__(self, renderer: Renderer, tools: Sequence[ToolSchema]) -> None:
        self.record = TokenRecord()
        self.messages: list[Message] = []
        self._renderer = renderer
        self.tools = list(tools)
        self._tool_names = frozenset(tool["function"]["name"] for tool in tools)
        self._key = tools_key(tools)
        self._closed = True
        """Whether the last answer ended with a stop token."""

    # ------------------------------------------------------------------ growing

    def begin(self, messages: Sequence[Message]) -> None:
        """Append the first messages, examples of answers among them, up to the first header.

        Raises:
            RenderError: the template refuses these messages, or the last one is an answer.
        """
        first, examples = split_at_answers(messages)
        if not first or messages[-1]["role"] == "assistant":
            raise RenderError(
                "a conversation must begin with a message to answer, and end with one; "
                f"got the roles {[message['role'] for message in messages]}"
            )
        self.start(first)
        for answer, following in examples:
            self.append_history(answer, following)

    def start(self, messages: Sequence[Message]) -> None:
        """Append the first prompt, up to the header of the first answer."""
        messages = [self.normalized(message) for message in messages]
        layout = self._renderer.prompt_layout(messages, self.tools, self._key)
        self.messages.extend(messages)
        self.append(layout.fill(messages))

    def normalized(self, message: Message) -> Message:
        """Return a copy that every tokenizer can encode, tool names restricted to known ones."""
        copy = message.copy()
        copy["content"] = clean_text(message["content"])
        if message["role"] == "tool":
            name = message.get("name", "")
            copy["name"] = name if name in self._tool_names else "unknown"
        return copy

    def prompt_ids(self) -> list[int]:
        """Return a copy of the record's ids: the prompt of the next turn."""
        return self.record.ids.copy()

    def append_turn(self, generation: Generation) -> tuple[int, int, str]:
        """Append a sampled turn verbatim; return ``(start, end, text without stop token)``."""
        ids = generation.ids
        self._closed = generation.stop_reason is StopReason.STOP
        body = ids[:-1] if self._closed else ids
        text = self._renderer.decode(body)
        stop = self._renderer.codec.control_text[ids[-1]] if self._closed else ""
        start, end = self.record.append_sampled(generation, text + stop)
        return start, end, text

    def add_answer(self, message: Message) -> None:
        """Note the message that the last turn said."""
        self.messages.append(message)

    def add_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Note what tools and the environment said; return it as it will be rendered."""
        added = [self.normalized(message) for message in messages]
        self.messages.extend(added)
        return added

    def render_next(self, messages: Sequence[Message]) -> Filled:
        """Render what follows the last answer: its closing tokens, ``messages``, a new header.

        Nothing is appended, so that a caller can see first whether it fits.

        Raises:
            RenderError: the template refuses these messages after an answer.
        """
        layout = self._renderer.next_layout(messages, self.tools, self._key)
        filled = layout.fill(messages)
        if self._closed:  # the model sampled the stop token itself
            stop = self._renderer.codec.control_text[filled.ids[0]]
            filled.ids, filled.roles = filled.ids[1:], filled.roles[1:]
            filled.text = filled.text[len(stop) :]
            filled.template_text = filled.template_text[len(stop) :]
        return filled

    def append(self, filled: Filled) -> None:
        """Append rendered context to the record."""
        self.record.append_context(filled.ids, filled.roles, filled.text, filled.template_text)

    def branch(self, *, num_tokens: int, num_messages: int) -> Conversation:
        """Return a conversation that begins with the first part of this one, up to a prompt.

        Turns that were sampled in that part are context there.
        """
        other = Conversation(self._renderer, self.tools)
        other.record = self.record.branch(num_tokens)
        other.messages = [message.copy() for message in self.messages[:num_messages]]
        return other

    # ------------------------------------------------------------------ history, supervision

    def append_history(self, answer: Message, following: Sequence[Message]) -> None:
        """Append an answer that the policy did not give here, and what followed it."""
        ids, _ = self._renderer.encode_answer(answer, self.tools)
        text = self._renderer.decode(ids)
        role = int(TokenRole.ASSISTANT)
        self.record.append_context(ids, [role] * len(ids), text, text)
        self._closed = True
        self.messages.append(answer)
        self.append(self.render_next(self.add_messages(following)))

    def append_taught(self, answer: Message) -> None:
        """Append an answer to learn from, as if it had been sampled."""
        ids, _ = self._renderer.encode_answer(answer, self.tools)
        self.append_turn(
            Generation(
                ids=ids,
                logprobs=[0.0] * len(ids),
                policy_version=[0] * len(ids),
                stop_reason=StopReason.STOP,
            )
        )
        self.messages.append(answer)

    def taught_mask(self) -> list[bool]:
        """Return the loss mask of the record, of length T."""
        sampled = int(TokenRole.SAMPLED)
        return [role == sampled for role in self.record.roles]

    # ------------------------------------------------------------------ checking

    def verify(self) -> list[DriftSample]:
        """Check the record against the chat template; return the turns that drifted.

        One rendering and one decoding of the whole conversation.

        Raises:
            RenderError: the ids do not decode to what was appended (our bug, or a tokenizer that
                joins neighbours).
        """
        spans = self.record.spans
        decoded = self._renderer.decode(self.record.ids)
        appended = "".join(span.text for span in spans)
        if decoded != appended:
            raise RenderError(
                "the record does not decode to the text it was made of, near "
                f"{_first_difference(decoded, appended)}"
            )
        try:
            text = self._renderer.template.render(
                self.messages, self.tools, generation=not spans[-1].sampled
            )
        except RenderError as error:
            # For example an answer whose broken call could not be given as a call.
            written = "".join(span.text for span in spans if span.sampled)
            return [DriftSample(turn=0, written=_clip(written), template=_clip(str(error)))]
        if text.startswith("".join(span.template_text for span in spans)):
            return []
        return _localise(spans, text, self._renderer.header_tail)


def split_at_answers(
    messages: Sequence[Message],
) -> tuple[list[Message], list[tuple[Message, list[Message]]]]:
    """Return the messages before the first assistant, then each assistant with what follows it."""
    first: list[Message] = []
    rest: list[tuple[Message, list[Message]]] = []
    for message in messages:
        if message["role"] == "assistant":
            rest.append((message, []))
        elif rest:
            rest[-1][1].append(message)
        else:
            first.append(message)
    return first, rest


def _localise(spans: Sequence[Span], text: str, header_tail: str) -> list[DriftSample]:
    """Find the turns that ``text`` renders otherwise, walking from context to context."""
    samples: list[DriftSample] = []
    position = turn = 0
    written = ""
    for span in spans:
        if span.sampled:
            written = span.template_text
            continue
        found, length = _find_context(text, position, written, span.template_text, header_tail)
        if found < 0:  # the context itself differs, and with it all that follows
            rest = written + span.template_text
            return [*samples, _sample(turn, rest, text[position:], in_context=True)]
        if text[position:found] != written:
            samples.append(_sample(turn, written, text[position:found]))
        turn += bool(written)
        position = found + length
        written = ""
    if not text.startswith(written, position):
        samples.append(_sample(turn, written, text[position:]))
    return samples


def _find_context(
    text: str, position: int, written: str, context: str, header_tail: str
) -> tuple[int, int]:
    """Return offset and length of ``context`` in ``text``, at best right after ``written``."""
    forms = [context, context.removesuffix(header_tail)] if header_tail else [context]
    for form in forms:
        if text.startswith(written + form, position):
            return position + len(written), len(form)
    if not written:
        return -1, 0
    found = [(text.find(form, position), len(form)) for form in forms]
    return next((item for item in found if item[0] >= 0), (-1, 0))


def _sample(turn: int, written: str, template: str, *, in_context: bool = False) -> DriftSample:
    return DriftSample(
        turn=turn, written=_clip(written), template=_clip(template), in_context=in_context
    )


def _clip(text: str) -> str:
    return text if len(text) <= _SAMPLE_CHARS else text[:_SAMPLE_CHARS] + "..."


def _first_difference(a: str, b: str) -> str:
    length = min(len(a), len(b))
    at = next((i for i in range(length) if a[i] != b[i]), length)
    return f"offset {at}: {a[max(0, at - 20) : at + 20]!r} against {b[max(0, at - 20) : at + 20]!r}"
