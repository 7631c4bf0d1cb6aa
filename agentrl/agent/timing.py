"""Seconds of a block, added up by name."""

from __future__ import annotations

import time


class Timed:
    """Context manager that adds the seconds of a block to ``timings_s[name]``."""

    __slots__ = ("_name", "_start", "_timings_s")

    def __init__(self, timings_s: dict[str, float], name: str) -> None:
        self._timings_s = timings_s
        self._name = name
        self._start = 0.0

    def __enter__(self) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        """Stop it, also where the block raised."""
        seconds = time.perf_counter() - self._start
        self._timings_s[self._name] = self._timings_s.get(self._name, 0.0) + seconds
