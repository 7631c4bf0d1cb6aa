"""Where metrics go: the :class:`Tracker` protocol, its registry, and several trackers at once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from agentrl.errors import AgentRLError, ConfigError
from agentrl.registry import Registry

logger = logging.getLogger(__name__)

MetricValue = float | int | str | bool | None


class Tracker(Protocol):
    """Receives the metrics of a run.

    A step may be logged more than once (training, then evaluation); the calls add up.
    """

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Store flat ``metrics``; keys are paths such as ``reward/mean``."""
        ...

    def close(self) -> None:
        """Flush and release everything. Idempotent."""
        ...


@dataclass(slots=True, kw_only=True)
class TrackedRun:
    """What a tracker may know of the run it follows."""

    directory: Path
    name: str = ""
    total_steps: int | None = None
    keep_through_step: int | None = None
    """On resume: the last step of the restored checkpoint. Metrics of later steps are cut."""
    config: Mapping[str, Any] = field(default_factory=dict)


TRACKERS: Registry[Callable[..., Tracker]] = Registry(
    "tracker",
    "agentrl.trackers",
    {
        "jsonl": "agentrl.telemetry.jsonl:JsonlTracker",
        "tensorboard": "agentrl.telemetry.tensorboard:TensorBoardTracker",
        "rich": "agentrl.telemetry.console:RichTracker",
    },
)
"""id -> ``(run: TrackedRun, **kwargs) -> Tracker``."""


class MissingExtraError(ConfigError):
    """A tracker needs a package that is not installed; the message names the extra."""


def build_trackers(
    trackers: Sequence[str] | Mapping[str, Mapping[str, Any]],
    run: TrackedRun,
    *,
    skip_missing: bool = False,
) -> MultiTracker:
    """Build trackers by id, for example ``["jsonl", "rich"]`` or ``{"rich": {"quiet": True}}``.

    Args:
        trackers: ids, or ids with keyword arguments.
        run: what they follow.
        skip_missing: warn of a tracker whose extra is not installed, and go on without it.

    Raises:
        RegistryError: an unknown id.
        MissingExtraError: an extra is missing and ``skip_missing`` is False.
        DataError: the stored metrics of a resumed run are damaged.
    """
    choices = trackers if isinstance(trackers, Mapping) else {name: {} for name in trackers}
    built: dict[str, Tracker] = {}
    for name, kwargs in choices.items():
        try:
            built[name] = TRACKERS.get(name)(run, **kwargs)
        except MissingExtraError as error:
            if not skip_missing:
                raise
            logger.warning("%s", error)
    return MultiTracker(built)


class MultiTracker:
    """Several trackers as one. A tracker that fails is counted and warned of once.

    Losing a metric is never worth a training run, so errors of a tracker stop here. They show as
    ``tracker/<name>/errors`` in the metrics that the others receive.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self.errors: dict[str, int] = {}

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Hand ``metrics`` to every tracker."""
        failures = {f"tracker/{name}/errors": count for name, count in self.errors.items()}
        for name, tracker in self._trackers.items():
            self._guard(name, lambda tracker=tracker: tracker.log({**metrics, **failures}, step))

    def close(self) -> None:
        """Close every tracker, also after failures."""
        for name, tracker in self._trackers.items():
            self._guard(name, tracker.close)

    def _guard(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.errors[name] = self.errors.get(name, 0) + 1
            if self.errors[name] == 1:
                logger.warning(
                    "tracker %r failed with %s: %s; training goes on, further failures are "
                    "counted in tracker/%s/errors",
                    name,
                    type(error).__name__,
                    error,
                    name,
                    exc_info=not isinstance(error, AgentRLError),
                )


def plain_value(value: Any) -> MetricValue:
    """Turn a metric into a Python number, or into text where it is none.

    0-d arrays and tensors become numbers. Anything else that JSON has no word for is kept as its
    ``repr``, so that nothing is lost.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", 0) == 0:
        return plain_value(item())
    return repr(value)


def is_number(value: object) -> TypeGuard[int | float]:
    """True for finite and non-finite numbers, not for bools."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[int | float]:
    """True for a number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
