"""Refusing limits and deadlines that would not be any."""

from __future__ import annotations

import math

from agentrl.errors import ConfigError
from agentrl.sandbox.base import SandboxLimits

# A tmpfs of size 0 is one without a limit, and an interpreter maps some 20 MB by itself.
_LEAST = {"memory_mb": 32, "max_processes": 1, "disk_mb": 1, "output_bytes": 1}


def check_limits(limits: SandboxLimits) -> None:
    """Raise :class:`ConfigError` for a limit that cannot be enforced as it is meant."""
    for name, least in _LEAST.items():
        value = getattr(limits, name)
        if type(value) is not int or not least <= value < 2**31:
            raise ConfigError(
                f"sandbox limit {name} must be a whole number of at least {least}, got {value!r}"
            )
    for name in ("wall_s", "cpu_s"):
        value = getattr(limits, name)
        if not (isinstance(value, (int, float)) and math.isfinite(value) and 0 < value < 1e6):
            raise ConfigError(f"sandbox limit {name} must be a positive number, got {value!r}")


def check_seconds(**seconds: float) -> None:
    """Raise :class:`ConfigError` for an argument of a backend that is no number of seconds."""
    for name, value in seconds.items():
        if not 0 < value < 1e8:  # so that NaN is refused, too
            raise ConfigError(
                f"sandbox.kwargs.{name} must be a positive number of seconds, got {value!r}"
            )


def check_counts(least: int, **counts: int) -> None:
    """Raise :class:`ConfigError` for an argument of a backend below ``least``, or far too large."""
    for name, value in counts.items():
        if not least <= value < 2**31:
            raise ConfigError(
                f"sandbox.kwargs.{name} must be a whole number of at least {least}, got {value!r}"
            )
