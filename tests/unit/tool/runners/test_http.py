"""Tools over HTTP: what is sent, what comes back, and what a model cannot make of it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import InfrastructureError, ToolError, ToolSpecError
from agentrl.net.guard import Forbidden
from agentrl.tool.base import ToolContext
from agentrl.tool.binding import Toolbox
from agentrl.tool.executor import ToolExecutor
from agentrl.tool.runners.url_template import UrlTemplate
from agentrl.types import ToolCall, ToolStatus

pytestmark = pytest.mark.timeout(30)
SECRET = "sesame-open-please"


class Echo(BaseHTTPRequestHandler):
    """Answers with what was asked; a path that begins with a status is answered with it."""

    protocol_version = "HTTP/1.1"
    num_requests = 0

    def do(self) -> None:
        type(self).num_requests += 1
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        first = self.path.lstrip("/").partition("/")[0].partition("?")[0]
        status = int(first) if first.isdecimal() else 200
        if first == "nohttp":
            self.wfile.write(f"{self.headers['authorization']}\r\n\r\n".encode())
            self.close_connection = True
            return
        told = {
            "method": self.command,
            "path": self.path,
            "body": body.decode(),
            "headers": {key.lower(): value for key, value in self.headers.items()},
        }
        text = json.dumps(told).encode()
        if first == "garbage":
            text = b"<html>"
        elif first == "long":
            text = b'"' + b"x" * 5000 + b'"'
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("Location", f"http://localhost:{self.server.server_port}/elsewhere")  # pyright: ignore
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = do_DELETE = do

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join(10)


def box(folder: Path, port: int, url: str, more: str = "", properties: str = "a: {type: string}"):
    required = [name for name in ("a", "b") if f"{{{name}}}" in url.partition("?")[0]]
    (folder / "t.yaml").write_text(
        "name: t\ndescription: d\n"
        f"parameters: {{type: object, properties: {{{properties}}}, required: {required}}}\n"
        f"http:\n  url: http://127.0.0.1:{port}{url}\n{more}"
    )
    return Toolbox([str(folder / "t.yaml")])


def called(toolbox: Toolbox, **arguments: Any) -> Any:
    async def call() -> Any:
        nothing: Any = None
        tool = toolbox.bindings["t"].make()
        await tool.open(
            ToolContext(trajectory_id="t", seed=0, sandboxes=nothing, workspace=nothing)
        )
        try:
            return await tool.call(**arguments)
        finally:
            await tool.close()

    return asyncio.run(call())


TWO = "a: {type: string}, b: {type: array, items: {type: integer}}"


def test_arguments_go_where_the_spec_puts_them(tmp_path: Path, port: int):
    toolbox = box(tmp_path, port, "/x/{a}?k=v", properties=TWO)
    told = json.loads(called(toolbox, a="p q/r", b=[1, 2]))
    assert told["method"] == "GET"
    assert told["path"] == "/x/p%20q%2Fr?k=v&b=1&b=2"


@pytest.mark.parametrize(
    ("send", "body"), [("json", '{"a":"ä &","b":[1]}'), ("form", "a=%C3%A4+%26&b=1")]
)
def test_a_body_is_made_of_the_arguments(tmp_path: Path, port: int, send: str, body: str):
    more = f"  method: POST\n  send: {send}\n"
    told = json.loads(called(box(tmp_path, port, "/x", more, TWO), a="ä &", b=[1]))
    assert (told["method"], told["body"], told["path"]) == ("POST", body, "/x")


def test_an_absent_argument_takes_its_part_of_the_query_with_it(tmp_path: Path, port: int):
    toolbox = box(tmp_path, port, "/x?a={a}&b=1")
    assert json.loads(called(toolbox))["path"] == "/x?b=1"
    assert json.loads(called(toolbox, a="&b=2#"))["path"] == "/x?a=%26b%3D2%23&b=1"


def test_a_pointer_picks_what_the_model_is_shown(tmp_path: Path, port: int):
    assert called(box(tmp_path, port, "/x", "  answer: /method\n")) == "GET"
    with pytest.raises(ToolError, match="without what was asked for"):
        called(box(tmp_path, port, "/x", "  answer: /method/0\n"))


@pytest.mark.parametrize(
    ("path", "error", "what"),
    [
        ("/404", ToolError, "answered 404"),
        ("/422", ToolError, "answered 422"),
        ("/301", Forbidden, "'localhost'"),
        ("/401", InfrastructureError, "answered 401"),
        ("/408", InfrastructureError, "answered 408"),
        ("/429", InfrastructureError, "answered 429"),
        ("/500", InfrastructureError, "answered 500"),
        ("/503", InfrastructureError, "answered 503"),
    ],
)
def test_a_status_is_the_models_fault_or_ours(
    tmp_path: Path, port: int, path: str, error: type[Exception], what: str
):
    with pytest.raises(error, match=what) as caught:
        called(box(tmp_path, port, path))
    assert isinstance(caught.value, InfrastructureError) == (error is InfrastructureError)


def test_what_is_no_json_where_json_is_wanted_is_ours(tmp_path: Path, port: int):
    assert called(box(tmp_path, port, "/garbage")) == "<html>"
    with pytest.raises(InfrastructureError, match="no JSON: <html>"):
        called(box(tmp_path, port, "/garbage", "  answer: /a\n"))


def test_a_long_answer_is_cut_and_says_so(tmp_path: Path, port: int):
    answer = called(box(tmp_path, port, "/long", "  max_bytes: 100\n"))
    assert answer == '"' + "x" * 99 + "\n[cut: the answer is longer than 100 bytes]"
    with pytest.raises(ToolError, match="ask for less"):
        called(box(tmp_path, port, "/long", "  max_bytes: 100\n  answer: /a\n"))


def test_no_service_is_ours(tmp_path: Path):
    with pytest.raises(InfrastructureError, match="cannot be reached"):
        called(box(tmp_path, 1, "/x"))


# ------------------------------------------------------------------ what a model may not do


@pytest.mark.parametrize("value", ["..", ".", ""])
def test_an_argument_cannot_walk_out_of_its_segment(tmp_path: Path, port: int, value: str):
    with pytest.raises(ToolError, match="cannot stand in a path"):
        called(box(tmp_path, port, "/public/{a}/x"), a=value)


@pytest.mark.parametrize(
    "value",
    [
        "../../admin",
        "%2e%2e",
        "..%2fadmin",
        "@evil.example",
        "//evil.example",
        "?x=1",
        "#",
        "\r\nX: y",
    ]
    + ["\\..\\", "ä", "a;b", "\x00", "．．", " ", "a/../../b", "http://evil.example/"],
)
def test_an_argument_stays_one_segment_whatever_it_is(tmp_path: Path, port: int, value: str):
    path = json.loads(called(box(tmp_path, port, "/public/{a}/x"), a=value))["path"]
    head, segment, tail = path.lstrip("/").split("/")
    assert (head, unquote(segment), tail) == ("public", value, "x")


@given(st.text(min_size=1, max_size=30), st.text(max_size=30))
def test_no_text_leaves_its_place_in_a_url(segment: str, value: str):
    segment, value = (t.encode("utf-8", "replace").decode() for t in (segment, value))
    template = UrlTemplate.parse("https://h.example:8443/p/{a}/q?x=1&y={b}&z=2")
    if segment in (".", ".."):
        return
    found = urlsplit(template.fill({"a": segment, "b": value}))
    assert (found.scheme, found.netloc, found.fragment) == ("https", "h.example:8443", "")
    assert [unquote(part) for part in found.path.split("/")] == ["", "p", segment, "q"]
    assert parse_qs(found.query, keep_blank_values=True) == {"x": ["1"], "y": [value], "z": ["2"]}


@pytest.mark.parametrize(
    "url",
    [
        "{a}",
        "{a}://h/",
        "http://{a}/",
        "http://h.{a}.example/",
        "http://h:{a}/",
        "http://{a}@h/",
        "http://u:p@h/",
        "http://h/#{a}",
        "http://h/?{a}=b",
        "http://h/?{a}",
        "http://h/{a b}",
        "http://h/{a",
        "http://h/a}",
        "http://h/{}",
        "http://h/{{a}}",
        "http://h/ a",
        "http://h\\@x/",
        "ftp://h/",
        "h/x",
    ],
)
def test_a_template_has_arguments_in_segments_and_values_only(url: str):
    with pytest.raises(ValueError):
        UrlTemplate.parse(url)


# ------------------------------------------------------------------ secrets


def test_a_secret_is_sent_and_shown_nowhere(
    tmp_path: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
):
    """Everything that could be kept is searched: answers, errors, logs, reprs, schemas, results."""
    monkeypatch.setenv("KEY", SECRET)
    caplog.set_level("DEBUG")
    header = '  headers: {Authorization: "Bearer ${env:KEY}"}\n'
    kept: list[str] = []
    for path in ("/x", "/404", "/500", "/301", "/garbage", "/nohttp"):
        toolbox = box(tmp_path, port, path, header)
        kept += [repr(toolbox.bindings), json.dumps(toolbox.schemas)]
        result = asyncio.run(_run(toolbox))
        kept += [repr(result), str(result.content)]
        if path == "/x":
            sent = json.loads(result.content)["headers"]["authorization"]
            assert sent == "Bearer ${env:KEY}"  # the server did get it, and told it back
    with pytest.raises(InfrastructureError) as caught:
        called(box(tmp_path, 1, "/x", header))
    chain: BaseException | None = caught.value
    while chain is not None:
        kept.append(repr(chain))
        chain = chain.__cause__
    kept += [caplog.text, *capfd.readouterr()]
    assert not any(SECRET in text for text in kept)


async def _run(toolbox: Toolbox) -> Any:
    async def make_context(name: str) -> ToolContext:
        nothing: Any = None
        return ToolContext(trajectory_id="t", seed=0, sandboxes=nothing, workspace=nothing)

    executor = ToolExecutor(
        toolbox, make_context=make_context, cut=lambda text, limit: (text[:9999], 0)
    )
    try:
        return await executor.run(ToolCall(name="t", arguments={}))
    finally:
        await executor.close()


def test_a_variable_that_is_not_set_is_refused_at_the_start(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("KEY", raising=False)
    with pytest.raises(ToolSpecError, match="KEY is not set") as caught:
        box(tmp_path, port, "/x", '  headers: {Authorization: "Bearer ${env:KEY}"}\n')
    assert ":6:28: " in str(caught.value)


def test_a_value_that_no_header_can_carry_is_never_sent(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KEY", SECRET)
    toolbox = box(tmp_path, port, "/x", '  headers: {Authorization: "${env:KEY}"}\n')
    for value, reason in ((f"{SECRET}\r\nX-Admin: 1", "line break"), (f"{SECRET}\u00e9", "ASCII")):
        monkeypatch.setenv("KEY", value)
        with pytest.raises(InfrastructureError, match=f"KEY holds a .*{reason}") as caught:
            called(toolbox)
        assert SECRET not in str(caught.value)


# ------------------------------------------------------------------ in the executor


@pytest.mark.parametrize(("idempotent", "attempts"), [(True, 2), (False, 1)])
def test_only_an_idempotent_tool_is_asked_again(
    tmp_path: Path, port: int, idempotent: bool, attempts: int
):
    retries = "idempotent: true\nlimits: {retries: 1}\n" if idempotent else ""
    toolbox = box(tmp_path, port, "/503", retries)
    before = Echo.num_requests
    result = asyncio.run(_run(toolbox))
    assert result.status is ToolStatus.INFRA_ERROR
    assert Echo.num_requests - before == attempts


@pytest.mark.parametrize("value", ["a\nb", "é\u20ac", "a\x01"])
def test_a_secret_that_no_header_can_carry_is_refused_at_the_start(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, value: str
):
    monkeypatch.setenv("KEY", value)
    with pytest.raises(ToolSpecError, match="variable KEY") as caught:
        box(tmp_path, port, "/x", '  headers: {Authorization: "Bearer ${env:KEY}"}\n')
    assert value not in str(caught.value)
