"""What a check found."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

# What differs between findings of one kind: numbers, and values as repr shows them.
_VALUE = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+""")


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


def grouped(findings: Iterable[Finding]) -> list[tuple[Finding, int]]:
    """Return the first finding of each kind, in order, with the number of further ones.

    Findings are of one kind where they differ in nothing but numbers and quoted values.
    """
    kinds: dict[tuple[Level, str, str], list[Finding]] = {}
    for found in findings:
        kind = (found.level, _VALUE.sub("*", found.what), _VALUE.sub("*", found.fix))
        kinds.setdefault(kind, []).append(found)
    return [(same[0], len(same) - 1) for same in kinds.values()]


def error(what: str, fix: str) -> Finding:
    """Return a finding of level ``error``."""
    return Finding(level=Level.ERROR, what=what, fix=fix)


def warning(what: str, fix: str) -> Finding:
    """Return a finding of level ``warning``."""
    return Finding(level=Level.WARNING, what=what, fix=fix)


def info(what: str, fix: str) -> Finding:
    """Return a finding of level ``info``."""
    return Finding(level=Level.INFO, what=what, fix=fix)
