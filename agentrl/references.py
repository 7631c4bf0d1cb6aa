"""References to environment variables, ``${env:NAME}``, which stand in files for secrets."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from urllib.parse import quote

REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_SHORTEST_CLEARED = 4
"""Characters; a shorter value stands in text by chance."""


def names_in(texts: Iterable[str]) -> list[str]:
    """Return the environment variables that texts refer to."""
    return sorted({name for text in texts for name in REFERENCE.findall(text)})


def cleared(text: str, texts: Iterable[str]) -> str:
    """Return ``text`` with references in place of the values that ``texts`` refer to.

    A server may repeat the key that it refuses, and what it says is kept. To be called before the
    text is cut: the part of a secret is none that could be found.
    """
    return without_values(text, names_in(texts))


def without_values(text: str, names: Iterable[str]) -> str:
    """Return ``text`` with references in place of the values of environment variables."""
    for name in names:
        value = os.environ.get(name, "")
        if len(value) < _SHORTEST_CLEARED:
            continue
        for form in {value, quote(value, safe=""), json.dumps(value)[1:-1]}:
            text = text.replace(form, f"${{env:{name}}}")
    return text
