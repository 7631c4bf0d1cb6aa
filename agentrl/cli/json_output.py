"""``--json``: standard output holds one JSON value, whatever else is printed meanwhile.

Environments, tools and engines print what they like, some of them in processes of their own. Until
the value is there, all of that goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import click

_DIVERTED = "agentrl.cli.json_output"


def keep_stdout_clear() -> None:
    """Send what is printed from now on to standard error, until :func:`print_json`."""
    context = click.get_current_context()
    stack = contextlib.ExitStack()
    out = sys.stdout
    stack.enter_context(contextlib.redirect_stdout(sys.stderr))
    with contextlib.suppress(OSError, ValueError):  # one of them is no file, as in tests
        own, other = out.fileno(), sys.stderr.fileno()
        out.flush()
        kept = os.dup(own)
        stack.callback(os.close, kept)
        stack.callback(os.dup2, kept, own)
        os.dup2(other, own)  # other processes print as well
    context.meta[_DIVERTED] = stack
    context.call_on_close(stack.close)


def _told(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    if value:
        keep_stdout_clear()
    return value


json_option = click.option(
    "--json", "as_json", is_flag=True, callback=_told, is_eager=True, help="Print JSON."
)
"""Takes ``--json`` as ``as_json``; a verb then prints by :func:`print_json` and nothing else."""


def print_json(value: Any, *, default: Callable[[Any], Any] | None = None) -> None:
    """Print the one value. JSON has no NaN and no infinity: they become null.

    Args:
        default: makes JSON of what is none, as for :func:`json.dumps`.
    """
    stack = click.get_current_context().meta.pop(_DIVERTED, None)
    if stack is not None:
        stack.close()
    click.echo(json.dumps(_finite(value), indent=2, allow_nan=False, default=default))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
