"""Python values as JSON, both ways, so that nothing from a sandbox is ever unpickled.

Plain JSON cannot tell a tuple from a list nor hold a dict with integer keys, so containers are
tagged arrays: ``["l", …]`` list, ``["t", …]`` tuple, ``["s", …]`` set, ``["f", …]`` frozenset,
``["d", [key, value], …]`` dict, ``["b", hex]`` bytes, ``["x", repr]`` a float JSON lacks.
Scalars stand for themselves. Only exact builtin types are taken: a subclass could redefine
equality.

The two functions use nothing outside this module and the standard library, because their source
is also run inside the sandbox.
"""

from __future__ import annotations

import inspect
import json
import math
from typing import Any

MAX_DEPTH = 64
"""Levels of containers in a value."""


def encode(value: Any, depth: int = 0) -> Any:
    """Return the JSON form of a value.

    Raises:
        ValueError: a type outside the list above, or deeper than `MAX_DEPTH`.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else ["x", repr(value)]
    if depth >= MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if kind is bytes:
        return ["b", value.hex()]
    if kind in (list, tuple):
        return ["l" if kind is list else "t", *(encode(item, depth + 1) for item in value)]
    if kind in (set, frozenset):
        items = [encode(item, depth + 1) for item in value]
        return ["s" if kind is set else "f", *sorted(items, key=json.dumps)]
    if kind is dict:
        pairs = value.items()
        return ["d", *([encode(key, depth + 1), encode(item, depth + 1)] for key, item in pairs)]
    raise ValueError(f"a value of type {kind.__name__} cannot be compared")


def decode(form: Any, depth: int = 0) -> Any:
    """Return the value of a JSON form; the inverse of :func:`encode`.

    Raises:
        ValueError: not a form that `encode` makes, or deeper than `MAX_DEPTH`.
    """
    if form is None or type(form) in (bool, int, float, str):
        return form
    if depth > MAX_DEPTH or type(form) is not list or not form:
        raise ValueError("not an encoded value")
    tag, items = form[0], form[1:]
    if tag == "b" and len(items) == 1 and type(items[0]) is str:
        return bytes.fromhex(items[0])
    if tag == "x" and len(items) == 1 and items[0] in ("nan", "inf", "-inf"):
        return float(items[0])
    try:
        if tag == "d":
            pairs = [(decode(k, depth + 1), decode(v, depth + 1)) for k, v in items]
            return dict(pairs)
        make = {"l": list, "t": tuple, "s": set, "f": frozenset}[tag]
        return make([decode(item, depth + 1) for item in items])
    except (KeyError, TypeError):
        raise ValueError("not an encoded value") from None


CODEC_SOURCE = f"""
    import json, math
    from typing import Any
    scope = {{"json": json, "math": math, "Any": Any, "MAX_DEPTH": {MAX_DEPTH}}}
    exec({inspect.getsource(encode)!r}, scope)
    exec({inspect.getsource(decode)!r}, scope)
    encode, decode = scope["encode"], scope["decode"]
"""
"""First lines of a function that runs inside a sandbox, where they define `encode` and `decode`."""
