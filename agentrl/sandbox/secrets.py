"""Secrets of sandbox backends: named in the configuration, never written there."""

from __future__ import annotations

import os

from agentrl.errors import ConfigError, SandboxUnavailable
from agentrl.headers import why_no_header
from agentrl.references import REFERENCE


def check_reference(name: str, value: str) -> str:
    """Return a reference ``${env:NAME}`` as it was given.

    Args:
        name: of the argument, for messages.
        value: what it was set to.

    Raises:
        ConfigError: it is something else, which would end up in the run's configuration file.
    """
    if not REFERENCE.fullmatch(value):
        raise ConfigError(
            f"sandbox.kwargs.{name} must be a reference to an environment variable, as in "
            "'${env:MY_TOKEN}', so that the secret is written to no file; got something else "
            "(not shown)"
        )
    return value


def resolve(name: str, reference: str) -> str:
    """Return what a checked reference stands for.

    Raises:
        SandboxUnavailable: the variable is not set, or no header can carry its value.
    """
    match = REFERENCE.fullmatch(reference)
    assert match is not None  # it was checked when it was given
    value = os.environ.get(match[1])
    if not value:
        raise SandboxUnavailable(
            f"sandbox.kwargs.{name} refers to the environment variable {match[1]}, "
            "which is not set here; export it where the run starts"
        )
    if reason := why_no_header(value):
        raise SandboxUnavailable(f"sandbox.kwargs.{name}: the variable {match[1]} {reason}")
    return value
