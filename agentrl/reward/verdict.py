"""The score in a judge's answer. Both searches are bounded, whatever the answer is."""

from __future__ import annotations

import asyncio
import math
import re

import regex

from agentrl.errors import ConfigError, RewardError

PATTERN_TIMEOUT_S = 1.0
"""For one search with a user's pattern."""
_TAIL_CHARS = 16_384
_LINE_CHARS = 200

_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]+)?"
# Between the colon and the number may stand what decorates it (**, quotes), but no sign and no
# point; after it no more of a number, so that a score is read whole or not at all.
_SCORE_LINE = re.compile(
    rf"""(?ix) (?:[^\w]|_){{0,40}} score (?:[^\w:=]|_){{0,20}} [:=]
    (?: [^\w.,+/%\-\u2010-\u2015\u2212] | _ ){{0,20}}?
    (?P<score> [-+]? {_NUMBER} )
    (?: \s{{0,3}} (?: / | out\s+of\s ) \s{{0,3}} (?P<limit> {_NUMBER} ) )?
    (?! \w | \s?[%/] | \s out\s+of\s | [.,:'\u2019]\w | \s?[-\u2010-\u2015\u2212]\s?[0-9] )"""
)


class NoScore(Exception):
    """An answer of a judge that holds no score in the range."""


class ScoreReader:
    """Finds the score in an answer.

    Args:
        pattern: regular expression whose first group is the score; its last match counts. None:
            the last line ``Score: NUMBER``, which may be decorated (``**Score:** 7/10``).
        low, high: range of the score. ``7/10`` and ``7 out of 10`` are read where ``high`` is 10.

    Raises:
        ConfigError: a pattern that does not compile, or has no group.
    """

    def __init__(self, pattern: str | None, *, low: float, high: float) -> None:
        self._pattern = None if pattern is None else _compiled(pattern)
        self._low, self._high = low, high

    async def read(self, text: str) -> float:
        """Return the score, in [low, high].

        Raises:
            NoScore: no score, or none in the range.
            RewardError: the user's pattern took longer than :data:`PATTERN_TIMEOUT_S`.
        """
        pattern = self._pattern
        if pattern is None:
            found = self._on_last_score_line(text)
        else:  # on a thread: its limit is of time, which the event loop cannot spend
            found = await asyncio.to_thread(_last_match, pattern, text)
        if found is None:
            sought = "line 'Score: NUMBER'" if pattern is None else f"match of {pattern.pattern!r}"
            raise NoScore(
                f"the judge's answer has no score: no {sought}; it ends with {text[-200:]!r}"
            )
        try:
            score = float(found)
        except ValueError as error:
            raise NoScore(f"the judge's score {found[:40]!r} is no number") from error
        if not (math.isfinite(score) and self._low <= score <= self._high):
            raise NoScore(
                f"the judge's score {score:g} is not between {self._low:g} and {self._high:g}"
            )
        return score

    def _on_last_score_line(self, text: str) -> str | None:
        lines = [line.strip()[:_LINE_CHARS] for line in text[-_TAIL_CHARS:].splitlines()]
        if len(text) > _TAIL_CHARS:
            lines = lines[1:]  # cut somewhere
        following = ""
        for line in reversed([line for line in lines if line]):
            # The number may stand on the line below its heading.
            found = _SCORE_LINE.match(f"{line} {following}")
            if found is not None:
                limit = found["limit"]
                return found["score"] if limit is None or float(limit) == self._high else None
            following = line
        return None


def _last_match(pattern: regex.Pattern[str], text: str) -> str | None:
    try:
        found = pattern.findall(text, timeout=PATTERN_TIMEOUT_S, concurrent=True)
    except TimeoutError as error:
        raise RewardError(
            f"the pattern {pattern.pattern!r} took more than {PATTERN_TIMEOUT_S:g} s on an answer "
            f"of {len(text)} characters; make it backtrack less (possessive quantifiers, atomic "
            "groups)"
        ) from error
    if not found:
        return None
    return found[-1] if isinstance(found[-1], str) else found[-1][0]


def _compiled(pattern: str) -> regex.Pattern[str]:
    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ConfigError(f"judge: pattern={pattern!r}: {error}") from error
    if compiled.groups < 1:
        raise ConfigError(f"judge: pattern={pattern!r} has no group; put the number in (...)")
    return compiled
