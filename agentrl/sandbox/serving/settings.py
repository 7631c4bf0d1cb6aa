"""Settings of the sandbox server, as its processes hand them on."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from agentrl.errors import ConfigError
from agentrl.sandbox.base import SandboxLimits
from agentrl.sandbox.serving.wire import parse_limits

_LEAST_TOKEN = 16
_DEFAULT_TOKEN_ENV = "AGENTRL_SANDBOX_TOKEN"
_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
_MOST = 1_000_000
"""Of seconds and of counts: more is a mistake, and more than clocks take."""


def _generous() -> SandboxLimits:
    return SandboxLimits(
        wall_s=600.0,
        cpu_s=3600.0,
        memory_mb=4096,
        max_processes=512,
        disk_mb=1024,
        output_bytes=16 << 20,
    )


@dataclass(slots=True, kw_only=True)
class ServingSettings:
    """What every worker of a sandbox server has to know. Holds no secret."""

    backend: str = "local"
    backend_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the backend; each worker has a backend of its own."""
    workers: int = 1
    max_open: int = 512
    """Boxes open at once over all workers; further creations wait their turn."""
    create_timeout_s: float = 30.0
    """For the start of one box, waiting included."""
    ttl_s: float = 120.0
    """How long a box lives after its client was last heard of."""
    maxima: SandboxLimits = field(default_factory=_generous)
    """The most that a client can ask for; more is lowered, and the reply says so."""
    max_body_mb: int = 128
    """Bytes of one request."""
    body_timeout_s: float = 60.0
    """How long the body of a request may take to arrive."""
    advertise_url: str | None = None
    """Where clients reach this node for a box that it created; None behind no load balancer."""
    token_env: str = _DEFAULT_TOKEN_ENV
    """The environment variable that holds the bearer token."""

    def __post_init__(self) -> None:
        """Refuse what could not be served; raises :class:`ConfigError`."""
        for name in ("workers", "max_open", "create_timeout_s", "ttl_s", "max_body_mb"):
            if not 0 < getattr(self, name) <= _MOST:
                raise ConfigError(
                    f"{name} must be above 0 and at most {_MOST:,}, got {getattr(self, name)}"
                )
        if self.max_open < self.workers:
            raise ConfigError(f"max_open ({self.max_open}) must be at least workers")
        if self.advertise_url and not _URL.fullmatch(self.advertise_url):
            raise ConfigError(
                "advertise_url must be http://HOST:PORT or https://HOST:PORT, got "
                f"{self.advertise_url!r}"
            )

    def dump(self) -> str:
        """Return the settings as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> ServingSettings:
        """Return the settings that `dump` wrote."""
        values = json.loads(text)
        return ServingSettings(**{**values, "maxima": parse_limits(values["maxima"])})

    def token(self) -> str | None:
        """Return the bearer token from the environment; None if there is none.

        Raises:
            ConfigError: it is too short to be one, or cannot stand in a header; or the variable was
                named, and holds none.
        """
        token = os.environ.get(self.token_env) or None
        if token is None and self.token_env != _DEFAULT_TOKEN_ENV:
            raise ConfigError(
                f"the environment variable {self.token_env} is not set, or empty; export the token "
                "there, or leave --token-env out"
            )
        if token is not None and not re.fullmatch(r"[!-~]*", token):
            raise ConfigError(
                f"the token in {self.token_env} has blanks, line breaks or characters beyond "
                "ASCII, which no header can carry; use the output of `openssl rand -hex 32`"
            )
        if token is not None and len(token) < _LEAST_TOKEN:
            raise ConfigError(
                f"the token in {self.token_env} has {len(token)} characters; use at least "
                f"{_LEAST_TOKEN} that cannot be guessed, for example `openssl rand -hex 32`"
            )
        return token
