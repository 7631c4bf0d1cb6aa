"""From settings to a pool of sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.kwargs import check_kwargs
from agentrl.sandbox.base import SandboxBackend
from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.pool import SandboxPool
from agentrl.sandbox.registry import sandbox_registry


def make_backend(config: SandboxConfig) -> SandboxBackend:
    """Return the backend that the settings name, not yet started.

    Raises:
        RegistryError, ConfigError: no such backend, or arguments that it does not take.
    """
    backend = sandbox_registry.get(config.id)
    check_kwargs(backend, config.kwargs, key="sandbox.kwargs")
    return backend(**config.kwargs)


@asynccontextmanager
async def open_sandboxes(config: SandboxConfig) -> AsyncIterator[SandboxPool]:
    """Open a pool of sandboxes; its backend starts with the first one that is asked for.

    Raises:
        RegistryError, ConfigError: no such backend, or arguments that it does not take.
    """
    pool = SandboxPool(
        make_backend(config),
        max_open=config.max_open,
        create_timeout_s=config.create_timeout_s,
    )
    try:
        yield pool
    finally:
        await pool.close()
