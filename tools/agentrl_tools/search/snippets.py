"""The part of a text that a query is about, the same whichever engine found it."""

from __future__ import annotations

from collections.abc import Sequence

_MARKS = "\"'()[]{}<>,.;:!?-/*"
_STEM_CHARS = 4


def snippet(text: str, terms: Sequence[str], num_words: int) -> str:
    """Return the first ``num_words`` words in a row with most of the terms, these in the middle."""
    words = text.split()
    if len(words) <= num_words:
        return " ".join(words)
    hits = _places(words, terms)
    start = _best_start(hits, num_words)
    if start:  # the beginning reads best as it is; elsewhere the words come into the middle
        inside = [place for place, _ in hits if start <= place < start + num_words]
        slack = num_words - (inside[-1] - inside[0] + 1)
        start = min(max(0, inside[0] - slack // 2), len(words) - num_words)
    before = "... " if start else ""
    after = " ..." if start + num_words < len(words) else ""
    return before + " ".join(words[start : start + num_words]) + after


def _places(words: Sequence[str], terms: Sequence[str]) -> list[tuple[int, int]]:
    """Return (place of a word, number of the term that it is a form of)."""
    number_of = {term: number for number, term in enumerate(terms)}
    long_terms = (term for term in terms if len(term) >= _STEM_CHARS)
    stems = {term[: max(_STEM_CHARS, len(term) - 3)]: number_of[term] for term in long_terms}
    any_stem = tuple(stems)
    found = []
    for place, word in enumerate(words):
        plain = word.lower().strip(_MARKS)
        number = number_of.get(plain)
        if number is None and plain.startswith(any_stem):
            number = next(n for stem, n in stems.items() if plain.startswith(stem))
        if number is not None:
            found.append((place, number))
    return found


def _best_start(hits: Sequence[tuple[int, int]], num_words: int) -> int:
    """Return where the first window with the most distinct terms begins: at 0, or with a term."""
    best_start, best = 0, _num_distinct(hits, 0, num_words)
    for index, (start, _) in enumerate(hits):
        distinct = _num_distinct(hits, index, start + num_words)
        if distinct > best:
            best_start, best = start, distinct
    return best_start


def _num_distinct(hits: Sequence[tuple[int, int]], index: int, end: int) -> int:
    """Count the terms of the hits from an index on that lie before a place."""
    seen: set[int] = set()
    for later in range(index, len(hits)):
        place, number = hits[later]
        if place >= end:
            break
        seen.add(number)
    return len(seen)
