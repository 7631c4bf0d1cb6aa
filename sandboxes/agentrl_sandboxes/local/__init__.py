"""The sandbox of this machine: bubblewrap namespaces, and `sandbox.id=none` by name only."""

from __future__ import annotations

from agentrl_sandboxes.local.backend import LocalBackend
from agentrl_sandboxes.local.unsafe import UnsafeBackend

__all__ = ["LocalBackend", "UnsafeBackend"]
