"""An index in one SQLite file, with the FTS5 extension that Python brings."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from agentrl.errors import DataError, InfrastructureError
from agentrl_tools.search.corpus import Document
from agentrl_tools.search.writing import written_whole

_TITLE_WEIGHT = 2.0
_SCHEMA = """
CREATE TABLE documents (number INTEGER PRIMARY KEY, id TEXT UNIQUE, title TEXT, text TEXT);
CREATE VIRTUAL TABLE words USING fts5(
  title, text, content='documents', content_rowid='number', tokenize='porter unicode61');
"""
# Ranked first and read then: a join of all that matches would read every text.
_SEARCH = f"""
SELECT id, title, text FROM (
  SELECT rowid AS place, bm25(words, {_TITLE_WEIGHT}, 1.0) AS score FROM words
  WHERE words MATCH ? ORDER BY score, place LIMIT ?
) JOIN documents ON number = place ORDER BY score, place
"""


def build(documents: Iterable[Document], path: Path) -> None:
    """Write an index.

    Raises:
        DataError: there is a file already, or it cannot be written.
    """
    if path.exists():
        raise DataError(f"{path} exists already; remove it or name another file")
    try:
        with (
            written_whole(path) as writing,
            contextlib.closing(sqlite3.connect(writing)) as connection,
        ):
            connection.executescript(_SCHEMA)
            rows = ((document.id, document.title, document.text) for document in documents)
            connection.executemany("INSERT INTO documents (id, title, text) VALUES (?, ?, ?)", rows)
            connection.execute("INSERT INTO words (words) VALUES ('rebuild')")
            connection.execute("INSERT INTO words (words) VALUES ('optimize')")
            connection.commit()
    except (sqlite3.Error, OSError) as error:
        raise DataError(f"the index {path} cannot be written: {error}") from error


class Fts5Index:
    """Reads an index; every thread has a connection of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        try:
            self._connection().execute("SELECT number FROM documents LIMIT 1").fetchone()
        except sqlite3.Error as error:
            raise DataError(f"{path} is no index of the engine fts5: {error}") from error

    def search(self, terms: Sequence[str], limit: int) -> list[Document]:
        """See :class:`agentrl_tools.search.index.Index`."""
        # Quoted, a term is a term: '-', '*' or AND outside of quotes would be syntax.
        match = " OR ".join('"' + term.replace('"', '""') + '"' for term in terms)
        return [Document(*row) for row in self._rows(_SEARCH, (match, limit))]

    def get(self, document_id: str) -> Document | None:
        """See :class:`agentrl_tools.search.index.Index`."""
        rows = self._rows("SELECT id, title, text FROM documents WHERE id = ?", (document_id,))
        return Document(*rows[0]) if rows else None

    def _rows(self, statement: str, values: tuple[str | int, ...]) -> list[tuple[str, str, str]]:
        try:
            return self._connection().execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise InfrastructureError(f"the index {self._path} failed: {error}") from error

    def _connection(self) -> sqlite3.Connection:
        if not hasattr(self._local, "connection"):
            uri = f"file:{quote(str(self._path.absolute()))}?mode=ro&immutable=1"
            self._local.connection = sqlite3.connect(uri, uri=True)
        return self._local.connection
