"""A circuit breaker per tool: what is down is not asked again by every trajectory of a run.

::

    closed --(max_failures in a row)--> open --(cooldown_s)--> half-open --(an answer)--> closed
                                          ^                        |
                                          +----(the probe fails)---+

Only infrastructure failures count. Whatever else a call ends with, an error of the model or a late
tool included, shows that somebody answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from agentrl.errors import InfrastructureError, ToolUnavailable

_MAX_SHOWN = 200
"""Characters of an error that messages repeat."""


@dataclass(slots=True, kw_only=True)
class BreakerConfig:
    """When a tool that fails is left alone, and when the run gives up on it."""

    max_failures: int = 8
    """Infrastructure failures of a tool in a row, over all trajectories of a process, after which
    its calls fail at once."""
    cooldown_s: float = 5.0
    """Seconds until one call may try again; as long after every try that fails."""
    give_up_s: float = 120.0
    """Seconds without an answer after which the next try that fails stops the run."""


class BreakerState(StrEnum):
    """Whether calls go through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """One call is trying; others fail at once."""


class CircuitOpen(InfrastructureError):
    """A call that was not made, since those before it failed."""


class CircuitBreaker:
    """Decides for every call of one tool whether it is made. Used from one event loop.

    ::

        is_probe = breaker.admit()
        try:
            ...                                     # the call
            breaker.answered()
        except InfrastructureError as error:
            breaker.failed(str(error), is_probe=is_probe)
        except asyncio.CancelledError:
            breaker.abandoned(is_probe=is_probe)

    Args:
        tool: its name, for messages.
        config: when to open, to try again, and to give up.
        clock: seconds, monotonic.

    Attributes:
        num_opened: times that it opened, over its life.
        num_refused: calls that were not made.
    """

    def __init__(
        self,
        tool: str,
        config: BreakerConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tool = tool
        self._config = config or BreakerConfig()
        self._clock = clock
        self._num_failures = 0
        self._last_error = ""
        self._failing_since_s = 0.0
        self._retry_at_s: float | None = None
        self._is_probing = False
        self.num_opened = 0
        self.num_refused = 0

    @property
    def state(self) -> BreakerState:
        """Whether calls go through now."""
        if self._retry_at_s is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._is_probing else BreakerState.OPEN

    @property
    def cooling_s(self) -> float:
        """Seconds until a call may try; 0 where one may now, or is trying."""
        if self._retry_at_s is None or self._is_probing:
            return 0.0
        return max(0.0, self._retry_at_s - self._clock())

    def admit(self) -> bool:
        """Let a call through; return whether it is the one that tries out an open circuit.

        Raises:
            CircuitOpen: it is not to be made.
        """
        if self._retry_at_s is None:
            return False
        if not self._is_probing and self._clock() >= self._retry_at_s:
            self._is_probing = True
            return True
        self.num_refused += 1
        raise CircuitOpen(
            f"not called: the last {self._num_failures} calls of {self._tool} failed on our side "
            f"(the last: {self._last_error})"
        )

    def answered(self) -> None:
        """Note that a call was answered, whatever with."""
        self._num_failures = 0
        self._retry_at_s = None
        self._is_probing = False

    def failed(self, error: str, *, is_probe: bool) -> None:
        """Note an infrastructure failure.

        Raises:
            ToolUnavailable: nothing has answered for ``give_up_s`` seconds, this probe included.
        """
        is_open = self._retry_at_s is not None
        if is_open and not is_probe:
            return  # made before it opened: says nothing new
        now_s = self._clock()
        if self._num_failures == 0:
            self._failing_since_s = now_s
        self._num_failures += 1
        self._last_error = error[:_MAX_SHOWN]
        if not is_open and self._num_failures < self._config.max_failures:
            return
        self.num_opened += not is_open
        self._is_probing = False
        self._retry_at_s = now_s + self._config.cooldown_s
        failing_s = now_s - self._failing_since_s
        if is_open and failing_s >= self._config.give_up_s:
            raise ToolUnavailable(
                f"tool {self._tool!r} has not answered for {failing_s:.0f} s "
                f"({self._num_failures} failures in a row, the last: {self._last_error}); going on "
                "would fail every trajectory. Mend the tool or its server and resume the run, or "
                f"wait longer with tools.breaker.give_up_s (now {self._config.give_up_s:g})"
            )

    def abandoned(self, *, is_probe: bool) -> None:
        """Note that nobody waits for a call any more: the next one may try instead."""
        if is_probe:
            self._is_probing = False
