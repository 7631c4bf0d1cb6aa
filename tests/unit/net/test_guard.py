"""Where a request may go, whoever wrote the URL."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.net.guard import Forbidden, Guard, HostRule

PUBLIC = Guard()
NAMED = Guard(["api.example.com", "10.0.0.5:8080", "[::1]:9000", "*.docs.example.org", "localhost"])


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a?b=c",
        "http://93.184.216.34/",
        "https://EXAMPLE.com:443",
        "http://[2606:4700::1111]/",
        "http://münchen.example/",
    ],
)
def test_a_public_url_passes(url: str):
    PUBLIC.check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        # loopback, private, link-local, metadata, in every spelling
        "http://127.0.0.1/",
        "http://127.9.9.9/",
        "http://0.0.0.0/",
        "http://[::1]/",
        "http://[::]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:7f00:1]/",
        "http://[64:ff9b::7f00:1]/",
        "http://[2002:7f00:1::]/",
        "http://[fe80::1]/",
        "http://[fd00:ec2::254]/",
        "http://10.1.2.3/",
        "http://172.16.0.1/",
        "http://192.168.1.1/",
        "http://100.64.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::ffff:169.254.169.254]/",
        "http://100.100.100.200/",
        "http://168.63.129.16/",
        "http://192.0.0.192/",
        "http://224.0.0.1/",
        "http://255.255.255.255/",
        "http://240.0.0.1/",
        # other schemes
        "file:///etc/passwd",
        "gopher://example.com/",
        "ftp://example.com/",
        "javascript:alert(1)",
        "//example.com/",
        "example.com",
        "",
        # what two parsers read in two ways
        "http://user@example.com/",
        "http://example.com@127.0.0.1/",
        "http://example.com\\@127.0.0.1/",
        "http://exa mple.com/",
        "http://example.com/\r\nHost: x",
        "http://example.com/\x00",
        "http:///path",
        "http://",
        # services beside the web's
        "http://example.com:22/",
        "http://example.com:6379/",
        "http://example.com:99999/",
        "http://example.com/" + "a" * 9000,
    ],
)
def test_everything_else_is_refused(url: str):
    with pytest.raises(Forbidden):
        PUBLIC.check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://api.example.com/x",
        "http://API.example.com./x",
        "http://10.0.0.5:8080/",
        "http://[::1]:9000/",
        "https://a.b.docs.example.org/",
        "http://localhost/",
    ],
)
def test_what_the_rules_name_passes(url: str):
    NAMED.check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/",
        "https://api.example.com.evil.net/",
        "https://evilapi.example.com/",
        "https://api.example.com:8443/",
        "http://10.0.0.5/",
        "http://10.0.0.6:8080/",
        "https://docs.example.org/",
        "https://evildocs.example.org/",
        "http://localhost:6379/",
        "http://127.0.0.1/",
    ],
)
def test_what_only_looks_like_it_does_not(url: str):
    with pytest.raises(Forbidden):
        NAMED.check_url(url)


def test_a_name_may_be_private_only_where_it_is_named_exactly():
    NAMED.check_address("api.example.com", "10.0.0.1")
    NAMED.check_address("localhost", "127.0.0.1")
    for host in ("a.docs.example.org", "other.example.com"):
        with pytest.raises(Forbidden):
            NAMED.check_address(host, "10.0.0.1")


def test_no_name_may_lead_to_a_metadata_service_but_its_address_may_be_named():
    with pytest.raises(Forbidden):
        NAMED.check_address("api.example.com", "169.254.169.254")
    with pytest.raises(Forbidden):
        NAMED.check_address("api.example.com", "::ffff:169.254.169.254")
    Guard(["169.254.169.254"]).check_url("http://169.254.169.254/")


def test_an_address_is_connected_to_only_if_it_is_public_or_a_named_host_has_it():
    guard = Guard(["api.example.com"])
    guard.check_connection("93.184.216.34")
    with pytest.raises(Forbidden):
        guard.check_connection("10.0.0.1")
    guard.check_address("api.example.com", "10.0.0.1")
    guard.check_connection("10.0.0.1")
    with pytest.raises(Forbidden):
        guard.check_connection("10.0.0.2")


@pytest.mark.parametrize(
    "text", ["", "a b", "http://x", "x/y", "u@x", "x:0", "x:70000", "*", "{h}"]
)
def test_a_rule_that_is_none_is_refused(text: str):
    with pytest.raises(ConfigError, match="is no host"):
        HostRule.parse(text)


@given(st.integers(0, 2**32 - 1))
def test_an_ipv4_address_is_judged_the_same_in_whatever_it_is_wrapped(number: int):
    dotted = ".".join(str(number >> shift & 255) for shift in (24, 16, 8, 0))

    def passes(host: str) -> bool:
        try:
            Guard().check_address("h", host)
        except Forbidden:
            return False
        return True

    plain = passes(dotted)
    high, low = number >> 16, number & 0xFFFF
    for wrapped in (f"::ffff:{dotted}", f"64:ff9b::{high:x}:{low:x}", f"2002:{high:x}:{low:x}::"):
        assert passes(wrapped) == plain


@given(st.text(max_size=60))
def test_no_text_breaks_the_guard(text: str):
    for url in (text, f"http://{text}", f"http://example.com{text}"):
        with contextlib.suppress(Forbidden):
            PUBLIC.check_url(url)


@pytest.mark.parametrize("host", ["fec0::1", "5f00::1", "4000::1", "::7f00:1", "::ffff:0:7f00:1"])
def test_of_ipv6_only_what_is_given_out_to_the_internet_is_public(host: str):
    with pytest.raises(Forbidden):
        PUBLIC.check_url(f"http://[{host}]/")
    with pytest.raises(Forbidden):
        PUBLIC.check_connection(host)


@pytest.mark.parametrize(
    "host", ["xn--", "①.com", "a..b", ".a", "a" * 64 + ".com", "a." * 130 + "com"]
)
def test_a_rule_for_what_no_name_server_knows_is_refused(host: str):
    with pytest.raises(ConfigError, match="is no host"):
        HostRule.parse(host)
