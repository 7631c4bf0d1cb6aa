"""Text files of the workspace: read through the sandbox, shown with numbers."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.errors import ToolError
from agentrl.sandbox.base import Sandbox

MAX_FILE_BYTES = 2 << 20
"""Beyond this a file is searched or cut with commands, not read whole into an answer."""


async def read_text(sandbox: Sandbox, path: str) -> str:
    """Return a file's text, line ends as they are.

    Raises:
        ToolError: no such regular file, too large, or no UTF-8 text.
    """
    try:
        data = await sandbox.read(path)
    except ToolError as error:
        raise ToolError(f"{error}; search_files shows which files there are") from None
    if len(data) > MAX_FILE_BYTES:
        raise ToolError(
            f"{path} has {len(data)} bytes, at most {MAX_FILE_BYTES} are read; use a command "
            "that shows a part of it"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ToolError(f"{path} is no UTF-8 text (byte {error.start}); use a command") from None
    if "\0" in text:
        raise ToolError(f"{path} is a binary file; use a command")
    return text


def lines_of(text: str) -> list[str]:
    """Return the lines as commands count them: only a line feed ends one."""
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


def number_lines(lines: Sequence[str], first: int, last: int, *, max_chars: int) -> str:
    """Return lines ``first`` to ``last``, counted from 1, each behind its number."""
    shown = []
    for number in range(first, last + 1):
        line = lines[number - 1].removesuffix("\r")
        if len(line) > max_chars:
            line = f"{line[:max_chars]}[{len(line) - max_chars} more characters]"
        shown.append(f"{number}\t{line}")
    return "\n".join(shown)
