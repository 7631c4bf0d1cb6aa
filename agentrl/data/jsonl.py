"""Tasks from JSON lines: one object per line, UTF-8."""

from __future__ import annotations

import codecs
import json
import math
from pathlib import Path
from typing import Any, NoReturn

from agentrl.data.table import Row, Table, show
from agentrl.errors import DataError

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_jsonl(path: Path) -> Table:
    """Read a file of JSON lines. A byte order mark and blank lines are passed over.

    Raises:
        DataError: no such file, or a line that is no JSON object; names file and line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    if content.startswith(_UTF16):
        raise DataError(f"{path} is UTF-16; save it as UTF-8")
    content = content.removeprefix(codecs.BOM_UTF8)
    rows: list[Row] = []
    numbers: list[int] = []
    decode = json.JSONDecoder(
        object_pairs_hook=_distinct, parse_constant=_no_constant, parse_float=_finite
    ).decode
    # By newline alone: text within JSON may hold what other splitters take for the end of a line.
    for number, line in enumerate(content.split(b"\n"), start=1):
        text = line.strip()
        if not text:
            continue
        try:
            row = decode(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {number} is not UTF-8: {error.reason}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(_broken(path, number, text, error)) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{path}, line {number} holds {_kind(row)}, not an object: write one task a line, "
                '{"prompt": ..., "answer": ...}'
            )
        rows.append(row)
        numbers.append(number)
    return Table(name=str(path), rows=rows, unit="line", numbers=numbers)


def _broken(path: Path, number: int, text: bytes, error: Exception) -> str:
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    shown = show(text[:80].decode("utf-8", "replace"), 84)
    hint = "; a file with one JSON array over several lines is no JSONL" if text == b"[" else ""
    return f"{path}, line {number} is broken JSON: {reason}, in {shown}{hint}"


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object; JSON's own rule, the last of two equal names wins, would lose data."""
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the name {twice!r} stands twice in one object")
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    """Read a number; a float would silently make infinity of one beyond its range."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{show(text, 40)} is beyond the range of a 64-bit float (1.8e308)")
    return number


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")
