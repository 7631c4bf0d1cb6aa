"""Who may call a tool server."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError
from agentrl.tool.serving.access import ANYONE, Tokens, is_loopback, read_tokens

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
