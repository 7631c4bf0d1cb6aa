"""What the verbs have in common: settings on the command line."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from agentrl.errors import ConfigError
from agentrl.telemetry.files import PARTIAL


def overrides_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Take ``key=value`` settings after the options."""
    return click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)


def env_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Take ``--env``."""
    return click.option(
        "--env",
        "env_id",
        metavar="ID",
        help="A registered environment, package.module:Class, or ./file.py:Class.",
    )(function)


def model_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Take ``--model``."""
    return click.option(
        "--model",
        metavar="RUN_OR_PATH",
        help="A run directory, a hub id, a local directory, a .gguf file, or tiny.",
    )(function)


def with_env(overrides: tuple[str, ...], env_id: str | None) -> list[str]:
    """Return the settings with ``--env`` among them, quoted for the override grammar."""
    chosen = [] if env_id is None else [f"env.id={quote(env_id)}"]
    return [*chosen, *overrides]


def json_object(text: str, option: str) -> dict[str, Any]:
    """Return the JSON object that an option holds; raises :class:`ConfigError` for others."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} is no JSON ({error}); got {text!r:.200}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option} must be a JSON object, got {text!r:.200}")
    return value


def quote(value: str) -> str:
    """Quote a value, so that paths and colons reach a setting as they are."""
    # Backslashes are plain but before a quote, the closing one too, and before an interpolation.
    return "'" + re.sub(r"(\\*)('|\$\{|\Z)", _escaped, value) + "'"


def _escaped(found: re.Match[str]) -> str:
    backslashes, special = found.groups()
    return 2 * backslashes + (f"\\{special}" if special else "")


def check_out_file(out: Path) -> None:
    """See that the file ``out`` can be written, before anything is played for it.

    Raises:
        ConfigError: it is a directory or a device, or its directory cannot be created or written.
    """
    if os.path.lexists(out) and not out.is_file():
        raise ConfigError(f"--out {str(out)!r} is no plain file; give the path of a file")
    _refuse_long_name(out)
    _check_writable(out.parent, what=f"--out {str(out)!r}")


def check_out_dir(out: Path) -> None:
    """See that ``out`` is an empty directory, or one that can be created.

    What a killed process left half written does not count: it is begun anew.

    Raises:
        ConfigError: it is a file, holds something, or cannot be created or written.
    """
    if os.path.lexists(out) and not out.is_dir():
        raise ConfigError(f"{str(out)!r} is a file; give a directory")
    if out.exists() and any(path.name != PARTIAL for path in out.iterdir()):
        raise ConfigError(f"{str(out)!r} is not empty; give another directory")
    _refuse_long_name(out)
    _check_writable(out, what=repr(str(out)))


def _refuse_long_name(path: Path) -> None:
    try:
        os.lstat(path)
    except OSError as error:  # others say what is there, or are told below
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigError(
                f"{str(path)[:40]!r}...: {error.strerror}; give a shorter one"
            ) from error


def _check_writable(directory: Path, *, what: str) -> None:
    """Look at the nearest directory that exists; creates nothing."""
    nearest = directory.absolute()
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"{what}: {str(nearest)!r} is no directory; give another path")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{what}: {str(nearest)!r} cannot be written; give another path")


def prepare_process(num_threads: int) -> None:
    """Set up logging and torch before models load."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    torch.set_num_threads(num_threads or os.cpu_count() or 1)
