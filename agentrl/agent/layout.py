"""What the template writes around content, found once per shape of messages and then filled in.

The template is rendered with sentinels in place of contents. The text between the sentinels is
scaffolding: its control tokens are real. What the template does to a content (nothing, strip it,
escape it for JSON) is found by rendering a probe in its place; where none of the known treatments
fits, the content is rendered alone among sentinels each time, which is exact and slower.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl.agent.codec import TokenCodec
from agentrl.errors import RenderError
from agentrl.types import Message, TokenRole

RenderText = Callable[[Sequence[Message]], str]
"""The text of the new messages (in a fixed history), whatever their contents."""

RoleEnds = Callable[[Sequence[Message], str], list[tuple[int, int]]]

Treatment = Callable[[str], str]

_PROBE = ' \n\tzq "\'<&>\\/ \u00e9\u2192 {"k": [1]}\n\n z \n '
_TREATMENTS: tuple[Treatment, ...] = (
    str,
    str.strip,
    str.lstrip,
    str.rstrip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)
_ROLES = {
    "system": TokenRole.SYSTEM,
    "user": TokenRole.USER,
    "tool": TokenRole.TOOL,
    "assistant": TokenRole.ASSISTANT,
}


def sentinel(index: int) -> str:
    """Return a word that no template treats specially and no scaffolding contains."""
    return f"zQ{index:03d}vKx"


_SENTINEL = re.compile(r"zQ(\d{3})vKx")


@dataclass(slots=True)
class Filled:
    """New context, ready to append."""

    ids: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    text: str = ""
    """What ``ids`` decode to."""
    template_text: str = ""
    """What the template says, before the tokenizer's Unicode normalisation."""


@dataclass(slots=True, frozen=True)
class _Fixed:
    ids: tuple[int, ...]
    roles: tuple[int, ...]
    text: str


@dataclass(slots=True, frozen=True)
class _Run:
    """A stretch between control tokens that holds content: literals, and numbers of messages."""

    parts: tuple[str | int, ...]
    role: int


