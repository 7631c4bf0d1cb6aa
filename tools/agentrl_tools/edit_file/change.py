"""What an edit makes of a text, and why it cannot be made; nothing here touches a file."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.errors import ToolError
from agentrl_tools.text_files import lines_of

_MAX_LISTED = 5


@dataclass(slots=True, frozen=True, kw_only=True)
class Change:
    """A text after a change."""

    text: str
    first_line: int
    """Where the new part begins, counted from 1."""
    num_lines: int
    """Of the new part."""


def replace(text: str, old: str, new: str, path: str) -> Change:
    """Put ``new`` where ``old`` stands.

    Raises:
        ToolError: ``old`` does not occur exactly once, or nothing would change.
    """
    if not old:
        raise ToolError("old_text is empty; copy the text to replace, or use insert or create")
    if old == new:
        raise ToolError("old_text and new_text are the same; nothing would change")
    first = text.find(old)
    if first < 0:
        raise ToolError(f"old_text was not found in {path}; {_hint(text, old)}")
    if text.find(old, first + 1) >= 0:
        raise ToolError(
            f"old_text occurs more than once in {path} ({_places(text, old)}); copy more lines "
            "around the one that is meant"
        )
    changed = text[:first] + new + text[first + len(old) :]
    return Change(
        text=changed, first_line=text.count("\n", 0, first) + 1, num_lines=new.count("\n") + 1
    )


def insert(text: str, line: int, new: str, path: str) -> Change:
    """Put ``new`` after a line, as lines of its own; 0 is the top.

    Raises:
        ToolError: there is no such line, or nothing to insert.
    """
    if not new:
        raise ToolError("new_text is empty; nothing would change")
    lines = [f"{one}\n" for one in lines_of(text)]
    if line > len(lines):
        raise ToolError(f"{path} has only {len(lines)} lines, line={line}")
    end = "\r\n" if text.partition("\n")[0].endswith("\r") else "\n"
    added = new if new.endswith("\n") else new + end
    if lines and not text.endswith("\n"):  # the last line has an end only where others follow
        lines[-1] = lines[-1].removesuffix("\n") + (end if line == len(lines) else "")
    changed = "".join((*lines[:line], added, *lines[line:]))
    return Change(text=changed, first_line=line + 1, num_lines=len(lines_of(added)))


def _places(text: str, old: str) -> str:
    lines: list[int] = []
    position = text.find(old)
    while position >= 0 and len(lines) <= _MAX_LISTED:
        lines.append(text.count("\n", 0, position) + 1)
        position = text.find(old, position + 1)
    listed = ", ".join(map(str, lines[:_MAX_LISTED]))
    return f"at lines {listed}{' and more' if len(lines) > _MAX_LISTED else ''}"


def _hint(text: str, old: str) -> str:
    """Say the likeliest reason, from what the text does hold."""
    if "\r\n" in text and old.replace("\r\n", "\n").replace("\n", "\r\n") in text:
        return "its lines end with CR LF, those of old_text do not"
    wanted = [line.strip() for line in old.splitlines() if line.strip()]
    for number, line in enumerate(lines_of(text), start=1):
        if wanted and line.strip() == wanted[0]:
            return f"line {number} is like its first line; compare white space and what follows"
    return "view the file and copy the text exactly"
