"""Limits of a tool server."""

from __future__ import annotations

from dataclasses import dataclass, fields

from agentrl.errors import ConfigError

_MOST = 2**31 - 1


@dataclass(slots=True, frozen=True, kw_only=True)
class ServerLimits:
    """What callers of a tool server may use, beside the limits of each tool.

    Raises:
        ConfigError: a limit that is not above 0, or is no number.
    """

    max_body_bytes: int = 4 * 2**20
    """Of a request."""
    body_timeout_s: float = 30.0
    """Seconds in which a request must have come in whole."""
    max_requests: int = 2048
    """Requests at once; those beyond are refused with 503."""
    max_sessions: int = 4096
    """Sessions at once; those beyond are refused with 503."""
    session_ttl_s: float = 900.0
    """Seconds without a call after which a session is closed."""
    max_answer_chars: int = 1_000_000
    """Characters of an answer that are sent, where the tool's limit of tokens allows more."""
    shutdown_timeout_s: float = 15.0
    """Seconds that calls in flight, and then the closing of all sessions, may take at the end."""

    def __post_init__(self) -> None:
        """Refuse what would let nobody in, or would be no limit."""
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not 0 < value <= _MOST:  # so that NaN is refused, too
                raise ConfigError(
                    f"{limit.name} must be above 0 and at most {_MOST:,}, got {value!r}"
                )