class Layout:
    """The scaffolding of one shape of messages.

    Args:
        codec: encodes.
        render: gives the text of the new messages in their place.
        messages: of the shape wanted; contents matter only in being empty or not.
        role_ends: says up to which offset of the sentinel text tokens have which role.

    Raises:
        RenderError: the template drops a content, or cannot be followed.
    """

    def __init__(
        self,
        codec: TokenCodec,
        render: RenderText,
        messages: Sequence[Message],
        role_ends: RoleEnds,
    ) -> None:
        self._codec = codec
        self._render = render
        self._shape = [with_content(m, i) for i, m in enumerate(messages)]
        text = render(self._shape)
        self._literals, self._order = _split_sentinels(text)
        for index, message in enumerate(self._shape):
            if message["content"] and index not in self._order:
                raise RenderError(
                    f"the chat template drops the content of {message['role']!r} messages, so the "
                    "model would never see it; give the tokenizer a template that shows them"
                )
        self._treatments = {index: self._find_treatment(index) for index in set(self._order)}
        self._items = self._compile(text, role_ends(self._shape, text))

    def fill(self, messages: Sequence[Message]) -> Filled:
        """Encode ``messages``, which have the shape of this layout.

        Raises:
            RenderError: the scaffolding depends on the content in a way that cannot be followed.
        """
        contents = {
            index: treatment(messages[index]["content"])
            if treatment is not None
            else self._rendered_content(index, messages[index]["content"])
            for index, treatment in self._treatments.items()
        }
        filled = Filled()
        texts: list[str] = []
        template_texts: list[str] = []
        for item in self._items:
            if isinstance(item, _Fixed):
                filled.ids.extend(item.ids)
                filled.roles.extend(item.roles)
                texts.append(item.text)
                template_texts.append(item.text)
                continue
            run = "".join(
                [part if isinstance(part, str) else contents[part] for part in item.parts]
            )
            ids = self._codec.encode_plain(run)
            filled.ids.extend(ids)
            filled.roles.extend([item.role] * len(ids))
            texts.append(self._codec.normalize(run))
            template_texts.append(run)
        filled.text = "".join(texts)
        filled.template_text = "".join(template_texts)
        return filled

    def _find_treatment(self, index: int) -> Treatment | None:
        got = self._rendered_content(index, _PROBE)
        return next((known for known in _TREATMENTS if known(_PROBE) == got), None)

    def _rendered_content(self, index: int, content: str) -> str:
        """Return what the template makes of one content, all the others being sentinels."""
        messages = list(self._shape)
        messages[index] = {**messages[index], "content": content}  # pyright: ignore
        text = self._render(messages)
        position = self._order.index(index)
        before = _join(self._literals[: position + 1], self._order[:position])
        after = _join(self._literals[position + 1 :], self._order[position + 1 :])
        if self._order.count(index) != 1 or not (
            text.startswith(before)
            and text.endswith(after)
            and len(text) >= len(before) + len(after)
        ):
            raise RenderError(
                f"what the chat template writes around a {messages[index]['role']!r} message "
                f"depends on its content ({content[:60]!r}); give the tokenizer a template that "
                "writes the same header and footer around every content"
            )
        return text[len(before) : len(text) - len(after)]

    def _compile(self, text: str, role_ends: Sequence[tuple[int, int]]) -> list[_Fixed | _Run]:
        """Turn the sentinel text into fixed ids and runs that hold content."""
        items: list[_Fixed | _Run] = []
        position = 0
        for piece in self._codec.split_controls(text):
            role = next((role for end, role in role_ends if position < end), role_ends[-1][1])
            if isinstance(piece, int):
                spelled = self._codec.control_text[piece]
                items.append(_Fixed((piece,), (role,), spelled))
                position += len(spelled)
                continue
            literals, order = _split_sentinels(piece)
            if order:
                parts: list[str | int] = [literals[0]]
                for index, literal in zip(order, literals[1:], strict=True):
                    parts += [index, literal]
                items.append(_Run(tuple(part for part in parts if part != ""), role))
            else:
                ids = tuple(self._codec.encode_plain(piece))
                items.append(_Fixed(ids, (role,) * len(ids), self._codec.normalize(piece)))
            position += len(piece)
        return _merge_fixed(items)


def with_content(message: Message, index: int) -> Message:
    """Return ``message`` with a sentinel for its content, where it has any."""
    copy = message.copy()
    copy["content"] = sentinel(index) if message["content"] else ""
    return copy


def find_role_ends(
    render_headless: RenderText, shape: Sequence[Message], text: str
) -> list[tuple[int, int]]:
    """Return ``(offset, role)``: up to which offset of ``text`` tokens belong to which role.

    Message ``k`` ends where the rendering of the first ``k`` messages, without the header of an
    answer, parts from the whole.
    """
    ends: list[tuple[int, int]] = []
    for count, message in enumerate(shape, start=1):
        try:
            part = render_headless(shape[:count])
        except RenderError:  # some templates refuse a conversation that ends here
            continue
        ends.append((_common_prefix(part, text), int(_ROLES[message["role"]])))
    ends.append((len(text), int(TokenRole.ASSISTANT)))
    return ends


def _common_prefix(a: str, b: str) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


def _split_sentinels(text: str) -> tuple[list[str], list[int]]:
    parts = _SENTINEL.split(text)
    return parts[0::2], [int(index) for index in parts[1::2]]


def _join(literals: Sequence[str], order: Sequence[int]) -> str:
    """Interleave literals with sentinels; one of the two may have a surplus literal."""
    parts: list[str] = []
    for position, literal in enumerate(literals):
        parts.append(literal)
        if position < len(order):
            parts.append(sentinel(order[position]))
    return "".join(parts)


def _merge_fixed(items: Sequence[_Fixed | _Run]) -> list[_Fixed | _Run]:
    merged: list[_Fixed | _Run] = []
    for item in items:
        last = merged[-1] if merged else None
        if isinstance(item, _Fixed) and isinstance(last, _Fixed):
            merged[-1] = _Fixed(last.ids + item.ids, last.roles + item.roles, last.text + item.text)
        else:
            merged.append(item)
    return merged
