from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from agentrl.env.deadline import answer_within, call_within
from agentrl.errors import EnvError, EnvTimeout


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """What a hanging call waits for; set when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_a_call_gives_its_value_or_what_it_raised() -> None:
    assert call_within(lambda: 3, 60, what="it", fix="x") == 3
    for failure in (KeyError("k"), SystemExit(2), TimeoutError("of a socket")):

        def fail(failure: BaseException = failure) -> None:
            raise failure

        with pytest.raises(type(failure)) as caught:
            call_within(fail, 60, what="it", fix="x")
        assert caught.value is failure


def test_a_call_that_hangs_is_named_with_its_deadline_and_the_fix(never: threading.Event) -> None:
    with pytest.raises(EnvTimeout, match=r"^tasks\('val'\) did not return within 0.05 s; hurry$"):
        call_within(never.wait, 0.05, what="tasks('val')", fix="hurry")


def test_the_event_loop_goes_on_while_a_call_hangs(never: threading.Event) -> None:
    async def both() -> list[int]:
        ticks: list[int] = []

        async def tick() -> None:
            while True:
                ticks.append(1)
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        with pytest.raises(TimeoutError):
            await answer_within(never.wait, 0.05)
        ticking.cancel()
        return ticks

    assert len(asyncio.run(both())) > 1


def test_an_exit_in_a_call_does_not_end_the_event_loop() -> None:
    with pytest.raises(EnvError, match=r"sys.exit\(3\) was called"):
        asyncio.run(answer_within(lambda: sys.exit(3), 60))


def test_a_process_ends_although_a_call_hangs() -> None:
    code = """
import asyncio, threading
from agentrl.env.deadline import answer_within
async def main():
    try:
        await answer_within(threading.Event().wait, 0.05)
    except TimeoutError:
        print("late")
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=True
    )
    assert done.stdout == "late\n"
