"""Fetches pages from allowed addresses; every hop is checked, and so is every connection."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache, partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from agentrl.errors import InfrastructureError, ToolError
from agentrl.net.client import Answer, NoAnswer, SharedClient, Unreadable, fetch, make_client
from agentrl.net.guard import Guard
from agentrl.tool.base import ToolContext
from agentrl_tools.http_fetch.address import Prefix, check_address
from agentrl_tools.http_fetch.page import text_of_html
from agentrl_tools.settings import refuse_below_one, refuse_no_time

if TYPE_CHECKING:
    import httpx

_MAX_REDIRECTS = 5
_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/javascript")
_HTML_TYPES = ("text/html", "application/xhtml+xml")


class HttpFetch:
    """Answers with a part of a page's text.

    Args:
        allow: URL prefixes; nothing else is asked, also not where a page redirects to.
        private: whether the name of an allowed host may lead to a private address, as that of a
            server in your own network does. An address that is written out always may.
        wall_s: seconds for one page, redirects included.
        max_bytes: read of one page.
        max_chars: of its text in one answer.

    Raises:
        ConfigError: ``allow`` holds something that is no prefix, or a limit is none.
    """

    stateless = True

    def __init__(
        self,
        *,
        allow: Sequence[str] = (),
        private: bool = False,
        wall_s: float = 10.0,
        max_bytes: int = 2 << 20,
        max_chars: int = 3000,
    ) -> None:
        refuse_below_one(max_bytes=max_bytes, max_chars=max_chars)
        refuse_no_time(wall_s=wall_s)
        self._allowed = [Prefix.parse(prefix) for prefix in allow]
        self._clients = _clients(tuple(prefix.rule for prefix in self._allowed), private)
        self._client: httpx.AsyncClient | None = None
        self._wall_s = wall_s
        self._max_bytes = max_bytes
        self._max_chars = max_chars

    async def open(self, context: ToolContext) -> None:
        """Get the client that all trajectories of this process share."""
        self._client = self._clients.acquire()

    async def call(self, url: str, start: int = 0) -> str:
        """Return the text of a page from the character ``start`` on.

        Raises:
            ToolError: not allowed, no text, no such part, no success, or no answer in time.
            InfrastructureError: an allowed server cannot be reached.
        """
        if self._client is None:
            raise InfrastructureError("http_fetch was called before it was opened")
        text = _text_of(await self._follow(self._client, url))
        if not text:
            return "(empty page)"
        if start >= len(text):
            raise ToolError(f"the page has only {len(text)} characters, start={start}")
        end = min(len(text), start + self._max_chars)
        if start == 0 and end == len(text):
            return text
        return f"{text[start:end]}\n[characters {start}-{end} of {len(text)}]"

    async def close(self) -> None:
        """Give the client back."""
        if self._client is not None:
            self._client = None
            await self._clients.release()

    async def _follow(self, client: httpx.AsyncClient, url: str) -> Answer:
        import httpx

        deadline = time.monotonic() + self._wall_s
        guard = Guard([prefix.rule for prefix in self._allowed])
        for _ in range(_MAX_REDIRECTS + 1):
            target = guard.check_url(url)
            check_address(target, self._allowed)
            try:
                answer = await fetch(
                    client,
                    "GET",
                    str(target),
                    timeout_s=max(0.001, deadline - time.monotonic()),
                    max_bytes=self._max_bytes,
                )
            except NoAnswer:
                # Which page is slow is the model's choice: no way out of its group's baseline.
                raise ToolError(f"no answer within {self._wall_s:g} s; try another page") from None
            except Unreadable as error:
                raise ToolError(f"{error}; try another page") from None
            location = answer.headers.get("location")
            if not (300 <= answer.status < 400 and location):
                return answer
            try:
                url = str(target.join(location))
            except (httpx.InvalidURL, UnicodeError):
                raise ToolError(f"{url[:100]!r} redirects to something that is no URL") from None
        raise ToolError(f"more than {_MAX_REDIRECTS} redirects; give the address of the page")


@lru_cache(maxsize=64)
def _clients(rules: tuple[str, ...], private: bool) -> SharedClient:
    return SharedClient(partial(make_client, Guard(rules, private=private)))


def _text_of(answer: Answer) -> str:
    if not 200 <= answer.status < 300:
        try:
            phrase = f" {HTTPStatus(answer.status).phrase}"
        except ValueError:
            phrase = ""
        raise ToolError(f"{answer.url[:100]} answered {answer.status}{phrase}; try another page")
    kind = answer.headers.get("content-type", "text/plain").partition(";")[0].strip().lower()
    if kind in _HTML_TYPES:
        text = text_of_html(answer.text)
    elif kind.startswith(_TEXT_TYPES) or kind.endswith(("+json", "+xml")):
        text = answer.text
    else:
        raise ToolError(f"{answer.url[:100]} is no text but {kind[:60]!r}; try another page")
    return f"{text}\n[the page is longer]" if answer.is_cut else text
