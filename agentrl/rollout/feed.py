"""Hands out the prompts of a run: the stream's order, less what the curriculum skips."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
        check_storable: raises TypeError for a state that no checkpoint can hold.
    """

    def __init__(
        self,
        stream: PromptStream,
        *,
        curriculum: Curriculum | None = None,
        max_skips: int = 100,
        fingerprint: str = "",
        facts: Mapping[str, float] | None = None,
        check_storable: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._stream = stream
        self._curriculum = curriculum
        self._max_skips = max_skips
        self._fingerprint = fingerprint
        self._facts = dict(facts or {})
        self._check_storable = check_storable
        self._heard = self._checked = False
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

    def again(self, index: int) -> Dispatch:
        """Hand out the prompt at ``index`` once more: a resumed run plays or awaits it again."""
        dispatch = next(iter(self._stream.starting_at(index)))
        self._in_flight[dispatch.index] = dispatch
        return dispatch

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
            if group.cut:  # what it finished was what is quick
                continue
            scores = [t.score for t in group.trajectories if not t.failed and t.score is not None]
            if self._curriculum is not None and scores:
                rate = sum(score.success for score in scores) / len(scores)
                with _named(self._curriculum, "update"):
                    self._curriculum.update(_key(dispatch), rate)
                self._heard = True
        if self._heard and not self._checked:  # a state that was empty at the start has filled
            self._checked = True
            self.check_state()

    def metrics(self) -> dict[str, float]:
        """Return what there is to tell of the time since the last call."""
        found: dict[str, float] = {**self._facts, "data/epoch": self._epoch}
        if self._curriculum is not None:
            found |= {"curriculum/skipped": self._skipped, "curriculum/forced": self._forced}
        self._skipped = self._forced = 0
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the index of its next prompt."""
        curriculum = None
        if self._curriculum is not None:
            with _named(self._curriculum, "state_dict"):
                curriculum = self._curriculum.state_dict()
        return {"tasks": self._fingerprint, "epoch": self._epoch, "curriculum": curriculum}

    def check_state(self) -> None:
        """Refuse a curriculum whose state no checkpoint could hold, while nothing is lost yet.

        Raises:
            TrainingError: it is no mapping, or holds what cannot be stored; says where.
        """
        if self._curriculum is None:
            return
        state = self.state_dict()["curriculum"]
        name = type(self._curriculum).__name__
        if not isinstance(state, Mapping):
            raise TrainingError(
                f"the curriculum {name}: state_dict returned {type(state).__name__}, not a "
                "dictionary; return {} where there is nothing to keep"
            )
        if self._check_storable is None:
            return
        try:
            self._check_storable(state)
        except TypeError as error:
            raise TrainingError(
                f"the curriculum {name}: its state_dict cannot be stored in a checkpoint: {error}; "
                "return dictionaries with text keys, lists, text, numbers, booleans, None and "
                "tensors only"
            ) from error

    def load_state_dict(self, state: Mapping[str, Any], *, check_tasks: bool = True) -> None:
        """Take over what :meth:`state_dict` returned; nothing, of a run that saved none.

        Args:
            check_tasks: refuse other tasks than those of the run.

        Raises:
            CheckpointError: the tasks have changed, so another order would be gone on with; or the
                state is not one that :meth:`state_dict` returns.
            TrainingError: the curriculum raised.
        """
        if not state:
            return
        check_keys(state, ("tasks", "epoch", "curriculum"), where="feed")
        epoch = state["epoch"]
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise CheckpointError(
                f"the checkpoint's progress holds feed.epoch={epoch!r}, not a number of epochs: it "
                "is damaged; resume from another one, or start a new run"
            )
        if check_tasks and state["tasks"] != self._fingerprint:
            raise CheckpointError(
                "the training tasks are not those that the run was started with, so their order "
                "cannot be gone on with: restore the file, start a new run, or set "
                "trainer.force_resume=true"
            )
        self._epoch = epoch
        if self._curriculum is not None and state["curriculum"] is not None:
            with _named(self._curriculum, "load_state_dict"):
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
    """Turn whatever a curriculum raises into an error with its name.

    Its methods wait for nothing, so a cancellation that comes out of one is of its own making; and
    an exit would end the run as if it were done.
    """
    try:
        yield
    except (AgentRLError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise TrainingError(
            f"the curriculum {type(curriculum).__name__}: {method} raised "
            f"{type(error).__name__}: {error}; mend it, or set data.curriculum.id=null"
        ) from error


def check_keys(state: Mapping[str, Any], known: Sequence[str], *, where: str) -> None:
    """Refuse a state of a checkpoint that lacks a key, or has one that nothing reads.

    Raises:
        CheckpointError: names the keys.
    """
    wrong = {
        "lacks": [key for key in known if key not in state],
        "has the unknown": sorted(map(str, state.keys() - set(known))),
    }
    found = ", ".join(f"{what} {', '.join(keys)}" for what, keys in wrong.items() if keys)
    if found:
        raise CheckpointError(
            f"the checkpoint's {where} {found}: it was damaged, or written by another version of "
            "agentrl; resume with that version or from another checkpoint, or start a new run"
        )


def _key(dispatch: Dispatch) -> str:
    return f"{dispatch.env}/{dispatch.task.id}" if dispatch.env else dispatch.task.id
