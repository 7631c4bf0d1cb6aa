"""Which URLs fall under an allowed prefix: the same scheme, host and port, and a path below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import httpx

from agentrl.errors import ConfigError, ToolError

_PORTS = {"http": 80, "https": 443}
_MAX_DECODINGS = 3


@dataclass(slots=True, frozen=True)
class Prefix:
    """One allowed URL and all that lie below it."""

    scheme: str
    host: str
    port: int
    path: str
    """Ends with a slash where it is a folder."""

    @classmethod
    def parse(cls, text: str) -> Prefix:
        """Read ``https://host[:port]/path``; a path without a slash at its end is one page.

        Raises:
            ConfigError: no such thing.
        """
        try:
            url = httpx.URL(text)
        except (httpx.InvalidURL, TypeError):
            url = httpx.URL()
        plain = not (url.userinfo or url.query or url.fragment or "*" in url.host)
        if url.scheme not in _PORTS or not url.host or not plain:
            raise ConfigError(
                f"allow: {text!r} is no URL prefix; write https://docs.example.com/guide/ (without "
                "user, query or '*')"
            )
        return cls(url.scheme, url.host, url.port or _PORTS[url.scheme], url.path or "/")

    @property
    def rule(self) -> str:
        """The host as :class:`agentrl.net.guard.Guard` takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        """As it was written."""
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}{port}{self.path}"

    def holds(self, url: httpx.URL) -> bool:
        """Return whether a URL falls under it."""
        port = url.port or _PORTS.get(url.scheme)
        if (url.scheme, url.host, port) != (self.scheme, self.host, self.port):
            return False
        path = url.path or "/"
        return path == self.path or (self.path.endswith("/") and path.startswith(self.path))


def check_address(url: httpx.URL, allowed: Sequence[Prefix]) -> None:
    """Refuse what no prefix holds; done for every hop.

    Raises:
        ToolError: with what is allowed.
    """
    if _steps_up(url.raw_path.decode("ascii", "replace").partition("?")[0]):
        raise ToolError("the path of the URL holds '..' or a backslash; give a plain path")
    if not any(prefix.holds(url) for prefix in allowed):
        known = ", ".join(map(str, allowed)) or "none (the list of this tool is empty)"
        raise ToolError(f"{str(url)[:100]!r} is not allowed; allowed are: {known}")


def _steps_up(path: str) -> bool:
    """Return whether a server that decodes the path could leave a folder by it."""
    for _ in range(_MAX_DECODINGS):
        parts = [part.partition(";")[0] for part in path.split("/")]  # some drop ';parameters'
        if ".." in parts or "\\" in path or "\0" in path:
            return True
        path = unquote(path)
    return False
