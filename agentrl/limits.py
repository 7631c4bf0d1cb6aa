"""Lengths of a run's episodes that nobody set, bounded by what its model can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.config.load import given_keys
from agentrl.config.schema import Config
from agentrl.config.validate import validate
from agentrl.model.describe import model_config
from agentrl.model.load import positions_in
from agentrl.model.tiny import MAX_CONTEXT_TOKENS
from agentrl.rollout.fit_limits import LENGTHS, as_settings, fitted, refuse_beyond_positions
from agentrl.train.config import TINY
from agentrl.train.open_model import MODEL_FOLDER, is_run


def within_positions(
    config: Config, overrides: Sequence[str], *, announce: Callable[[str], None]
) -> Config:
    """Return a new run's settings with lengths that its model can take.

    Reads the configuration of the model alone.

    Args:
        overrides: what the user set; the rest are defaults.
        announce: told what was lowered.

    Raises:
        ConfigError: what the user set goes beyond the model's positions; says what would do.
        ModelError: there is no model at ``model.path``.
    """
    path = config.model.path
    positions = positions_of_path(path)
    keys = given_keys(overrides)
    given = [name for name in LENGTHS if f"rollout.{name}" in keys]
    rollout = fitted(config.rollout, given=given, positions=positions)
    refuse_beyond_positions(rollout, positions, source=path)
    if rollout == config.rollout:
        return config
    announce(f"the model {path!r} has {positions} positions: {as_settings(rollout)}")
    bounded = replace(config, rollout=rollout)
    validate(bounded)
    return bounded


def positions_of_path(path: str) -> int | None:
    """Return how many positions the model at ``model.path`` has; None where it does not say.

    Raises:
        ModelError: nothing there that can be read.
    """
    if path == TINY:
        return MAX_CONTEXT_TOKENS
    return positions_in(model_config(str(Path(path) / MODEL_FOLDER) if is_run(path) else path))
