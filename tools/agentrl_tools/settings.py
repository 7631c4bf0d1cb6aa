"""Numbers in ``kwargs`` of a tool, refused when the tool is made: most would mean 'no limit'."""

from __future__ import annotations

import math

from agentrl.errors import ConfigError


def refuse_below_one(**counts: int) -> None:
    """Refuse what is no count.

    Raises:
        ConfigError: names the setting.
    """
    for name, count in counts.items():
        if not count >= 1:
            raise ConfigError(f"{name}={count!r}: must be at least 1")


def refuse_no_time(**seconds: float) -> None:
    """Refuse what is no time limit.

    Raises:
        ConfigError: names the setting.
    """
    for name, value in seconds.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}={value!r}: must be a finite number of seconds above 0")
