"""The JSON format of Llama 3.1 to 3.3: ``{"name": ..., "parameters": {...}}``, the whole turn.

``<|python_tag|>`` may stand before it. A turn that calls may end with ``<|eom_id|>``.
"""

from __future__ import annotations

import re

from agentrl.tool.parsers.base import (
    NO_CONTEXT,
    CallObject,
    ParsedTurn,
    TurnContext,
    broken,
    skip_space,
)
from agentrl.tool.parsers.scanner import Marker, Scanner
from agentrl.tool.parsers.strict_json import read_json
from agentrl.types import ToolCall

_TAG = "<|python_tag|>"
_CALL = CallObject(
    form='{"name": "...", "parameters": {...}}',
    arguments=("parameters", "arguments"),
    ignored=("type", "id"),
    takes_text=True,
)
_ARGUMENTS = frozenset(_CALL.arguments)
_SCANNER = Scanner(re.escape(_TAG), leading=r"\s*(?=\{)")
_BEGINS_LIKE_A_CALL = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,'
    r'\s*"(?:parameters|arguments)"\s*:'
)


class Llama3JsonParser:
    """Parses calls that are the whole turn, or that follow ``<|python_tag|>``.

    Several are separated by ``;`` or white space. JSON at the start of a turn that is no call (it
    has no name, or no parameters) is content, as is JSON after other words.
    """

    stop_tokens: tuple[str, ...] = ("<|eom_id|>", "<|eot_id|>")

    def parse(self, text: str, context: TurnContext = NO_CONTEXT) -> ParsedTurn:
        """Parse one turn. Never raises."""
        return _SCANNER.scan(text, _read, context)


def _read(marker: Marker) -> tuple[list[ToolCall], int] | None:
    text = marker.text
    start = skip_space(text, marker.match.end())
    if marker.is_leading and not _is_call(text, start):
        return None
    calls: list[ToolCall] = []
    while True:
        try:
            value, end = read_json(text, start)
        except ValueError as error:
            calls.append(broken(f"the tool call is no valid JSON ({error}); write {_CALL.form}"))
            rest = text.find(_TAG, start)
            return calls, len(text) if rest < 0 else rest
        calls.append(_CALL.call(value))
        start = skip_space(text, end)
        if text.startswith(";", start):
            start = skip_space(text, start + 1)
        if not text.startswith("{", start):
            return calls, start


def _is_call(text: str, start: int) -> bool:
    """Whether JSON at the start of a turn is a call, and no answer in JSON."""
    try:
        value, _ = read_json(text, start)
    except ValueError:
        return _BEGINS_LIKE_A_CALL.match(text, start) is not None
    return isinstance(value, dict) and "name" in value and not _ARGUMENTS.isdisjoint(value)
