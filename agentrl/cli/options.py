"""What the verbs have in common: settings on the command line."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import click


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


def quote(value: str) -> str:
    """Quote a value, so that paths and colons reach a setting as they are."""
    escaped = value.replace("'", "\\'")
    return f"'{escaped}'"


def prepare_process(num_threads: int) -> None:
    """Set up logging and torch before models load."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    torch.set_num_threads(num_threads or os.cpu_count() or 1)
