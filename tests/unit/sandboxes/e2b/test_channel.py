from __future__ import annotations

import asyncio
import base64

import pytest
from agentrl_sandboxes.e2b.channel import ProcessChannel
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.binary(min_size=1), min_size=1), st.lists(st.integers(1, 40), min_size=1))
def test_bytes_come_through_whatever_way_the_text_is_cut(pieces, cuts):
    async def scenario() -> bytes:
        channel = ProcessChannel()
        text = "".join(base64.b64encode(piece).decode() + "\n" for piece in pieces)
        position, turn = 0, 0
        while position < len(text):
            step = cuts[turn % len(cuts)]
            channel.on_stdout(text[position : position + step])
            position, turn = position + step, turn + 1
        channel.close()
        data = b""
        while chunk := await channel.receive():
            data += chunk
        return data

    assert asyncio.run(scenario()) == b"".join(pieces)


def test_what_our_relay_never_says_is_an_end_and_is_kept_as_last_words():
    async def scenario() -> None:
        channel = ProcessChannel()
        channel.on_stderr("unshare: unshare failed: Operation not permitted")
        channel.on_stdout("bash: no job control\n")
        assert channel.readable
        assert await channel.receive() == b""
        assert await channel.receive() == b""
        assert "Operation not permitted" in channel.last_words()
        with pytest.raises(OSError, match="has ended"):
            await channel.send(b"more")

    asyncio.run(scenario())
