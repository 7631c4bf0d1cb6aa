"""Sandboxes in containers of a Docker engine (extra `docker`)."""

from __future__ import annotations

from agentrl_sandboxes.docker.backend import DockerBackend

__all__ = ["DockerBackend"]
