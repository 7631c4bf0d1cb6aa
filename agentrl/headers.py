"""What may stand in a header of HTTP: a key with a line break would end the header, or the run."""

from __future__ import annotations

import re

_VISIBLE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")


def why_no_header(value: str) -> str | None:
    """Return what keeps a secret from being sent in a header, without showing it; None: nothing."""
    if _VISIBLE.fullmatch(value):
        return None
    if "\n" in value or "\r" in value:
        return "holds a line break; remove it"
    if value != value.strip():
        return "begins or ends with white space; remove it"
    return "holds a character other than those of ASCII; a header of HTTP cannot carry it"
