"""Framing and bounded reading, on real sockets and pipes."""

from __future__ import annotations

import os
import socket

import pytest
from agentrl_sandboxes.supervised.inside import capture, wire
from hypothesis import given
from hypothesis import strategies as st


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.none()), st.binary())
def test_a_frame_comes_back(header, body):
    near, far = socket.socketpair()
    with near, far:
        near.sendall(wire.pack(header, body))
        assert wire.receive(far, 1 << 20) == (header, body)


def test_a_stream_that_ends_inside_a_frame_is_an_end():
    near, far = socket.socketpair()
    with far:
        near.sendall(wire.pack({"a": 1}, b"body")[:-2])
        near.close()
        assert wire.receive(far, 1 << 20) is None


def test_a_frame_above_the_limit_is_refused_before_it_is_read():
    near, far = socket.socketpair()
    with near, far:
        near.sendall(wire.PREFIX.pack(10, 1 << 31))
        with pytest.raises(wire.FrameError, match="limit 100"):
            wire.receive(far, 100)


@pytest.mark.parametrize("raw", [b"", b"[]", b"1", b"{", b"[" * 100_000, b"\xff", b"9" * 5000])
def test_a_header_that_is_no_object_is_refused(raw):
    with pytest.raises(wire.FrameError):
        wire.parse_header(raw)


def test_a_capture_keeps_the_head_and_counts_the_rest():
    read, write = os.pipe()
    pipe = capture.Capture(read, keep_bytes=10)
    os.write(write, b"0123456789abcdef")
    pipe.drain(1 << 20)
    assert pipe.take() == (b"0123456789", 6)
    os.write(write, b"next")
    os.close(write)
    pipe.drain(1 << 20)
    assert (pipe.take(), pipe.open) == ((b"next", 0), False)
    os.close(read)


def test_reports_split_private_data_from_the_report_whatever_the_chunks():
    near, far = socket.socketpair()
    stream = wire.PREFIX.pack(0, 3) + b"abc" + wire.PREFIX.pack(0, 2) + b"de"
    stream += wire.pack({"k": 1}, wire.NUMBER.pack(5))
    with near, far:
        reports = capture.Reports(far, max_report_bytes=1000, max_private_bytes=1000)
        reports.expected = 5
        for byte in stream:
            assert reports.report is None
            near.sendall(bytes([byte]))
            reports.transfer()
        assert reports.take() == (b'{"k": 1}', b"abcde")


@pytest.mark.parametrize("number", [b"", wire.NUMBER.pack(4), wire.NUMBER.pack(5) + b"x"])
def test_a_report_with_another_number_is_out_of_turn(number):
    near, far = socket.socketpair()
    with near, far:
        reports = capture.Reports(far, max_report_bytes=1000, max_private_bytes=1000)
        reports.expected = 5
        near.sendall(wire.pack({"kind": "ok"}, number))
        reports.transfer()
        assert reports.out_of_turn and reports.report is None


@pytest.mark.parametrize(("head", "body"), [(2000, 0), (0, 5000), (1 << 31, 1 << 31)])
def test_reports_stop_at_their_limits(head, body):
    near, far = socket.socketpair()
    with near, far:
        reports = capture.Reports(far, max_report_bytes=1000, max_private_bytes=4000)
        near.sendall(wire.PREFIX.pack(0, 2000) + bytes(2000))
        reports.transfer()
        assert not reports.overflow
        near.sendall(wire.PREFIX.pack(head, body))
        reports.transfer()
        assert reports.overflow
