"""The part of a text that a query is about, the same whichever engine found it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NO_WORD = re.compile(r"\W+")
_STEM_CHARS = 4


def snippet(text: str, terms: Sequence[str], num_words: int) -> str:
    """Return the first window of ``num_words`` words that holds most of the terms."""
    words = text.split()
    if len(words) <= num_words:
        return " ".join(words)
    hits = [_term_in(word, terms) for word in words]
    counts = [0] * len(terms)
    best_start, best = 0, -1
    for end, hit in enumerate(hits):
        if hit is not None:
            counts[hit] += 1
        start = end - num_words + 1
        if start > 0 and (left := hits[start - 1]) is not None:
            counts[left] -= 1
        distinct = sum(count > 0 for count in counts)
        if start >= 0 and distinct > best:
            best_start, best = start, distinct
    before = "... " if best_start else ""
    after = " ..." if best_start + num_words < len(words) else ""
    return before + " ".join(words[best_start : best_start + num_words]) + after


def _term_in(word: str, terms: Sequence[str]) -> int | None:
    plain = _NO_WORD.sub("", word.lower())
    for number, term in enumerate(terms):
        stem = term[: max(_STEM_CHARS, len(term) - 3)]
        if plain == term or (len(term) > _STEM_CHARS and plain.startswith(stem)):
            return number
    return None
