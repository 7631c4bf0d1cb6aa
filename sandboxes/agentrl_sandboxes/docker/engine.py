"""Talking to a Docker engine: every call in a thread of ours and with a deadline."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.extras import missing_extra

if TYPE_CHECKING:
    from docker import APIClient

T = TypeVar("T")

_THREADS = 8
_CONNECT_S = 10
_START_HINT = (
    "Start one (`systemctl start docker`, or without systemd as root `scripts/docker_engine.sh "
    "start`), or name another one with sandbox.kwargs.base_url or DOCKER_HOST"
)


class EngineLost(SandboxError):
    """The engine does not answer: nothing is known of its containers."""


class NotThere(SandboxError):
    """The engine answers, and has nothing of that name."""


class EngineRefusal(SandboxError):
    """The engine answers, and will not do it; its own words."""


def connect(base_url: str | None, timeout_s: int = _CONNECT_S) -> APIClient:
    """Return a client of an engine, whose version has been negotiated.

    Args:
        base_url: `unix:///path` or `tcp://host:port`; DOCKER_HOST, else the usual socket, if None.
        timeout_s: seconds without a byte after which a call of this client fails.

    Raises:
        SandboxUnavailable: the extra is missing, or no engine answers there.
    """
    try:
        import docker
        import docker.errors
    except ImportError:
        raise SandboxUnavailable(missing_extra("docker", "sandbox.id=docker")) from None
    address = base_url or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not address.startswith(("unix://", "tcp://", "http://")):
        raise SandboxUnavailable(
            f"sandbox.id=docker needs a unix:// or tcp:// address, got {address!r}. Bring a remote "
            "engine here with `ssh -nNT -L /run/agentrl-remote.sock:/var/run/docker.sock HOST`, "
            "and use unix:///run/agentrl-remote.sock"
        )
    try:
        return docker.APIClient(
            base_url=address, version="auto", timeout=timeout_s, max_pool_size=_THREADS
        )
    except (docker.errors.DockerException, OSError, ValueError) as error:  # a port out of range
        raise SandboxUnavailable(
            f"no Docker engine answers at {address}: {error}. {_START_HINT}"
        ) from None


class Engine:
    """A client for the event loop: calls run in a few threads, and fail by a typed error."""

    def __init__(self, client: APIClient) -> None:
        self._client = client
        self._threads = ThreadPoolExecutor(_THREADS, "agentrl-docker")

    async def call(self, work: Callable[[APIClient], T], deadline_s: float) -> T:
        """Run `work(client)` in a thread.

        A call past its deadline is left alone; its thread ends with the client's own time-out.

        Raises:
            EngineLost: it does not answer, or not in time.
            NotThere: the engine has nothing of that name.
            EngineRefusal: anything else that the engine answers with an error.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(deadline_s):
                return await loop.run_in_executor(self._threads, _translate, work, self._client)
        except TimeoutError:
            raise EngineLost(
                f"the Docker engine did not answer within {deadline_s:g} s; see its log"
            ) from None
        except RuntimeError as error:  # the pool of threads is shut down
            raise EngineLost(f"the connection to the Docker engine is closed: {error}") from None

    def close(self) -> None:
        """Close the connections; calls in flight end on their own."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()


def attach(client: APIClient, name: str) -> socket.socket:
    """Return a socket to a container's standard streams, in frames of the engine's.

    Raises:
        EngineRefusal: the engine is reached by something that is no plain socket.
    """
    streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
    wrapped: Any = client.attach_socket(name, params=streams)
    plain = getattr(wrapped, "_sock", wrapped)
    if type(plain) is not socket.socket:
        wrapped.close()
        raise EngineRefusal(
            f"sandbox.id=docker cannot attach over {type(plain).__name__}: reach the engine by a "
            "unix socket or plain TCP (an encrypted way: a tunnel by ssh -L)"
        )
    own = plain.dup()  # the client's response object closes its own with itself
    wrapped.close()
    own.setblocking(False)
    return own


def _translate(work: Callable[[APIClient], T], client: APIClient) -> T:
    import docker.errors
    import requests.exceptions

    try:
        return work(client)
    except docker.errors.NotFound as error:
        raise NotThere(str(error.explanation or error)) from None
    except docker.errors.APIError as error:
        raise EngineRefusal(str(error.explanation or error)) from None
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise EngineLost(f"the Docker engine cannot be reached: {error}") from None
