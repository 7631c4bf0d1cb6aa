"""Sandbox backends by name."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.registry import Registry
from agentrl.sandbox.base import SandboxBackend

sandbox_registry: Registry[Callable[..., SandboxBackend]] = Registry(
    "sandbox backend", "agentrl.sandboxes"
)
