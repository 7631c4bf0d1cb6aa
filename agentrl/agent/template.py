"""A chat template as a pure function of messages, with its refusals in our words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import RenderError
from agentrl.types import Message

ToolSchema = Mapping[str, Any]
"""``{"type": "function", "function": {"name", "description", "parameters"}}``."""

_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_SAFE_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class ChatTemplate:
    """Renders messages to text with the tokenizer's own template.

    Args:
        tokenizer: of transformers, with a chat template.
        template_kwargs: handed to the template at every rendering (``enable_thinking=False``).

    Raises:
        RenderError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise RenderError(
                "the tokenizer has no chat template, and none is invented: set "
                "tokenizer.chat_template to the one the model was trained with (a .jinja file)"
            )
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        # Kimi's template has a call named by its id alone.
        self._ids_name_functions = _KIMI_ARGUMENTS in str(tokenizer.chat_template)
        # Most templates take arguments as a mapping; some insist on JSON text.
        self._arguments_as_json = not self._renders_call({}) and self._renders_call("{}")

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, generation: bool
    ) -> str:
        """Return the text of ``messages``, with the header of the next assistant turn if asked.

        Raises:
            RenderError: the template refuses these messages.
        """
        try:
            return self._render(self._prepared(messages), tools, generation)
        except Exception as error:  # templates raise whatever their author chose
            roles = ", ".join(message["role"] for message in messages)
            raise RenderError(
                f"the chat template refuses messages with the roles [{roles}]: {error}; "
                "give the tokenizer a template that accepts them"
            ) from error

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema], generation: bool
    ) -> str:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generation,
            **self._kwargs,
        )

    def _prepared(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Add what some templates insist on: call ids, safe tool names, arguments as they like."""
        prepared: list[dict[str, Any]] = []
        position = 0
        for message in messages:
            copy: dict[str, Any] = dict(message)
            if message.get("tool_calls"):
                position = 0
                copy["tool_calls"] = [
                    self._prepared_call(call, index)
                    for index, call in enumerate(message.get("tool_calls", ()))
                ]
            elif message["role"] == "tool":
                name = str(message.get("name") or "tool")
                copy["name"] = name if _SAFE_NAME.fullmatch(name) else "unknown"
                copy["tool_call_id"] = self._call_id(position, copy["name"])
                position += 1
            prepared.append(copy)
        return prepared

    def _prepared_call(self, call: Mapping[str, Any], index: int) -> dict[str, Any]:
        function = dict(call["function"])
        if self._arguments_as_json:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        identity = self._call_id(index, function["name"])
        return {"id": identity, "type": "function", "function": function}

    def _call_id(self, index: int, name: str) -> str:
        return f"functions.{name}:{index}" if self._ids_name_functions else f"call{index:05d}"

    def _renders_call(self, arguments: Any) -> bool:
        call = {"id": self._call_id(0, "f"), "type": "function", "function": {"name": "f"}}
        call["function"]["arguments"] = arguments
        messages = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            self._render(messages, (), False)
        except Exception:  # the question is exactly whether it raises
            return False
        return True


def tools_key(tools: Sequence[ToolSchema]) -> str:
    """Return a key that is equal for equal schemas."""
    return json.dumps(list(tools), sort_keys=True) if tools else ""
