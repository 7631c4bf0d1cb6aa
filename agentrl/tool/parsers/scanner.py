"""Walks a turn once: past thoughts, from call to call."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.tool.parsers.base import ParsedTurn, TurnContext, skip_space
from agentrl.types import ToolCall


@dataclass(slots=True, frozen=True, kw_only=True)
class Marker:
    """Where a call may begin."""

    text: str
    """The whole turn."""
    match: re.Match[str]
    in_fence: bool
    """Whether it stands in a code fence."""
    is_leading: bool = False
    """Whether it stands where the turn's own words begin."""
    known: dict[re.Pattern[str], re.Match[str] | None] = field(default_factory=dict)
    """The last match of each pattern in this turn."""

    @property
    def end(self) -> int:
        """Where what the marker announces begins."""
        return self.match.end()

    def search(self, pattern: re.Pattern[str], position: int) -> re.Match[str] | None:
        """Return the first match from ``position`` on, which never goes back within a turn.

        The last match is kept: thousands of calls that lack a closing tag would each look for it
        to the end of the text.
        """
        match = self.known.get(pattern)
        if match is None and pattern in self.known:
            return None
        if match is None or match.start() < position:
            match = self.known[pattern] = pattern.search(self.text, position)
        return match

    def after(self, close: re.Pattern[str], position: int) -> int:
        """Return where the first ``close`` from ``position`` on ends, or the end of the text."""
        found = self.search(close, position)
        return len(self.text) if found is None else found.end()


Read = Callable[[Marker], tuple[list[ToolCall], int] | None]
"""Returns the calls at a marker and where the text goes on, or None where it is no call."""


class Scanner:
    """Finds markers outside thoughts.

    A thought ends where it is closed, or with the turn. What stands before a closing tag that was
    never opened is a thought too: the prompt, or a part that the model left out, had opened it.
    Calls in a thought are text.

    Args:
        marker: regular expression of what begins a call; it must take characters.
        leading: regular expression of a form without a marker, looked for only where the turn's
            own words begin.
        open_thought, close_thought: regular expressions of the tags of a thought.
    """

    def __init__(
        self,
        marker: str,
        *,
        leading: str | None = None,
        open_thought: str = "<think>",
        close_thought: str = "</think>",
    ) -> None:
        tags = f"(?P<open>{open_thought})|(?P<close>{close_thought})"
        fence = r"(?P<fence>^[ \t]*```)"
        self._events = re.compile(f"{tags}|{fence}|(?P<marker>{marker})", re.MULTILINE)
        self._tags = re.compile(tags)
        self._leading = None if leading is None else re.compile(leading)
        self._close = re.compile(close_thought)

    def scan(self, text: str, read: Read, context: TurnContext) -> ParsedTurn:
        """Return what ``text`` says; ``read`` is called at every marker."""
        walk = _Walk(text)
        position = self._after_thought(text, 0) if context.in_thought else 0
        begin, position = position, self._read_leading(walk, read, position)
        while (match := self._events.search(text, position)) is not None:
            if match["open"]:
                is_leading = skip_space(text, begin) == match.start()
                position = self._after_thought(text, match.end())
                if is_leading:
                    begin, position = position, self._read_leading(walk, read, position)
            elif match["close"]:
                walk.forget()
                begin, position = match.end(), self._read_leading(walk, read, match.end())
            elif match["fence"]:
                walk.in_fence = not walk.in_fence
                position = match.end()
            else:
                position = self._read(walk, read, match)
        return walk.parsed()

    def _read_leading(self, walk: _Walk, read: Read, position: int) -> int:
        """Read a call that needs no marker where the turn's own words begin."""
        match = None if self._leading is None else self._leading.match(walk.text, position)
        return position if match is None else self._read(walk, read, match, is_leading=True)

    def _read(
        self, walk: _Walk, read: Read, match: re.Match[str], *, is_leading: bool = False
    ) -> int:
        marker = Marker(
            text=walk.text,
            match=match,
            in_fence=walk.in_fence,
            is_leading=is_leading,
            known=walk.known,
        )
        found = read(marker)
        if found is None:
            return match.end()
        calls, position = found
        if any(call.error for call in calls):
            # Where a broken call ends is a guess, which must not hide where a thought does.
            tag = self._tags.search(walk.text, match.end(), position)
            position = position if tag is None else tag.start()
        walk.add(calls, match.start(), position)
        return position

    def _after_thought(self, text: str, position: int) -> int:
        found = self._close.search(text, position)
        return len(text) if found is None else found.end()


class _Walk:
    """What a walk has found so far."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.calls: list[ToolCall] = []
        self.in_fence = False
        self.kept = 0
        """Up to here the text is divided into pieces and calls."""
        self.known: dict[re.Pattern[str], re.Match[str] | None] = {}
        self._pieces: list[str] = []
        self._is_divided = False

    def add(self, calls: list[ToolCall], begin: int, end: int) -> None:
        self._pieces.append(self.text[self.kept : begin])
        self.calls += calls
        self.kept = end
        self._is_divided = True

    def forget(self) -> None:
        """All so far was a thought."""
        self.calls.clear()
        self._pieces.clear()
        self.kept = 0
        self.in_fence = self._is_divided = False

    def parsed(self) -> ParsedTurn:
        if not self._is_divided:
            return ParsedTurn(content=self.text, tool_calls=())
        pieces = [*self._pieces, self.text[self.kept :]]
        content = "\n".join(piece.strip() for piece in pieces if piece.strip())
        return ParsedTurn(content=content, tool_calls=tuple(self.calls))
