"""``http:``: a request to one host that the spec fixes, made of the arguments of the call.

::

    http:
      method: GET
      url: https://api.example.com/v1/cities/{city}/weather?units={units}
      headers: {Authorization: "Bearer ${env:WEATHER_KEY}"}
      send: query           # where arguments go that the URL does not name: query, json or form
      answer: /current/text # JSON pointer to what the model is shown; the whole body otherwise
      max_bytes: 1000000    # of the body; the rest is not read
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from agentrl.errors import ConfigError, InfrastructureError, ToolError
from agentrl.net.client import Answer, SharedClient, Unreachable, fetch, make_client
from agentrl.net.guard import Guard
from agentrl.references import cleared
from agentrl.tool.base import ToolContext
from agentrl.tool.runners.base import Allow, Bound, ToolOffer
from agentrl.tool.runners.url_template import UrlTemplate, plain
from agentrl.tool.secrets import read_texts, resolved_headers
from agentrl.tool.section import Section

if TYPE_CHECKING:
    from agentrl.tool.spec import ToolSpec

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_WITH_BODY = ("POST", "PUT", "PATCH")
_SENDS = ("query", "json", "form")
_MAX_REDIRECTS = 5
_MAX_SHOWN = 500
"""Characters of a refusal that the model is shown."""
_LATE_S = 1.0
"""Past the limit of the call: the executor's own deadline comes first, and is told as such."""
_OURS = (401, 407, 408, 425, 429)
"""Statuses below 500 that no argument of the model's is to blame for."""


@dataclass(slots=True, frozen=True, kw_only=True)
class HttpTarget:
    """A request to make."""

    method: str
    url: UrlTemplate
    headers: tuple[tuple[str, str], ...]
    """Secrets as ``${env:NAME}``."""
    send: str
    """``query``, ``json`` or ``form``: where the other arguments go."""
    answer: str | None
    """JSON pointer."""
    max_bytes: int


class HttpRunner:
    """See the module."""

    schema: Mapping[str, Any] = {
        "type": "object",
        "additionalProperties": False,
        "required": ["url"],
        "properties": {
            "method": {"enum": list(_METHODS), "default": "GET"},
            "url": {
                "type": "string",
                "pattern": "^https?://",
                "description": "{name} stands for an argument, in path segments and query values.",
            },
            "headers": {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "Credentials as ${env:NAME}.",
            },
            "send": {
                "enum": list(_SENDS),
                "description": "Where arguments go that the URL does not name: query for GET, HEAD "
                "and DELETE, json otherwise.",
            },
            "answer": {
                "type": "string",
                "pattern": "^(/[^/]*)+$",
                "description": "JSON pointer to what the model is shown; the whole body otherwise.",
            },
            "max_bytes": {"type": "integer", "minimum": 1, "default": 1_000_000},
        },
    }
    beside: Mapping[str, Mapping[str, Any]] = {}

    def check(self, spec: Section) -> HttpTarget:
        """See :class:`agentrl.tool.runners.base.Runner`."""
        section = spec.section("http")
        section.refuse_unknown(list(self.schema["properties"]))
        method = section.choice("method", _METHODS, "GET")
        text = section.text("url")
        try:
            url = UrlTemplate.parse(text)
            Guard([url.authority])
        except (ValueError, ConfigError) as error:
            raise section.error(f"http.url: {text!r}: {error}", "url") from None
        send = section.choice("send", _SENDS, "json" if method in _WITH_BODY else "query")
        if send != "query" and method not in _WITH_BODY:
            raise section.error(f"http.send: {method} has no body; write send: query", "send")
        answer = section.text("answer") if "answer" in section else None
        if answer is not None and not answer.startswith("/"):
            raise section.error(
                f"http.answer: {answer!r} is no JSON pointer; write '/data/0/text'", "answer"
            )
        headers = read_texts(section, "headers", is_headers=True) if "headers" in section else {}
        return HttpTarget(
            method=method,
            url=url,
            headers=tuple(headers.items()),
            send=send,
            answer=answer,
            max_bytes=section.integer("max_bytes", 1_000_000, minimum=1),
        )

    def is_group(self, target: HttpTarget) -> bool:
        """A request is one tool."""
        return False

    def offers(self, target: HttpTarget, *, spec: Section, allow: Allow) -> list[ToolOffer]:
        """Return nothing: the spec says it all."""
        return []

    def bind(self, spec: ToolSpec, *, allow: Allow) -> Bound:
        """See :class:`agentrl.tool.runners.base.Runner`."""
        target: HttpTarget = spec.target
        known = spec.parameters.get("properties", {})
        for name in target.url.names:
            if name not in known:
                raise spec.error(
                    f"http.url: {{{name}}} is no parameter "
                    f"({', '.join(known) or 'there are none'})",
                    "http",
                    "url",
                )
        for name in target.url.path_names:
            if name not in spec.parameters.get("required", ()):
                raise spec.error(
                    f"http.url: {{{name}}} stands in the path, so it must be listed under "
                    "parameters.required",
                    "http",
                    "url",
                )
        for name, text in target.headers:
            try:
                resolved_headers({name: text})
            except InfrastructureError as error:  # now, not at the first call of each episode
                raise spec.error(f"http.headers.{name}: {error}", "http", "headers", name) from None
        # One host, and no way down from https: headers with secrets never go anywhere else.
        schemes = ("https",) if target.url.scheme == "https" else ("http", "https")
        guard = Guard([target.url.authority], schemes=schemes)
        clients = SharedClient(partial(make_client, guard, max_connections=spec.limits.concurrency))
        timeout_s = spec.limits.timeout_s + _LATE_S
        return Bound(make=partial(_HttpTool, target, clients, timeout_s), stateless=True)


