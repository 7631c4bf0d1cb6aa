"""Who may call a tool server."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError
from agentrl.tool.serving.access import ANYONE, Tokens, is_loopback, read_tokens
from agentrl.tool.serving.config import ServerLimits

FIRST, SECOND = "a" * 32, "b" * 32


def test_tokens_tell_callers_apart_without_being_kept():
    tokens = Tokens([FIRST, SECOND])
    owners = {tokens.owner(f"Bearer {FIRST}"), tokens.owner(f"bearer {SECOND}")}
    assert len(owners) == 2 and None not in owners
    assert not any(secret in repr(vars(tokens)) for secret in (FIRST, SECOND))


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", f"Bearer {FIRST}x", FIRST, f"Basic {FIRST}"]
)
def test_whoever_has_no_token_is_nobody(header: str | None):
    assert Tokens([FIRST]).owner(header) is None


def test_without_tokens_everybody_is_the_same_caller():
    assert Tokens().owner(None) == Tokens().owner("Bearer x") == ANYONE


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.4", "example.com"])
def test_a_server_without_a_token_listens_on_this_machine_only(host: str):
    with pytest.raises(ConfigError, match="--token-env"):
        read_tokens((), host=host)
    assert read_tokens(("T",), host=host, environ={"T": FIRST}).required


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_needs_none(host: str):
    assert is_loopback(host)
    assert not read_tokens((), host=host).required


@pytest.mark.parametrize("value", [None, "", "short"])
def test_a_token_that_is_no_secret_is_refused_without_being_shown(value: str | None):
    environ = {} if value is None else {"TOOLS_TOKEN": value}
    with pytest.raises(ConfigError, match="TOOLS_TOKEN") as caught:
        read_tokens(("TOOLS_TOKEN",), host="127.0.0.1", environ=environ)
    assert "short" not in str(caught.value).replace("too short", "")


@pytest.mark.parametrize("token", ["a" * 32 + "\n", "a b" * 10, "é" * 32, "a" * 32 + "\0"])
def test_a_token_that_no_header_can_carry_is_refused_at_the_start(token: str):
    with pytest.raises(ConfigError, match="no header can carry"):
        read_tokens(("T",), host="127.0.0.1", environ={"T": token})


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["max_sessions", "session_ttl_s", "max_requests", "max_body_bytes"]
)
def test_a_limit_that_lets_nobody_in_or_is_none_is_refused(name: str, value: float):
    with pytest.raises(ConfigError, match=f"{name} must be above 0"):
        ServerLimits(**{name: value})  # pyright: ignore[reportArgumentType]
