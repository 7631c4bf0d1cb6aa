"""Settings of the sandbox pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class SandboxConfig:
    """Which backend, and how many boxes at once."""

    id: str = "local"
    """``local`` (bubblewrap), ``docker``, ``http`` (a sandbox server), ``e2b``; or ``none``: a
    plain process without isolation, on request only."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the backend, checked against its signature."""
    max_open: int = 512
    """Sandboxes at once in this process; more wait their turn."""
    create_timeout_s: float = 30.0
    """For the start of one sandbox, waiting included."""
