"""Secrets of a spec: named as ``${env:NAME}``, looked up when they are sent, never shown.

A target keeps the text with the reference in it, so that its ``repr``, a log or an error shows the
name of the variable. What a server sends back is cleared of the values: a server may repeat the key
that it refuses, and trajectories are kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from agentrl.errors import InfrastructureError
from agentrl.headers import why_no_header
from agentrl.references import REFERENCE, names_in
from agentrl.tool.section import Section

_CREDENTIALS = re.compile(
    r"authorization|cookie|(api|auth|access)[-_]?(key|token)|secret|token$|key$"
)


def read_texts(section: Section, key: str, *, is_headers: bool) -> dict[str, str]:
    """Return a mapping of texts that may refer to environment variables.

    Args:
        section: the runner's part of a spec.
        key: of the mapping in it.
        is_headers: the names are header names; a credential written out is refused.

    Raises:
        ToolSpecError: with file, line and column.
    """
    texts = section.text_mapping(key)
    for name, text in texts.items():
        if "${" in REFERENCE.sub("", text):
            raise section.error(
                f"{section.dotted(key, name)}: a reference is written '${{env:NAME}}', with the "
                "name of an environment variable",
                key,
                name,
            )
        if is_headers and not re.fullmatch(r"[A-Za-z0-9-]+", name):
            raise section.error(
                f"{section.dotted(key)}: {name!r} is no name of a header", key, name, at_key=True
            )
        if is_headers and "\n" in text + name:
            raise section.error(f"{section.dotted(key, name)}: has a line break", key, name)
        if _CREDENTIALS.search(name.lower()) and not REFERENCE.search(text):
            raise section.error(  # without the value: it may be the secret
                f"{section.dotted(key, name)}: a credential does not belong into a file; export it "
                f"as an environment variable and write '${{env:NAME}}'",
                key,
                name,
            )
    return dict(texts)


def unset_in(texts: Iterable[str]) -> list[str]:
    """Return those that are not set, or empty."""
    return [name for name in names_in(texts) if not os.environ.get(name)]


def resolved(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the texts with the values of the variables.

    Raises:
        InfrastructureError: a variable is not set, or its value has a line break.
    """
    return {key: REFERENCE.sub(_value, text) for key, text in texts.items()}


def resolved_headers(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the texts with the values of the variables, which are to be sent as headers.

    Raises:
        InfrastructureError: a variable is not set, or no header can carry its value.
    """
    for name in names_in(texts.values()):
        value = os.environ.get(name)
        if value and (reason := why_no_header(value)):
            raise InfrastructureError(f"the environment variable {name} {reason}")
    return resolved(texts)


def _value(match: re.Match[str]) -> str:
    name = match.group(1)
    value = os.environ.get(name, "")
    if not value:
        raise InfrastructureError(
            f"the environment variable {name} is not set, or empty; export it where the run starts"
        )
    if "\n" in value or "\r" in value:
        raise InfrastructureError(f"the environment variable {name} holds a line break; remove it")
    return value
