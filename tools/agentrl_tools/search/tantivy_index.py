"""An index in a folder, with tantivy: for runs that search often."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, DataError
from agentrl.extras import missing_extra
from agentrl_tools.search.corpus import Document
from agentrl_tools.search.writing import written_whole

_TITLE_WEIGHT = 2
"""As often the words of a title count: scored apart, they would outweigh any text."""
_WRITER_BYTES = 128 << 20


def build(documents: Iterable[Document], path: Path) -> None:
    """Write an index.

    Raises:
        ConfigError: the package is missing.
        DataError: there is a folder already, or it cannot be written.
    """
    tantivy = _module()
    if path.exists():
        raise DataError(f"{path} exists already; remove it or name another folder")
    schema = tantivy.SchemaBuilder()
    schema.add_text_field("id", stored=True, tokenizer_name="raw")
    schema.add_text_field("words", tokenizer_name="en_stem")
    schema.add_bytes_field("document", stored=True, indexed=False)
    try:
        with written_whole(path) as writing:
            writing.mkdir()
            index = tantivy.Index(schema.build(), path=str(writing))
            # One thread, so that documents, and with them ties, stay in corpus order.
            writer = index.writer(_WRITER_BYTES, num_threads=1)
            try:
                for document in documents:
                    writer.add_document(tantivy.Document(**_fields(document)))
                writer.commit()
            finally:
                writer.wait_merging_threads()  # they write where we clear up
    except (OSError, ValueError) as error:
        raise DataError(f"the index {path} cannot be written: {error}") from error


class TantivyIndex:
    """Reads an index, from any thread."""

    def __init__(self, path: Path) -> None:
        self._tantivy = _module()
        try:
            self._index = self._tantivy.Index.open(str(path))
            self._searcher = self._index.searcher()
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is no index of the engine tantivy: {error}") from error

    def search(self, terms: Sequence[str], limit: int) -> list[Document]:
        """See :class:`agentrl_tools.search.index.Index`."""
        query = self._index.parse_query(
            " ".join(f'"{term}"' for term in terms),  # words only: nothing in them needs escaping
            ["words"],
        )
        return self._documents(query, limit)

    def get(self, document_id: str) -> Document | None:
        """See :class:`agentrl_tools.search.index.Index`."""
        query = self._tantivy.Query.term_query(self._index.schema, "id", document_id)
        found = self._documents(query, 1)
        return found[0] if found else None

    def _documents(self, query: Any, limit: int) -> list[Document]:
        hits = self._searcher.search(query, limit, count=False).hits
        stored = (self._searcher.doc(address) for _, address in hits)
        return [Document(*json.loads(bytes(row.get_first("document")))) for row in stored]


def _fields(document: Document) -> dict[str, Any]:
    words = "\n".join((*[document.title] * _TITLE_WEIGHT, document.text))
    stored = json.dumps(astuple(document)).encode()
    return {"id": document.id, "words": words, "document": stored}


def _module() -> Any:
    try:
        import tantivy
    except ImportError as error:
        raise ConfigError(missing_extra("search", "engine: tantivy")) from error
    return tantivy
