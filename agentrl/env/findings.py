"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """Training would fail, or train something else than meant."""
    WARNING = "warning"
    """Works, with a drawback."""
    INFO = "info"
    """Could not be checked here, and why."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    level: Level
    what: str
    """What was expected and what was got."""
    fix: str
    """What to do about it."""

    def __str__(self) -> str:
        """Return one line for a terminal."""
        return f"{self.level}: {self.what}; {self.fix}"


def error(what: str, fix: str) -> Finding:
    """Return a finding of level ``error``."""
    return Finding(level=Level.ERROR, what=what, fix=fix)


def warning(what: str, fix: str) -> Finding:
    """Return a finding of level ``warning``."""
    return Finding(level=Level.WARNING, what=what, fix=fix)


def info(what: str, fix: str) -> Finding:
    """Return a finding of level ``info``."""
    return Finding(level=Level.INFO, what=what, fix=fix)
