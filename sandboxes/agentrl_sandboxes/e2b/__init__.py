"""Sandboxes of E2B: micro-VMs of a hosted service, or of an installation that speaks its API."""

from __future__ import annotations

from agentrl_sandboxes.e2b.backend import E2BBackend

__all__ = ["E2BBackend"]
