"""Terms that shape a reward: length and format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
import regex

from agentrl.env.base import Episode
from agentrl.errors import ConfigError, RewardError
from agentrl.finite import got
from agentrl.registry import load_object
from agentrl.reward.conversation import said_by_model

PATTERN_TIMEOUT_S = 1.0
"""For one search. A pattern that backtracks longer is a mistake, not a text without a match."""


class Overlong:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).

    ``min(-(len - (L_max - buffer)) / buffer * penalty, 0)``, with ``len`` the tokens that the
    policy sampled in the episode: 0 up to the buffer, ``-penalty`` at ``L_max``.

    Args:
        max_response_tokens: ``L_max``; in a run it is ``rollout.max_response_tokens``.
        buffer_tokens: where it sets in, counted back from ``L_max``.
        penalty: what is taken off at ``L_max``.

    Raises:
        ConfigError: a buffer that is empty or larger than ``L_max``, or a negative penalty.
    """

    def __init__(
        self, *, max_response_tokens: int, buffer_tokens: int, penalty: float = 1.0
    ) -> None:
        if not 1 <= buffer_tokens <= max_response_tokens:
            raise ConfigError(
                f"overlong: buffer_tokens={buffer_tokens} must be between 1 and "
                f"rollout.max_response_tokens={max_response_tokens}"
            )
        if not 0 <= penalty < float("inf"):
            raise ConfigError(
                f"overlong: penalty={penalty} must be finite and at least 0; it is what is taken "
                "off at the limit"
            )
        self._start = max_response_tokens - buffer_tokens
        self._buffer_tokens = buffer_tokens
        self._penalty = penalty

    async def __call__(self, episode: Episode) -> float:
        """Return the punishment, at most 0."""
        excess = episode.num_sampled_tokens - self._start
        return min(-excess / self._buffer_tokens * self._penalty, 0.0)


class Format:
    """Whether the model kept to a format: 1, 0, or the share of turns.

    Args:
        pattern: a regular expression that must be found; anchor it to demand the whole text
            (``\\A...\\Z``). ``.`` matches line ends too.
        predicate: in its place a function ``(text) -> bool``, or the import path of one.
        turns: ``last``: the last turn. ``all``: the share of turns that keep to it.

    Raises:
        ConfigError: neither or both of pattern and predicate, or one that cannot be used.
        RegistryError: the predicate cannot be imported.
    """

    def __init__(
        self,
        pattern: str | None = None,
        *,
        predicate: str | Callable[[str], bool] | None = None,
        turns: Literal["last", "all"] = "last",
    ) -> None:
        if (pattern is None) == (predicate is None):
            raise ConfigError("format: give either a pattern or a predicate")
        if turns not in ("last", "all"):
            raise ConfigError(f"format: turns={turns!r} must be 'last' or 'all'")
        self._turns = turns
        self._matches = _Search(pattern) if pattern is not None else _imported(predicate)

    def __call__(self, episode: Episode) -> float:
        """Return the share of the turns asked about that keep to the format."""
        said = said_by_model(episode)
        texts = said if self._turns == "all" else said[-1:]
        return sum(self._verdict(text) for text in texts) / len(texts) if texts else 0.0

    def _verdict(self, text: str) -> bool:
        verdict = self._matches(text)
        if not isinstance(verdict, bool | np.bool_):
            raise RewardError(f"the predicate must return a bool, got {got(verdict)}")
        return bool(verdict)


class _Search:
    """A pattern as a predicate; picklable, as rubrics of environments have to be."""

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise ConfigError(f"format: pattern={pattern!r}: {error}") from error

    def __call__(self, text: str) -> bool:
        try:
            found = self._pattern.search(text, timeout=PATTERN_TIMEOUT_S, concurrent=True)
        except TimeoutError as error:
            raise RewardError(
                f"the pattern {self._pattern.pattern!r} took more than {PATTERN_TIMEOUT_S:g} s on "
                f"a text of {len(text)} characters; make it backtrack less (possessive "
                "quantifiers, atomic groups)"
            ) from error
        return found is not None


def _imported(predicate: str | Callable[[str], bool] | None) -> Callable[[str], bool]:
    found: Any = predicate
    if isinstance(predicate, str):
        found = load_object(predicate, kind="format: predicate")
    if isinstance(found, type) or not callable(found):
        raise ConfigError(f"format: predicate must be a function of the text, got {got(found)}")
    return cast(Callable[[str], bool], found)
