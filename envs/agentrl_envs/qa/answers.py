"""Which answer a text states, and whether it is that of the reference.

The rule: a text states an answer if it holds the marker ``####`` exactly once; the answer is the
rest of that line. Two markers are two answers, and no answer. What follows on later lines is not
read. A run of more or fewer ``#`` is no marker.

Answers are compared after white space around them, one final full stop, a ``$`` in front and a
``%`` behind have been taken off. Two numbers are equal if their values are (``1,200`` and
``1200.0``); commas may only part thousands. Anything else is compared as text, letter case and runs
of white space aside. Digits, signs and markers are those of ASCII: look-alikes are text.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

MARKER = "####"
MAX_CHARS = 200
"""A stated answer that is longer is none."""
_MARKER = re.compile(r"(?<!#)####(?!#)")
_NUMBER = re.compile(r"-?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]+)?|-?\.[0-9]+")


def stated_answer(text: str) -> str | None:
    """Return what a text states, white space stripped; None where there is no answer, or two."""
    markers = list(_MARKER.finditer(text))
    if len(markers) != 1:
        return None
    answer = text[markers[0].end() :].split("\n", 1)[0].strip()
    return answer if 0 < len(answer) <= MAX_CHARS else None


def reference_answer(value: object) -> str | None:
    """Return the answer of a reference: what it states after its marker, or all of it without one.

    None where it cannot be told: no text or number, nothing there, or several markers.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        value = f"{Decimal(str(float(value))):f}"  # 0.00001 and not 1e-05, which nobody writes
    text = str(value)
    if _MARKER.search(text):
        return stated_answer(text)
    return text.strip() or None


def same_answer(one: str, other: str) -> bool:
    """Compare two answers after normalisation."""
    return normalized(one) == normalized(other)


def normalized(answer: str) -> Decimal | str:
    """Return the value of a number, or the text that is compared."""
    text = answer.strip().removesuffix(".").rstrip()
    number = text.removesuffix("%").rstrip()
    sign, rest = ("-", number[1:]) if number.startswith("-") else ("", number)
    number = sign + rest.removeprefix("$").lstrip()
    if len(number) <= MAX_CHARS and _NUMBER.fullmatch(number):
        return Decimal(number.replace(",", ""))
    return " ".join(text.split()).casefold()
