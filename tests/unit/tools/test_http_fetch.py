"""Pages from allowed addresses, and nothing from anywhere else (list A19)."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from agentrl_tools.http_fetch.address import Prefix
from agentrl_tools.http_fetch.page import text_of_html
from agentrl_tools.http_fetch.tool import HttpFetch

from agentrl.errors import ConfigError, InfrastructureError, ToolError
from agentrl.testing import FakeSandboxes
from agentrl.tool.base import ToolContext

PAGE = """<!doctype html><html><head><title> A  page </title><style>p {}</style>
<script>alert("no")</script></head><body><h1>Head &amp; more</h1><p>One
two<br>three <b>four</b></p><ul><li>x<li>y</ul><script>hidden()</script><p>end"""


class Site(BaseHTTPRequestHandler):
    """Pages under /docs/, redirects under /docs/to/, and a secret beside them."""

    asked: list[str]
    go_on: threading.Event

    def do_GET(self) -> None:
        self.asked.append(self.path)
        name = self.path.removeprefix("/docs/")
        if name.startswith("to/"):
            self.answer(302, "", location=name.removeprefix("to/").replace("%3A", ":"))
        elif name == "page":
            self.answer(200, PAGE, kind="text/html; charset=utf-8")
        elif name == "long":
            self.answer(200, "0123456789" * 1000, kind="text/plain")
        elif name == "image":
            self.answer(200, "x", kind="image/png")
        elif name == "json":
            self.answer(200, '{"a": 1}', kind="application/vnd.api+json")
        elif name == "empty":
            self.answer(200, "", kind="text/html")
        elif name == "slow":
            self.go_on.wait(20)
        elif name == "packed":
            self.answer(200, "abcd", encoding="br")
        elif name == "bad_way":
            self.answer(302, "", location="http://[::1")
        elif name == "gone":
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.answer(404, "no")

    def answer(
        self, status: int, text: str, *, kind: str = "", location: str = "", encoding: str = ""
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind or "text/plain")
        self.send_header("Content-Length", str(len(text.encode())))
        if encoding:
            self.send_header("Content-Encoding", encoding)
        if location:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


class Served:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go_on = threading.Event()
        members = {"asked": self.asked, "go_on": self.go_on}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Site,), members))
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/docs/"


@pytest.fixture
def site() -> Iterator[Served]:
    served = Served()
    thread = threading.Thread(target=served.server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield served
    served.go_on.set()
    served.server.shutdown()
    served.server.server_close()


def fetch_page(tool: HttpFetch, url: str, start: int = 0) -> str:
    async def main() -> str:
        async with asyncio.timeout(30):
            context = ToolContext(trajectory_id="t", seed=0, sandboxes=FakeSandboxes())
            await tool.open(context)
            try:
                return await tool.call(url=url, start=start)
            finally:
                await tool.close()
                await tool.close()

    return asyncio.run(main())


def test_a_page_is_read_as_a_reader_sees_it(site: Served):
    text = fetch_page(HttpFetch(allow=[site.url]), f"{site.url}page")
    assert text == "A page\nHead & more\nOne two\nthree four\nx\ny\nend"


def test_a_long_page_comes_in_parts(site: Served):
    tool = HttpFetch(allow=[site.url], max_chars=1000)
    first = fetch_page(tool, f"{site.url}long")
    assert first.endswith("\n[characters 0-1000 of 10000]")
    assert fetch_page(tool, f"{site.url}long", 9995) == "56789\n[characters 9995-10000 of 10000]"
    with pytest.raises(ToolError, match="only 10000 characters"):
        fetch_page(tool, f"{site.url}long", 10000)


def test_a_page_beyond_the_limit_is_cut_and_says_so(site: Served):
    text = fetch_page(HttpFetch(allow=[site.url], max_bytes=50), f"{site.url}long")
    assert text == "0123456789" * 5 + "\n[the page is longer]"


def test_a_redirect_inside_is_followed(site: Served):
    assert "Head" in fetch_page(HttpFetch(allow=[site.url]), f"{site.url}to//docs/page")
    assert fetch_page(HttpFetch(allow=[site.url]), f"{site.url}json") == '{"a": 1}'
    assert fetch_page(HttpFetch(allow=[site.url]), f"{site.url}empty") == "(empty page)"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("missing", "answered 404 Not Found"),
        ("image", "no text but 'image/png'"),
        ("slow", "no answer within 0.5 s"),
        ("packed", "answered badly"),
        ("bad_way", "try another page"),
        ("to/to/to/to/to/to/page", "more than 5 redirects"),
    ],
)
def test_what_is_no_page_is_told(site: Served, name: str, told: str):
    url = f"{site.url}{name}"
    if name.startswith("to"):
        url = f"{site.url}to//docs/to//docs/to//docs/to//docs/to//docs/to//docs/page"
    with pytest.raises(ToolError) as caught:
        fetch_page(HttpFetch(allow=[site.url], wall_s=0.5), url)
    assert told in str(caught.value)


def test_a_server_that_is_away_is_our_failure(site: Served):
    with pytest.raises(InfrastructureError):
        fetch_page(HttpFetch(allow=[site.url]), f"{site.url}gone")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/secret",
        "http://127.0.0.1:{port}/docs",
        "http://127.0.0.1:{port}/docs/../secret",
        "http://127.0.0.1:{port}/docs/%2e%2e/secret",
        "http://127.0.0.1:{port}/docs/%252e%252e/secret",
        "http://127.0.0.1:{port}/docs/..%2fsecret",
        "http://127.0.0.1:{port}/docs/..%5csecret",
        "http://127.0.0.1:{port}/docs/..;x=1/secret",
        "http://127.0.0.1:{port}/docs/..%3b/secret",
        "http://127.0.0.1:{port}\\@example.com/docs/",
        "http://127.0.0.1/docs/",
        "https://127.0.0.1:{port}/docs/page",
        "http://localhost:{port}/docs/page",
        "http://2130706433:{port}/docs/page",
        "http://0177.0.0.1:{port}/docs/page",
        "http://0x7f.1:{port}/docs/page",
        "http://127.1:{port}/docs/page",
        "http://[::ffff:127.0.0.1]:{port}/docs/page",
        "http://[::1]:{port}/docs/page",
        "http://0.0.0.0:{port}/docs/page",
        "http://169.254.169.254/latest/meta-data/",
        "http://user@127.0.0.1:{port}/docs/page",
        "http://127.0.0.1:{port}@example.com/docs/page",
        "file:///etc/passwd",
        "gopher://127.0.0.1:{port}/docs/page",
        "ftp://127.0.0.1:{port}/docs/page",
        "//127.0.0.1:{port}/docs/page",
        "docs/page",
        "",
        "http://",
        "http://127.0.0.1:{port}/docs/page\r\nX: y",
    ],
)
def test_no_other_address_is_asked(site: Served, url: str):
    with pytest.raises(ToolError):
        fetch_page(HttpFetch(allow=[site.url]), url.format(port=site.port))
    assert site.asked == []


@pytest.mark.parametrize(
    "target",
    ["/secret", "../secret", "http://localhost:{port}/docs/page", "file:///etc/passwd", "http://["],
)
def test_a_redirect_that_leads_out_is_not_followed(site: Served, target: str):
    with pytest.raises(ToolError):
        fetch_page(HttpFetch(allow=[site.url]), f"{site.url}to/{target.format(port=site.port)}")
    assert len(site.asked) == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.7", "169.254.169.254", "::1"])
def test_an_allowed_name_that_comes_to_lead_inside_is_not_asked(
    site: Served, monkeypatch: pytest.MonkeyPatch, address: str
):
    def look_up(host, port, *rest, **more):
        found = address if host == "docs.test" else host
        if ":" in found:
            return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (found, port, 0, 0))]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    tool = HttpFetch(allow=[f"http://docs.test:{site.port}/docs/"])
    with pytest.raises(ToolError):
        fetch_page(tool, f"http://docs.test:{site.port}/docs/page")
    assert site.asked == []


def test_a_server_of_ones_own_network_is_asked_where_that_was_said(
    site: Served, monkeypatch: pytest.MonkeyPatch
):
    def look_up(host, port, *rest, **more):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    tool = HttpFetch(allow=[f"http://docs.test:{site.port}/docs/"], private=True)
    assert "Head" in fetch_page(tool, f"http://docs.test:{site.port}/docs/page")


def test_without_a_list_nothing_is_allowed():
    with pytest.raises(ToolError, match="allowed"):
        fetch_page(HttpFetch(), "http://example.com/")


@pytest.mark.parametrize(
    "text",
    ["", "docs.python.org", "ftp://x/", "http://u@x/", "http://*.x/", "http://x/?q", "http://"],
)
def test_what_is_no_prefix_is_refused_when_the_tool_is_made(text: str):
    with pytest.raises(ConfigError, match="no URL prefix"):
        HttpFetch(allow=[text])


def test_a_prefix_reads_as_it_was_written():
    for text in ("https://docs.python.org/3/", "http://[::1]:8000/", "http://x:81/page"):
        assert str(Prefix.parse(text)) == text


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("", ""),
        ("plain", "plain"),
        ("<p>a<p>b", "a\nb"),
        ("<head><title>t</title><p>a", "t"),
        ("<body>a<!-- b --><svg><text>c</text></svg>d", "ad"),
        ("<p>&lt;script&gt;</p></b>", "<script>"),
        ("<script>a</p>", ""),
    ],
)
def test_markup_that_is_broken_is_read_as_far_as_it_goes(html: str, text: str):
    assert text_of_html(html) == text
