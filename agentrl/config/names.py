"""Names that nobody knows, with the nearest known ones."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def unknown_key_message(key: str, known: Sequence[str]) -> str:
    """Say that ``key`` is unknown, with the nearest known ones."""
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    if not close:  # the section may be right and the leaf wrong, or the other way round
        leaf = key.rsplit(".", 1)[-1]
        close = [name for name in known if name.rsplit(".", 1)[-1] == leaf][:3]
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    section = key.split(".")[0]
    inside = [name for name in known if name.startswith(f"{section}.")]
    return f"unknown setting {key!r}{hint}" + (
        "" if close or not inside else f"; {section} has: {', '.join(inside)}"
    )
