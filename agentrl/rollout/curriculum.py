"""Which tasks are worth sampling at present, by how well the policy does on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from agentrl.errors import CheckpointError, ConfigError
from agentrl.registry import Registry
from agentrl.types import Task


class Curriculum(Protocol):
    """Accepts or skips tasks; hears of the success of those that were sampled.

    Calls come in an order that does not depend on timing where ``rollout.max_staleness`` is 0, so
    an implementation that uses no clock and no generator of its own makes resumed runs equal to
    unbroken ones.
    """

    def accept(self, task: Task, *, key: str, epoch: int) -> bool:
        """Say whether to sample ``task`` now. ``key`` names it among those of all environments.

        The feed overrules a refusal after ``data.curriculum.max_skips`` refusals in a row.
        """
        ...

    def update(self, key: str, success_rate: float) -> None:
        """Hear which share of a group, failures of ours left out, has solved the task."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain data, as JSON has it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        ...


curriculum_registry: Registry[Any] = Registry(
    "curriculum",
    "agentrl.curricula",
    builtin={"success_band": "agentrl.rollout.curriculum:SuccessBand"},
)


class SuccessBand:
    """Skips tasks that are solved nearly always or nearly never.

    A task that was never sampled is accepted. One whose success rate, averaged over its last
    ``window`` groups, lies outside ``[low, high]`` is skipped, ``revisit_after`` times; then it is
    sampled again, so that a rate that is out of date does not bar it for good.

    Args:
        low: tasks below are too hard at present.
        high: tasks above are solved.
        window: groups of a task that count.
        revisit_after: epochs that a task is left out before it is tried again, at least 1.

    Raises:
        ConfigError: numbers that make no band.
    """

    def __init__(
        self, low: float = 0.1, high: float = 0.9, window: int = 1, revisit_after: int = 2
    ) -> None:
        if not 0 <= low <= high <= 1 or window < 1 or revisit_after < 1:
            raise ConfigError(
                f"data.curriculum.kwargs: low={low}, high={high}, window={window}, "
                f"revisit_after={revisit_after}: want 0 <= low <= high <= 1, and at least 1 for "
                "the other two"
            )
        self._low, self._high = low, high
        self._window, self._revisit_after = window, revisit_after
        self._rates: dict[str, deque[float]] = {}
        self._skips: dict[str, int] = {}

    def accept(self, task: Task, *, key: str, epoch: int) -> bool:
        """Accept what is new, inside the band, or due to be tried again."""
        rates = self._rates.get(key)
        if rates is None or self._low <= sum(rates) / len(rates) <= self._high:
            return True
        skips = self._skips.get(key, 0)
        if skips >= self._revisit_after:
            self._skips.pop(key)
            return True
        self._skips[key] = skips + 1
        return False

    def update(self, key: str, success_rate: float) -> None:
        """Add the rate of one group."""
        self._rates.setdefault(key, deque(maxlen=self._window)).append(success_rate)
        self._skips.pop(key, None)

    def state_dict(self) -> dict[str, Any]:
        """Return rates and skips by task."""
        rates = {key: list(values) for key, values in self._rates.items()}
        return {"rates": rates, "skips": dict(self._skips)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over rates and skips.

        Raises:
            CheckpointError: the state is another curriculum's.
        """
        try:
            self._rates = {
                key: deque(values, maxlen=self._window) for key, values in state["rates"].items()
            }
            self._skips = dict(state["skips"])
        except (KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"the state of the curriculum has the parts {sorted(state)}, which success_band "
                "does not write; resume with the curriculum of the run, or start a new one"
            ) from error
