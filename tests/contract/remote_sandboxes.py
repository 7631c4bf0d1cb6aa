"""Servers of sandboxes for tests: our own as a process, and a stand-in for E2B."""

from __future__ import annotations

import os
import re
import secrets
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl_sandboxes.e2b import E2BBackend
from agentrl_sandboxes.http import HttpBackend

from agentrl.testing.e2b_server import e2b_server

_START_S = 60.0
_STOP_S = 40.0


@dataclass(slots=True, kw_only=True)
class ServingProcess:
    """A sandbox server that runs as a process of its own."""

    process: subprocess.Popen[bytes]
    url: str
    token: str
    """Reference to the token in this process's environment."""

    def backend(self, **kwargs: float) -> HttpBackend:
        """Return a backend that uses this server."""
        return HttpBackend(self.url, token=self.token, **kwargs)


@contextmanager
def environment_secret(value: str) -> Iterator[str]:
    """Put a secret into this process's environment for the body; yields the reference to it."""
    name = f"AGENTRL_TEST_{secrets.token_hex(4).upper()}"
    os.environ[name] = value
    try:
        yield f"${{env:{name}}}"
    finally:
        del os.environ[name]


@contextmanager
def serving(*options: str) -> Iterator[ServingProcess]:
    """Run `agentrl sandbox serve` on a free port for the body."""
    token = secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli.main", "sandbox", "serve", "--port", "0", *options],
        stdout=subprocess.PIPE,
        env={**os.environ, "AGENTRL_SANDBOX_TOKEN": token},
        cwd=Path(__file__).parents[2],
    )
    try:
        url = _first_url(process)
        with environment_secret(token) as reference:
            yield ServingProcess(process=process, url=url, token=reference)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        finally:
            process.kill()
            if process.stdout is not None:
                process.stdout.close()


def _first_url(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    said, deadline = b"", time.monotonic() + _START_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while b"\n" not in said:
            ready = selector.select(deadline - time.monotonic())
            chunk = os.read(process.stdout.fileno(), 4096) if ready else b""
            assert chunk, f"the sandbox server did not start: {said!r}"
            said += chunk
    found = re.search(rb"https?://\S+", said)
    assert found is not None, said
    return found[0].decode()


@contextmanager
def e2b_backend() -> Iterator[E2BBackend]:
    """The backend for E2B, its official SDK talking to a stand-in on loopback."""
    with (
        environment_secret(f"e2b_{secrets.token_hex(20)}") as reference,
        e2b_server(os.environ[reference[6:-1]]) as (url, _),
    ):
        yield E2BBackend(api_key=reference, api_url=url, sandbox_url=url)
