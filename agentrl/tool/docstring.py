"""What a docstring says of a function and of its parameters (sections in Google's style)."""

from __future__ import annotations

import re

_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Warnings?):\s*$"
)
_PARAMETERS = ("Args", "Arguments", "Parameters")
_ENTRY = re.compile(r"(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description, and what is said of each parameter.

    Args:
        text: without the indentation of the code (``inspect.getdoc``).
    """
    described: list[str] = []
    entries: dict[str, list[str]] = {}
    section, name, indent = "", "", 0
    for line in text.splitlines():
        header = _SECTION.match(line)
        if header:
            section, name, indent = header.group(1), "", 0
            continue
        if not section:
            described.append(line)
            continue
        if section not in _PARAMETERS:
            continue
        entry = _ENTRY.match(line)
        depth = len(line) - len(line.lstrip())
        if entry and (not indent or depth == indent):
            name, indent = entry.group(2), depth
            entries[name] = [entry.group(3)]
        elif name:
            entries[name].append(line)
    return _reflowed(described), {key: _reflowed(lines) for key, lines in entries.items()}


def _reflowed(lines: list[str]) -> str:
    """Join the lines of each paragraph."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(line.strip() for line in lines).strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
