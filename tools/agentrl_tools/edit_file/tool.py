"""Changes text files through the sandbox: whole files are written, or nothing is."""

from __future__ import annotations

from agentrl.errors import SandboxError, ToolError
from agentrl.sandbox.base import Sandbox, SandboxLimits
from agentrl.tool.base import ToolContext
from agentrl_tools.edit_file.change import Change, insert, replace
from agentrl_tools.paths import check_file
from agentrl_tools.text_files import MAX_FILE_BYTES, lines_of, number_lines, read_text

_AROUND_LINES = 2
_MAX_SHOWN_LINES = 12
_MAX_LINE_CHARS = 200


class EditFile:
    """Exact replacement, insertion, or a whole new text; shows the lines around a change."""

    def __init__(self) -> None:
        self.workspace_limits = SandboxLimits()
        self._sandbox: Sandbox | None = None

    async def open(self, context: ToolContext) -> None:
        """Get the workspace.

        Raises:
            SandboxError: there is no sandbox to be had.
        """
        self._sandbox = await context.workspace()

    async def call(
        self,
        path: str,
        command: str,
        new_text: str,
        old_text: str | None = None,
        line: int | None = None,
    ) -> str:
        """Change a file and show what it became.

        Raises:
            ToolError: the path, the command's arguments or the file do not allow it; the file is
                then as it was.
        """
        if self._sandbox is None:
            raise SandboxError("edit_file was called before it was opened")
        inside = check_file(path)
        if command == "create":
            if old_text is not None or line is not None:
                raise ToolError("create takes new_text only; use replace or insert for a part")
            change = Change(text=new_text, first_line=1, num_lines=len(lines_of(new_text)))
        elif command == "replace":
            if old_text is None or line is not None:
                raise ToolError("replace takes old_text and new_text")
            change = replace(await read_text(self._sandbox, inside), old_text, new_text, inside)
        else:
            if line is None or old_text is not None:
                raise ToolError("insert takes line and new_text")
            change = insert(await read_text(self._sandbox, inside), line, new_text, inside)
        await self._sandbox.write(inside, _encode(change.text))
        if command == "create":
            return f"wrote {inside}: {change.num_lines} lines"
        return f"changed {inside}:\n{_show(change)}"

    async def close(self) -> None:
        """Let go of the workspace, which others may still use."""
        self._sandbox = None


def _encode(text: str) -> bytes:
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ToolError(f"new_text is no Unicode text ({error.reason})") from None
    if b"\0" in data:
        raise ToolError("new_text must not hold NUL characters")
    if len(data) > MAX_FILE_BYTES:
        raise ToolError(f"the file would have {len(data)} bytes, at most {MAX_FILE_BYTES}")
    return data


def _show(change: Change) -> str:
    lines = lines_of(change.text)
    if not lines:
        return "(empty file)"
    first = max(1, change.first_line - _AROUND_LINES)
    last = min(len(lines), change.first_line + change.num_lines - 1 + _AROUND_LINES)
    shown_last = min(last, first + _MAX_SHOWN_LINES - 1)
    text = number_lines(lines, first, shown_last, max_chars=_MAX_LINE_CHARS)
    return text if shown_last == last else f"{text}\n[{last - shown_last} more lines]"
