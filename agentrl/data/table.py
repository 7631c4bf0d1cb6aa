"""Rows of a file, with what is needed to name one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, Any]


@dataclass(slots=True, frozen=True, kw_only=True)
class Table:
    """The rows of one file: plain data, as JSON has it."""

    name: str
    """Of the file, for messages."""
    rows: Sequence[Row]
    unit: str = "row"
    """``line`` of a text file, or ``row``."""
    numbers: Sequence[int]
    """1-based, one per row: blank lines of a text file count, and hold no row."""
    left_out: tuple[str, ...] = ()
    """Columns whose values are no plain data (images, time stamps), which no task can carry."""

    def place(self, index: int) -> str:
        """Name a row: ``train.jsonl, line 7``."""
        return f"{self.name}, {self.unit} {self.numbers[index]}"


def show(value: object, limit: int = 60) -> str:
    """Quote a value in a message, shortened."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
