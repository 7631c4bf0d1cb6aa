from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.sandbox.base import ExecResult, SandboxLimits, SandboxStatus
from agentrl.sandbox.serving import wire

any_text = st.text(st.characters())  # surrogates too: a program can print them


@given(
    st.sampled_from(SandboxStatus),
    any_text,
    st.none() | any_text,
    st.none() | st.integers(-64, 255),
    st.binary(),
    st.booleans(),
)
def test_a_result_comes_back_as_it_was(status, text, shown, code, private, lost):
    result = ExecResult(
        status=status,
        stdout=text,
        stderr=text[::-1],
        result=shown,
        error=shown,
        exit_code=code,
        truncated_bytes=len(text),
        private=private,
        duration_s=0.25,
        state_lost=lost,
    )
    assert wire.unpack_result(wire.pack_result(result)) == result


@given(st.binary(max_size=200))
def test_bytes_that_are_no_frame_are_told_and_never_read_as_one(raw):
    with pytest.raises(wire.WireError):
        wire.unpack_result(raw)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"status": "splendid"},
        {"status": "ok", "surprise": 1},
        {"status": "ok", "stdout": ["text"]},
        {"status": "ok", "duration_s": "soon"},
    ],
)
def test_a_frame_that_is_no_result_is_told(header):
    with pytest.raises(wire.WireError):
        wire.unpack_result(wire.pack(header))


@pytest.mark.parametrize("cut", [1, 8, 20])
def test_a_frame_that_was_cut_is_told(cut):
    with pytest.raises(wire.WireError, match=r"bytes"):
        wire.unpack(wire.pack({"path": "a"}, b"0123456789")[:-cut])


def test_limits_above_the_maxima_are_lowered_and_told():
    maxima = SandboxLimits(memory_mb=512, wall_s=10.0)
    asked = SandboxLimits(memory_mb=4096, wall_s=2.0)
    limits, told = wire.clamp(asked, maxima)
    assert (limits.memory_mb, limits.wall_s) == (512, 2.0)
    assert told == ["memory_mb lowered from 4096 to this server's maximum of 512"]


@pytest.mark.parametrize(
    ("given_limits", "reason"),
    [
        ([], "JSON object"),
        ({"memory": 5}, "unknown limit 'memory'"),
        ({"memory_mb": 1.5}, "whole number"),
        ({"memory_mb": True}, "whole number"),
        ({"wall_s": float("nan")}, "positive number"),
        ({"wall_s": "5"}, "positive number"),
        ({"disk_mb": 0}, "positive"),
        ({"cpu_s": -1}, "positive"),
    ],
)
def test_limits_that_would_not_limit_are_refused(given_limits, reason):
    with pytest.raises(ConfigError, match=reason):
        wire.parse_limits(given_limits)