class _HttpTool:
    """Holds the shared client for one trajectory."""

    def __init__(self, target: HttpTarget, clients: SharedClient, timeout_s: float) -> None:
        self._target = target
        self._clients = clients
        self._timeout_s = timeout_s
        self._client: Any = None

    async def open(self, context: ToolContext) -> None:
        """Take hold of the client."""
        self._client = self._clients.acquire()

    async def close(self) -> None:
        """Let it go."""
        if self._client is not None:
            self._client = None
            await self._clients.release()

    async def call(self, **arguments: Any) -> Any:
        """Make the request."""
        target = self._target
        rest = {k: v for k, v in arguments.items() if k not in target.url.names}
        answer = await fetch(
            self._client,
            target.method,
            _with_query(target.url.fill(arguments), rest if target.send == "query" else {}),
            timeout_s=self._timeout_s,
            max_bytes=target.max_bytes,
            max_redirects=_MAX_REDIRECTS,
            headers=resolved_headers(dict(target.headers)),
            **_body(rest, target.send),
        )
        texts = [text for _, text in target.headers]
        return _shown(answer, target, lambda text: cleared(text, texts))


def _body(arguments: dict[str, Any], send: str) -> dict[str, Any]:
    if send == "json":
        return {"json": arguments}
    return {"data": _flat(arguments)} if send == "form" else {}


def _with_query(url: str, arguments: dict[str, Any]) -> str:
    if not arguments:
        return url
    return f"{url}{'&' if '?' in url else '?'}{urlencode(_flat(arguments), doseq=True)}"


def _flat(arguments: dict[str, Any]) -> dict[str, str | list[str]]:
    """Return arguments as URLs and forms have them; those that are null are left out."""
    return {
        name: [plain(item) for item in value] if isinstance(value, list) else plain(value)
        for name, value in arguments.items()
        if value is not None
    }


def _shown(answer: Answer, target: HttpTarget, clear: Any) -> Any:
    """Return what the model is shown of an answer."""
    status, text = answer.status, clear(answer.text)
    short = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    if status in _OURS or status >= 500:
        raise InfrastructureError(f"{target.url.authority} answered {status}: {short}")
    if not 200 <= status < 300:
        raise ToolError(f"the service answered {status}: {short}")
    if target.answer is None:
        note = f"\n[cut: the answer is longer than {target.max_bytes} bytes]"
        return text + note if answer.is_cut else text
    if answer.is_cut:
        raise ToolError(f"the answer is longer than {target.max_bytes} bytes; ask for less")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise Unreachable(f"{target.url.authority} answered what is no JSON: {short}") from None
    for part in target.answer[1:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise ToolError(
                f"the service answered without what was asked for, {target.answer}: {short}"
            )
    return value
