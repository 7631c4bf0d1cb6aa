"""When two values count as the same: the one rule of ``check`` and of the grader.

The source of :func:`equal` is also sent into the sandbox, so that what ``check`` reports is what
grading will say. It may use nothing but builtins.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any


def equal(got: Any, expected: Any) -> bool:
    """Compare by value and kind.

    * ``bool`` equals only ``bool``: ``True`` is no 1;
    * ``int`` and ``float`` compare as numbers, floats within a relative 1e-6 (absolute near zero);
    * a list and a tuple with equal elements are equal, since JSON has only lists;
    * everything else must be equal and of the same type.
    """
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    if isinstance(got, (int, float)) and isinstance(expected, (int, float)):
        if isinstance(got, int) and isinstance(expected, int):
            return got == expected
        within = 1e-6 * max(1.0, abs(expected))
        return got == expected or abs(got - expected) <= within < float("inf")
    if isinstance(got, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(got) == len(expected) and all(map(equal, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(equal(got[k], expected[k]) for k in got)
    return type(got) is type(expected) and bool(got == expected)


@functools.cache
def equal_source(name: str) -> str:
    """Return the source of :func:`equal` under another name, without annotations or docstring."""
    body = inspect.getsource(equal).partition('"""')[2].partition('"""')[2]
    return f"def {name}(got, expected):{body}".replace("equal(got[", f"{name}(got[").replace(
        "map(equal,", f"map({name},"
    )
