"""Taking the engine's frames apart, however they were cut on the way."""

from __future__ import annotations

import asyncio
import socket
import struct

from agentrl_sandboxes.docker.channel import AttachedChannel
from hypothesis import given
from hypothesis import strategies as st

FRAMES = st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40)), max_size=12)


@given(FRAMES, st.lists(st.integers(1, 60), max_size=40))
def test_standard_output_arrives_whole_whatever_the_chunks(frames, sizes):
    stream = b"".join(struct.pack(">BxxxI", kind, len(data)) + data for kind, data in frames)
    near, far = socket.socketpair()
    channel = AttachedChannel(near)
    arrived, position = b"", 0
    for size in [*sizes, len(stream)]:
        chunk, position = stream[position : position + size], position + size
        arrived += channel.take_apart(chunk)
    errors = b"".join(data for kind, data in frames if kind == 2)
    assert arrived == b"".join(data for kind, data in frames if kind == 1)
    assert channel.last_words() == (errors.decode("utf-8", "replace").strip() or "it said nothing")
    channel.close()
    far.close()


def test_standard_error_is_no_end_of_the_stream():
    async def scenario() -> list[bytes]:
        near, far = socket.socketpair()
        channel = AttachedChannel(near)
        far.sendall(struct.pack(">BxxxI", 2, 3) + b"oh!")
        waiting = asyncio.create_task(channel.receive())
        await asyncio.sleep(0.01)
        far.sendall(struct.pack(">BxxxI", 1, 2) + b"ab")
        first = await waiting
        channel.hang_up()
        assert far.recv(10) == b""
        far.close()
        last = await channel.receive()
        channel.hang_up()
        channel.close()
        channel.close()
        return [first, last]

    assert asyncio.run(scenario()) == [b"ab", b""]
