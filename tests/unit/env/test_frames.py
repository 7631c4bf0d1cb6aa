from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentrl.env.frames import FrameReader, frame


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 50), min_size=1))
def test_payloads_survive_any_cutting_of_the_stream(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    reader, received, position, turn = FrameReader(), [], 0, 0
    while position < len(stream):
        size = cuts[turn % len(cuts)]
        received += reader.feed(stream[position : position + size])
        position, turn = position + size, turn + 1
    assert received == payloads
