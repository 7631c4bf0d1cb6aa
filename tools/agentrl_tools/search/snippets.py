"""The part of a text that a query is about, the same whichever engine found it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NO_WORD = re.compile(r"\W+")
_STEM_CHARS = 4


def snippet(text: str, terms: Sequence[str], num_words: int) -> str:
    """Return the first ``num_words`` words in a row with most of the terms, these in the middle."""
    words = text.split()
    if len(words) <= num_words:
        return " ".join(words)
    hits = [_term_in(word, terms) for word in words]
    start = _best_start(hits, len(terms), num_words)
    inside = [place for place in range(start, start + num_words) if hits[place] is not None]
    if inside:
        slack = num_words - (inside[-1] - inside[0] + 1)
        start = min(max(0, inside[0] - slack // 2), len(words) - num_words)
    before = "... " if start else ""
    after = " ..." if start + num_words < len(words) else ""
    return before + " ".join(words[start : start + num_words]) + after


def _best_start(hits: Sequence[int | None], num_terms: int, num_words: int) -> int:
    counts = [0] * num_terms
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
    return best_start


def _term_in(word: str, terms: Sequence[str]) -> int | None:
    plain = _NO_WORD.sub("", word.lower())
    for number, term in enumerate(terms):
        stem = term[: max(_STEM_CHARS, len(term) - 3)]
        if plain == term or (len(term) > _STEM_CHARS and plain.startswith(stem)):
            return number
    return None
