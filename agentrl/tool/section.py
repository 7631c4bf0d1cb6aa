"""A mapping inside a spec file: values by type, and errors that say where they stand."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ToolSpecError
from agentrl.tool.yaml_io import Document, Key

MAX_SECONDS = 1_000_000
"""Eleven days: more is no deadline, and far more is refused by the system's clocks."""
MAX_WHOLE = 2**31 - 1
"""Of every number that has no other limit."""


@dataclass(slots=True, frozen=True)
class Section:
    """A mapping of a file.

    Every method that reads raises :class:`ToolSpecError` with file, line and column where the value
    is missing (and there is no default) or of another type.
    """

    document: Document
    path: tuple[Key, ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        """What stands there, as plain values."""
        value: Any = self.document.value
        for key in self.path:
            value = value[key]
        return value

    def __contains__(self, key: str) -> bool:
        """Return whether the key stands there."""
        return key in self.values

    def error(self, problem: str, *path: Key, at_key: bool = False) -> ToolSpecError:
        """Return an error at a place inside; see :meth:`Document.error`."""
        return self.document.error(problem, *self.path, *path, at_key=at_key)

    def dotted(self, *path: Key) -> str:
        """Return how a message calls a place inside: ``http.headers``."""
        return ".".join(str(key) for key in (*self.path, *path))

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Refuse keys beyond ``known``, with the nearest of them."""
        for key in self.values:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                where = f"{self.dotted()}: " if self.path else ""
                raise self.error(
                    f"{where}unknown key {key!r}; {hint}known: {', '.join(known)}", key, at_key=True
                )

    def section(self, key: str) -> Section:
        """Return the mapping at a key."""
        if not isinstance(self._required(key, "a mapping"), dict):
            raise self._wrong(key, "a mapping")
        return Section(self.document, (*self.path, key))

    def mapping(self, key: str) -> dict[str, Any]:
        """Return plain values; nothing where the key is absent."""
        return self.section(key).values if key in self.values else {}

    def text(self, key: str, default: str | None = None) -> str:
        """Return text that is not blank."""
        if key not in self.values and default is not None:
            return default
        value = self._required(key, "text")
        if not isinstance(value, str) or not value.strip():
            raise self._wrong(key, "text")
        return value.strip()

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        """Return one of several words."""
        value = self.text(key, default)
        if value not in choices:
            raise self._wrong(key, f"one of {', '.join(choices)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def number(
        self, key: str, default: float, *, minimum: float, maximum: float = MAX_WHOLE
    ) -> float:
        """Return a finite number."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, "a number")
        if not math.isfinite(value) or not minimum <= value <= maximum:
            raise self.error(
                f"{self.dotted(key)}={value} must be at least {minimum:g} and at most {maximum:,}",
                key,
            )
        return value

    def integer(self, key: str, default: int, *, minimum: int, maximum: int = MAX_WHOLE) -> int:
        """Return a whole number."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "a number without a fraction")
        return int(self.number(key, default, minimum=minimum, maximum=maximum))

    def texts(self, key: str, default: Sequence[str] | None = None) -> tuple[str, ...]:
        """Return a list of texts."""
        if key not in self.values and default is not None:
            return tuple(default)
        value = self._required(key, "a list of texts")
        if not isinstance(value, list):
            raise self._wrong(key, "a list of texts")
        for index, item in enumerate(value):
            if not isinstance(item, str) or not item:
                raise self.error(
                    f"{self.dotted(key, index)} must be text, got {_shown(item)}; quote it",
                    key,
                    index,
                )
        return tuple(value)

    def text_mapping(self, key: str) -> dict[str, str]:
        """Return a mapping of texts; nothing where the key is absent."""
        values = self.mapping(key)
        for name, item in values.items():
            if not isinstance(item, str):
                raise self.error(
                    f"{self.dotted(key, name)} must be text, got {_shown(item)}; quote it",
                    key,
                    name,
                )
        return values

    def _required(self, key: str, kind: str) -> Any:
        if key not in self.values:
            raise self.error(f"{self.dotted(key)} is missing; it is {kind}")
        return self.values[key]

    def _wrong(self, key: str, kind: str) -> ToolSpecError:
        got = _shown(self.values.get(key))
        return self.error(f"{self.dotted(key)} must be {kind}, got {got}", key)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:97]}..."
