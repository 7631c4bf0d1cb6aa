"""Paths as a model gives them, refused before any sandbox sees what looks like an escape.

This is for clear answers, and a first line. What really keeps a path inside is the sandbox,
which resolves it under its own root; a link is its business, not ours.
"""

from __future__ import annotations

import re
import unicodedata

from agentrl.errors import ToolError

WORK = "/box"
"""The workspace as programs in it see it."""

_MAX_CHARS = 1024
_ENCODED = re.compile(r"%(?:2e|2f|5c|00|u2215|c0%af)", re.IGNORECASE)
_LIKE_SLASH = "\u2044\u2215\u2571\u2572\u29f5\u29f8\u29f9\u2216"
_SHOWN_CHARS = 80


def check_path(path: str) -> str:
    """Return a path relative to the workspace.

    Raises:
        ToolError: it leads out of the workspace, or is written as if to hide that it does.
    """
    shown = repr(path if len(path) <= _SHOWN_CHARS else f"{path[:_SHOWN_CHARS]}...")
    if len(path) > _MAX_CHARS:
        raise ToolError(f"the path has {len(path)} characters, at most {_MAX_CHARS} are taken")
    if any(unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in path):
        raise ToolError(f"{shown} holds control characters; write the path in plain characters")
    if "\\" in path:
        raise ToolError(f"{shown} holds a backslash; separate folders with '/'")
    if path.startswith("~"):
        raise ToolError(f"{shown}: '~' means nothing here; give a path like src/main.py")
    if _ENCODED.search(path):
        raise ToolError(f"{shown} is percent-encoded; write the path in plain characters")
    if _hides_separator(path):
        raise ToolError(f"{shown} holds a character that only looks like '/' or '.'; use those")
    if path.startswith("/") and path != WORK and not path.startswith(f"{WORK}/"):
        raise ToolError(f"{shown} is outside of the workspace; give a path relative to {WORK}")
    parts = [part for part in path.removeprefix(WORK).split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ToolError(f"{shown} holds '..'; give a path inside of the workspace")
    return "/".join(parts)


def check_file(path: str) -> str:
    """Return the path of a file, relative to the workspace.

    Raises:
        ToolError: as :func:`check_path`, or it names the workspace itself.
    """
    inside = check_path(path)
    if not inside or path.endswith("/"):
        raise ToolError(f"{path!r:.80} names a folder; give the path of a file like src/main.py")
    return inside


def _hides_separator(path: str) -> bool:
    if any(char in path for char in _LIKE_SLASH):
        return True
    plain = unicodedata.normalize("NFKC", path)
    return any(plain.count(char) != path.count(char) for char in "/\\.")
