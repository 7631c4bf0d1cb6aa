"""Sandboxes of a sandbox server (`agentrl sandbox serve`), on this machine or another."""

from __future__ import annotations

from agentrl_sandboxes.http.backend import HttpBackend

__all__ = ["HttpBackend"]
