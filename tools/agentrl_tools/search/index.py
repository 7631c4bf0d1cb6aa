"""What an index is, and the one instance of each that a process holds."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from agentrl.errors import ConfigError
from agentrl_tools.search import fts5, tantivy_index
from agentrl_tools.search.corpus import Document, read_corpus
from agentrl_tools.search.own_folder import own_folder

_MAX_TERMS = 32
_WORD = re.compile(r"\w+")
_COMMON = re.compile(
    "a|about|an|and|are|as|at|be|been|but|by|can|did|do|does|for|from|had|has|have|he|her|his|how|"
    "i|if|in|into|is|it|its|may|not|of|on|or|s|she|so|such|than|that|the|their|them|then|there|"
    "these|they|this|to|was|were|what|when|where|which|who|whom|whose|why|will|with|would"
)
"""English words in so many texts that they cost most of a query's time and tell nothing."""


class Index(Protocol):
    """A corpus that can be searched from any thread."""

    def search(self, terms: Sequence[str], limit: int) -> list[Document]:
        """Return documents with any of the terms, the best first; ties in corpus order."""
        ...

    def get(self, document_id: str) -> Document | None:
        """Return a document by its id."""
        ...


ENGINES: dict[str, tuple[Callable[..., None], Callable[[Path], Index]]] = {
    "fts5": (fts5.build, fts5.Fts5Index),
    "tantivy": (tantivy_index.build, tantivy_index.TantivyIndex),
}
"""Name to ``build(documents, path)`` and ``open(path)``."""

_opened: dict[tuple[str, str, int], Index] = {}
_lock = threading.Lock()


def terms_of(query: str) -> list[str]:
    """Return the distinct words of a query: whatever else it holds is no syntax.

    Words that are in most texts are left out, unless there are no others.
    """
    words = list(dict.fromkeys(word.lower() for word in _WORD.findall(query)))
    return ([word for word in words if not _COMMON.fullmatch(word)] or words)[:_MAX_TERMS]


def open_index(*, engine: str, corpus: Path | None, index: Path | None) -> Index:
    """Return the index at a path, or that of a corpus, which is built for this process.

    Raises:
        ConfigError: an unknown engine, or one whose package is missing.
        DataError: a corpus or an index that cannot be used.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r}; known: {', '.join(ENGINES)}")
    build, load = ENGINES[engine]
    source = index if index is not None else corpus
    assert source is not None, "one of them is given"
    changed = source.stat().st_mtime_ns if source.exists() else 0
    key = (engine, str(source.resolve()), changed)
    with _lock:  # building once is worth waiting for
        if key not in _opened:
            if index is None:
                index = own_folder() / "index"
                build(read_corpus(source), index)
            _opened[key] = load(index)
        return _opened[key]
