"""The URL of an ``http:`` tool: fixed, but for arguments in path segments and query values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from agentrl.errors import ToolError

_FIELD = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_URL = re.compile(r"(https?)://([^/?#{}\s\\@]+)(/[^?#\s\\]*)?(?:\?([^#\s\\]*))?")


@dataclass(slots=True, frozen=True)
class UrlTemplate:
    """A URL with ``{name}`` for arguments."""

    scheme: str
    authority: str
    """Host and port; nothing of a model's gets here."""
    path: str
    query: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> UrlTemplate:
        """Read a template.

        Raises:
            ValueError: says why it is none.
        """
        match = _URL.fullmatch(text)
        if match is None:
            raise ValueError(
                "write http:// or https://, a host without {...}, and a path and query where "
                "{name} stands for an argument; no user name, no fragment, no blanks"
            )
        scheme, authority, path, query = match.groups()
        pairs: list[tuple[str, str]] = []
        for pair in (query or "").split("&") if query else ():
            name, equals, value = pair.partition("=")
            if "{" in name or "}" in name or not equals:
                raise ValueError(f"the query has {pair!r}; an argument stands after '=' only")
            pairs.append((name, value))
        for part in (path or "", *(value for _, value in pairs)):
            fields = _FIELD.findall(part)
            if "{" in _FIELD.sub("", part) or "}" in _FIELD.sub("", part):
                raise ValueError(f"{part!r} has a brace without its pair")
            for name in fields:
                if not _NAME.fullmatch(name):
                    raise ValueError(f"{{{name}}} is no name of an argument")
        return cls(scheme, authority, path or "/", tuple(pairs))

    @property
    def path_names(self) -> list[str]:
        """Arguments in the path."""
        return _FIELD.findall(self.path)

    @property
    def names(self) -> list[str]:
        """Arguments in path and query."""
        return self.path_names + [name for _, value in self.query for name in _FIELD.findall(value)]

    def fill(self, arguments: Mapping[str, Any]) -> str:
        """Return the URL; a query value whose argument is absent is left out with its name.

        Raises:
            ToolError: a value that cannot stand in a path.
        """
        segments = [self._segment(part, arguments) for part in self.path.split("/")]
        pairs = [
            f"{name}={_FIELD.sub(lambda m: _encoded(arguments[m.group(1)]), value)}"
            for name, value in self.query
            if all(arguments.get(field) is not None for field in _FIELD.findall(value))
        ]
        query = f"?{'&'.join(pairs)}" if pairs else ""
        return f"{self.scheme}://{self.authority}{'/'.join(segments)}{query}"

    @staticmethod
    def _segment(part: str, arguments: Mapping[str, Any]) -> str:
        names = _FIELD.findall(part)
        if not names:
            return part
        filled = _FIELD.sub(lambda m: _encoded(arguments[m.group(1)]), part)
        # Dots are never encoded, and a server or proxy takes such a segment for a way upwards.
        if filled in ("", ".", ".."):
            raise ToolError(f"{names[0]}: {arguments[names[0]]!r} cannot stand in a path")
        return filled


def _encoded(value: Any) -> str:
    """Return a value so that it stays one segment or one value."""
    return quote(plain(value), safe="")


def plain(value: Any) -> str:
    """Return a scalar as URLs have it.

    Raises:
        ToolError: no scalar.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ToolError(f"a URL takes text, numbers and booleans, not {type(value).__name__}")
