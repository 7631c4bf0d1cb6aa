from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.headers import why_no_header


@given(st.text(min_size=1))
def test_what_passes_arrives_as_it_is(value: str) -> None:
    if why_no_header(value) is None:
        sent = httpx.Request("GET", "http://x/", headers={"Authorization": value})
        assert sent.headers["authorization"] == value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("secret\n", "line break"),
        ("secret\r\nX-Admin: 1", "line break"),
        (" secret", "white space"),
        ("s\u00e9cret", "ASCII"),
        ("a\x00b", "ASCII"),
    ],
)
def test_a_secret_that_cannot_be_sent_is_told_and_not_shown(value: str, reason: str) -> None:
    told = why_no_header(value)
    assert told is not None and reason in told and "cret" not in told


def test_keys_of_services_pass() -> None:
    assert why_no_header("sk-proj_A9+/=.~") is None
    assert why_no_header("two words") is None
