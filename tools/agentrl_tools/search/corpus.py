"""Corpora: one JSON object a line with id, title and text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import DataError
from agentrl_tools.search.writing import written_whole

_FIELDS = ("id", "title", "text")
_CHUNK_BYTES = 1 << 20


@dataclass(slots=True, frozen=True)
class Document:
    """One text of a corpus."""

    id: str
    title: str
    text: str


def read_corpus(path: Path) -> Iterator[Document]:
    """Yield the documents of a JSONL file.

    Raises:
        DataError: no such file, or a line that is no document or repeats an id; with its number.
    """
    seen: set[str] = set()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _document(line, f"{path}, line {number}", seen)
    except OSError as error:
        raise DataError(f"the corpus {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"the corpus {path} is no UTF-8 text: {error}") from error
    if not seen:
        raise DataError(f"the corpus {path} holds no document")


def write_corpus(documents: Iterable[Document], path: Path) -> int:
    """Write a JSONL file; return the number of documents."""
    rows = [{name: getattr(document, name) for name in _FIELDS} for document in documents]
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with written_whole(path) as writing:
        writing.write_text("".join(lines), encoding="utf-8")
    return len(rows)


def is_unicode(text: str) -> bool:
    """Return whether a text can be stored: JSON may spell halves of surrogate pairs."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _document(line: str, where: str, seen: set[str]) -> Document:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: no JSON ({error})") from error
    if not isinstance(row, dict) or set(row) != set(_FIELDS):
        got = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{where}: a document has id, title and text, got {got:.200}")
    for name in _FIELDS:
        if not isinstance(row[name], str) or (name != "title" and not row[name].strip()):
            raise DataError(f"{where}: {name} must be text, got {row[name]!r:.80}")
        if not is_unicode(row[name]):
            raise DataError(f"{where}: {name} holds half of a surrogate pair, which is no text")
    if row["id"] in seen:
        raise DataError(f"{where}: the id {row['id']!r:.80} is taken by an earlier line")
    seen.add(row["id"])
    return Document(**row)
