"""Sandboxes that live in a sandbox server."""

from __future__ import annotations

import asyncio
import random
import warnings
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from agentrl.errors import ConfigError, SandboxError
from agentrl.sandbox.base import SandboxLimits, SandboxReport
from agentrl.sandbox.serving.wire import parse_limits
from agentrl_sandboxes.http.box import HttpSandbox
from agentrl_sandboxes.http.connection import Connection, NotConnected
from agentrl_sandboxes.supervised.limits import check_limits, check_seconds

_SHORT_S = 15.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class HttpBackend:
    """Sandboxes of a server started with ``agentrl sandbox serve``.

    Args:
        url: of the server or of a load balancer before several: ``http://host:port``,
            ``https://…``, or ``unix:///path/of.sock``.
        token: reference to the bearer token, ``${env:NAME}``; None for a server without one.
        create_timeout_s: for the start of one sandbox, waiting and retries included.
    """

    def __init__(
        self, url: str, *, token: str | None = None, create_timeout_s: float = 30.0
    ) -> None:
        check_seconds(create_timeout_s=create_timeout_s)
        self._main = Connection(url, token)
        self._token = token
        self._create_timeout_s = create_timeout_s
        self._nodes: dict[str, Connection] = {}
        self._boxes: dict[str, HttpSandbox] = {}
        self._told: set[str] = set()
        self._report: SandboxReport | None = None
        self._ttl_s = 0.0
        self._keeping: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Ask the server how it enforces limits; wait for one that is just starting.

        After a failure it may be tried again: a server that is away may come back.
        """
        try:
            self._read_report(await self._retried("GET", "/v1/report", None))
        except BaseException:
            # A client that was closed serves no more, and one that is left open would be leaked.
            lost, self._main = self._main, Connection(self._main.url, self._token)
            await lost.close()
            raise
        self._keeping = asyncio.create_task(self._keep_alive())

    def _read_report(self, found: dict[str, Any]) -> None:
        try:
            told, maxima = found["report"], found["maxima"]
            limits = {
                name: f"{mechanism}" + (f"; at most {maxima[name]}" if name in maxima else "")
                for name, mechanism in told["limits"].items()
            }
            self._report = SandboxReport(
                backend=f"http: {told['backend']} at {self._main.url}",
                isolation=tuple(told["isolation"]),
                limits=limits,
                warnings=tuple(told["warnings"]),
            )
            self._ttl_s = float(found["ttl_s"])
            check_seconds(ttl_s=self._ttl_s)  # leases are renewed three times in it
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, ConfigError):
            raise SandboxError(
                f"what answers at {self._main.url} is no sandbox server of this version"
            ) from None

    async def create(self, limits: SandboxLimits) -> HttpSandbox:
        """Return a fresh sandbox; retried, with jitter, only where no server saw the request."""
        check_limits(limits)
        if self._closed:
            raise SandboxError("the sandbox backend is closed")
        reply = await self._retried("POST", "/v1/sandboxes", {"limits": asdict(limits)})
        try:
            box_id, url = str(reply["id"]), reply["url"]
            effective = parse_limits(reply["limits"])
            lowered = [str(sentence) for sentence in reply["lowered"]]
        except (KeyError, TypeError, ConfigError):
            raise SandboxError(f"{self._main.url} created no sandbox: {reply!r:.200}") from None
        for sentence in lowered:
            self._tell_once(sentence)
        try:
            node = self._main if url is None else self._node(str(url))
        except ConfigError:
            raise SandboxError(f"{self._main.url} named a node by {url!r:.200}") from None
        box = HttpSandbox(node, box_id, effective, forget=lambda: self._boxes.pop(box_id, None))
        self._boxes[box_id] = box
        return box

    async def close(self) -> None:
        """Close every sandbox, then the connections. Idempotent."""
        self._closed = True
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        closing = [box.close() for box in list(self._boxes.values())]
        await asyncio.gather(*closing, return_exceptions=True)  # the server's reaper ends the rest
        await asyncio.gather(*(node.close() for node in (self._main, *self._nodes.values())))

    def report(self) -> SandboxReport:
        """What the server's backend read back, and which limits the server lowered."""
        if self._report is None:
            raise SandboxError("the report comes from the server: start the backend first")
        return SandboxReport(
            backend=self._report.backend,
            isolation=self._report.isolation,
            limits=self._report.limits,
            warnings=(*self._report.warnings, *sorted(self._told)),
        )

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            warnings.warn(f"sandbox server: {sentence}", RuntimeWarning, stacklevel=4)

    def _node(self, url: str) -> Connection:
        if url not in self._nodes:
            self._nodes[url] = Connection(url, self._token)
        return self._nodes[url]

    async def _retried(self, method: str, path: str, value: Any) -> dict[str, Any]:
        """Ask the server; try again, until the deadline, where it was not even reached."""
        loop = asyncio.get_running_loop()
        end, pause_s = loop.time() + self._create_timeout_s, _FIRST_PAUSE_S
        while True:
            try:
                return await self._main.ask_json(
                    method, path, value, timeout_s=max(0.1, end - loop.time())
                )
            except NotConnected:
                if loop.time() + pause_s >= end:
                    raise
            # Many trainers meet the same restart: they must not come back in step.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _keep_alive(self) -> None:
        """Renew the leases of all open sandboxes; a failure shows again at their next call."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            by_node: dict[Connection, list[str]] = defaultdict(list)
            for box_id, box in self._boxes.items():
                by_node[box.node].append(box_id)
            renewals = [
                node.ask_json("POST", "/v1/keepalive", {"ids": ids}, timeout_s=_SHORT_S)
                for node, ids in by_node.items()
            ]
            await asyncio.gather(*renewals, return_exceptions=True)
