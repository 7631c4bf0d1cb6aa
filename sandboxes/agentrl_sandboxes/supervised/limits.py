"""Refusing limits that would not limit."""

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
