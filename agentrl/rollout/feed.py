"""Hands out the prompts of a run: the stream's order, less what the curriculum skips."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agentrl.errors import AgentRLError, CheckpointError, TrainingError
from agentrl.rollout.curriculum import Curriculum
from agentrl.rollout.mix import PromptStream
from agentrl.rollout.tasks import Dispatch
from agentrl.types import TrajectoryGroup


class TaskFeed:
    """A stream of prompts that learns from the groups that come back.

    A position in it is one of the stream below, so a skipped task moves the position on too and a
    resumed run needs the index of its next prompt and :meth:`state_dict`, nothing else.

    Args:
        curriculum: decides what to skip; None skips nothing.
        max_skips: prompts left out in a row before the next one is handed out whatever the
            curriculum says: a run never starves.
        fingerprint: of the tasks, see :func:`~agentrl.rollout.tasks.fingerprint`.
        facts: metrics of the tasks that stand in every step's line.
    """

    def __init__(
        self,
        stream: PromptStream,
        *,
        curriculum: Curriculum | None = None,
        max_skips: int = 100,
        fingerprint: str = "",
        facts: Mapping[str, float] | None = None,
    ) -> None:
        self._stream = stream
        self._curriculum = curriculum
        self._max_skips = max_skips
        self._fingerprint = fingerprint
        self._facts = dict(facts or {})
        self._in_flight: dict[int, Dispatch] = {}
        self._epoch = 0
        self._skipped = self._forced = 0

    def starting_at(self, index: int) -> Iterator[Dispatch]:
        """Yield prompts without end, from ``index`` on.

        Each is chosen when it is asked for, by what was heard until then.

        Raises:
            TrainingError: the curriculum raised.
        """
        skips = 0
        for dispatch in self._stream.starting_at(index):
            if not self._accepts(dispatch):
                if skips < self._max_skips:
                    skips += 1
                    self._skipped += 1
                    continue
                self._forced += 1
            skips = 0
            self._in_flight[dispatch.index] = dispatch
            yield dispatch

    def observe(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Hear of the groups of a step, oldest first, before the next step's are handed out.

        Raises:
            TrainingError: the curriculum raised.
        """
        for group in groups:
            dispatch = self._in_flight.pop(group.index, None)
            if dispatch is None:
                continue
            self._epoch = max(self._epoch, dispatch.epoch)
            scores = [t.score for t in group.trajectories if not t.failed and t.score is not None]
            if self._curriculum is not None and scores:
                rate = sum(score.success for score in scores) / len(scores)
                with _named(self._curriculum, "update"):
                    self._curriculum.update(_key(dispatch), rate)

    def metrics(self) -> dict[str, float]:
        """Return what there is to tell of the time since the last call."""
        found: dict[str, float] = {**self._facts, "data/epoch": self._epoch}
        if self._curriculum is not None:
            found |= {"curriculum/skipped": self._skipped, "curriculum/forced": self._forced}
        self._skipped = self._forced = 0
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the index of its next prompt."""
        curriculum = self._curriculum.state_dict() if self._curriculum is not None else None
        return {"tasks": self._fingerprint, "epoch": self._epoch, "curriculum": curriculum}

    def load_state_dict(self, state: Mapping[str, Any], *, check_tasks: bool = True) -> None:
        """Take over what :meth:`state_dict` returned; nothing, of a run that saved none.

        Args:
            check_tasks: refuse other tasks than those of the run.

        Raises:
            CheckpointError: the tasks have changed, so another order would be gone on with.
        """
        if not state:
            return
        if check_tasks and state["tasks"] != self._fingerprint:
            raise CheckpointError(
                "the training tasks are not those that the run was started with, so their order "
                "cannot be gone on with: restore the file, start a new run, or set "
                "trainer.force_resume=true"
            )
        self._epoch = int(state["epoch"])
        if self._curriculum is not None and state["curriculum"] is not None:
            self._curriculum.load_state_dict(state["curriculum"])

    def _accepts(self, dispatch: Dispatch) -> bool:
        if self._curriculum is None:
            return True
        with _named(self._curriculum, "accept"):
            return bool(
                self._curriculum.accept(dispatch.task, key=_key(dispatch), epoch=dispatch.epoch)
            )


@contextmanager
def _named(curriculum: Curriculum, method: str) -> Iterator[None]:
    """Turn whatever a curriculum raises into an error with its name."""
    try:
        yield
    except AgentRLError:
        raise
    except Exception as error:
        raise TrainingError(
            f"the curriculum {type(curriculum).__name__}: {method} raised "
            f"{type(error).__name__}: {error}; mend it, or set data.curriculum.id=null"
        ) from error


def _key(dispatch: Dispatch) -> str:
    return f"{dispatch.env}/{dispatch.task.id}" if dispatch.env else dispatch.task.id
