"""Runs code of the user's inside the algorithm: what it raises or returns is named as its own."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.errors import AgentRLError, TrainingError


@contextmanager
def blamed(setting: str, code: object) -> Iterator[None]:
    """Turn what ``code`` raises into one message that names the setting and the line.

    Errors of agentrl's own algorithms pass as they are: they are our bugs.

    Raises:
        TrainingError: ``code`` is not of agentrl and raised, :class:`SystemExit` included.
    """
    try:
        yield
    except AgentRLError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if is_own(code):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise TrainingError(
            f"{setting} raised {type(error).__name__}: {error} "
            f"({frame.filename}:{frame.lineno}, in {frame.name})"
        ) from error


def is_own(code: object) -> bool:
    """Tell whether a function, a class or an instance is one of agentrl's own."""
    module = getattr(code, "__module__", None) or type(code).__module__
    return module == "agentrl" or module.startswith("agentrl.")
