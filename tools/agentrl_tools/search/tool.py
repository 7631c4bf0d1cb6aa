"""Answers queries from a local corpus; one index serves all trajectories of a process."""

from __future__ import annotations

from pathlib import Path

from agentrl.errors import ConfigError, ToolError
from agentrl.tool.base import ToolContext
from agentrl_tools.search.corpus import is_unicode
from agentrl_tools.search.index import open_index, terms_of
from agentrl_tools.search.snippets import snippet
from agentrl_tools.settings import refuse_below_one

SAMPLE = Path(__file__).with_name("sample.jsonl")
"""A few texts to try the tool with."""

_MAX_QUERY_CHARS = 1000


class Search:
    """Full-text search.

    Args:
        corpus: a JSONL file with id, title and text; indexed when the tool is first made. Without
            corpus and index a small sample is searched.
        index: what ``python -m agentrl_tools.search index`` made, for a large corpus.
        engine: ``fts5`` (SQLite), or ``tantivy``.
        max_results: of one query.
        snippet_words: words of each result.

    Raises:
        ConfigError, DataError: they cannot be used.
    """

    stateless = True

    def __init__(
        self,
        *,
        corpus: str | None = None,
        index: str | None = None,
        engine: str = "fts5",
        max_results: int = 5,
        snippet_words: int = 40,
    ) -> None:
        if corpus is not None and index is not None:
            raise ConfigError("corpus and index are both given; an index holds its corpus")
        refuse_below_one(max_results=max_results, snippet_words=snippet_words)
        self._index = open_index(
            engine=engine,
            corpus=SAMPLE if corpus is None else Path(corpus).expanduser(),
            index=None if index is None else Path(index).expanduser(),
        )
        self._max_results = max_results
        self._snippet_words = snippet_words

    def open(self, context: ToolContext) -> None:
        """Nothing to prepare: the index is open."""

    def call(self, query: str | None = None, id: str | None = None) -> str:
        """Return results of a query, or the text with an id.

        Raises:
            ToolError: not one of both, no words, or no such id.
            InfrastructureError: the index failed.
        """
        if (query is None) == (id is None):
            raise ToolError("give either query or id")
        if id is not None:
            return self._read(id)
        assert query is not None, "one of both is given"
        if len(query) > _MAX_QUERY_CHARS:
            raise ToolError(f"the query has {len(query)} characters, at most 1000 are taken")
        terms = terms_of(query)
        if not terms:
            raise ToolError("the query holds no words")
        found = self._index.search(terms, self._max_results)
        if not found:
            return "nothing found; try other words"
        return "\n".join(
            f"[{document.id}] {document.title}: "
            f"{snippet(document.text, terms, self._snippet_words)}"
            for document in found
        )

    def close(self) -> None:
        """Nothing to free: the index is the process's."""

    def _read(self, document_id: str) -> str:
        document = self._index.get(document_id) if is_unicode(document_id) else None
        if document is None:
            raise ToolError(
                f"no text has the id {document_id!r:.80}; ids stand in brackets before the titles"
            )
        return f"{document.title}\n{document.text}" if document.title else document.text
