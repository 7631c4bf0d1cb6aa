"""A tool that holds the event loop is named."""

from __future__ import annotations

import asyncio
import logging
import threading

from agentrl.tool.deadline import within
from agentrl.tool.watchdog import watch_running_loop


class Heard(logging.Handler):
    """Lets go of what holds the loop once a warning of it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.told_once = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())
        self.told_once.set()


def test_the_tool_that_holds_the_loop_is_named_once_with_the_line() -> None:
    heard = Heard()
    log = logging.getLogger("agentrl.tool.watchdog")
    log.addHandler(heard)

    async def holds_the_loop() -> None:
        heard.told_once.wait(30.0)
        threading.Event().wait(0.3)  # goes on, and is not told of again

    async def main() -> None:
        watch_running_loop(max_lag_s=0.05)
        watch_running_loop(max_lag_s=0.05)
        await within(holds_the_loop(), 60.0, name="tool scrape")

    try:
        asyncio.run(main())
    finally:
        log.removeHandler(heard)
    assert len(heard.told) == 1
    assert heard.told[0].startswith("tool scrape has held the event loop")
    assert "holds_the_loop" in heard.told[0]


def test_others_that_hold_the_loop_are_not_called_tools() -> None:
    heard = Heard()
    log = logging.getLogger("agentrl.tool.watchdog")
    log.addHandler(heard)

    async def main() -> None:
        watch_running_loop(max_lag_s=0.02)
        threading.Event().wait(0.2)

    try:
        asyncio.run(main())
    finally:
        log.removeHandler(heard)
    assert heard.told == []
