"""Settings of an environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class EnvConfig:
    """Which environment, with which arguments, hosted how."""

    id: str = ""
    """A registered id, ``package.module:Class`` or ``./file.py:Class``."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    threads: int = 16
    """Threads that synchronous environments share; each environment stays on one."""
    processes: int = 4
    """Child processes that environments share where they run in processes."""
    process: bool | None = None
    """Run environments in processes of their own. None: as the class says."""
    reset_timeout_s: float = 30.0
    step_timeout_s: float = 30.0
    close_timeout_s: float = 5.0
    max_leaked_threads: int = 8
    """Threads lost to environments that hang before the run stops."""
