"""Work counted in lines of Python run: what a machine's load does not change."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Lines:
    """Lines run by one thread; every turn of a loop counts, also within one line."""

    def __init__(self) -> None:
        self.number = 0


@contextmanager
def count_lines(*, of: str = "") -> Iterator[Lines]:
    """Count the lines that this thread runs in the block, in files whose path ends with `of`.

    What a C function does inside, such as a search through a list, is not seen.
    """
    lines = Lines()

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(of):
            return None
        if event == "line":
            lines.number += 1
        return note

    previous = sys.gettrace()
    sys.settrace(note)
    try:
        yield lines
    finally:
        sys.settrace(previous)
