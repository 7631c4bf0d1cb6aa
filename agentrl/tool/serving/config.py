"""Limits of a tool server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True, kw_only=True)
class ServerLimits:
    """What callers of a tool server may use, beside the limits of each tool."""

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
