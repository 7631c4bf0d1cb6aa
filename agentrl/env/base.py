"""What an environment is.

A subclass of :class:`Env` gives tasks, answers the model and pays it::

    SPLITS = ("train", "val", "test")

    class Echo(Env):
        def tasks(self, split):
            words = [str(number) for number in range(100, 1000)[SPLITS.index(split) :: 3]]
            return [Task(id=word, data={"word": word}) for word in words]

        def reset(self, *, seed=None, options=None):
            self.word = self.pick_task(seed, options).data["word"]
            return f"Say {self.word}", {}

        def step(self, action):
            return "", float(action.text == self.word), True, False, {}

        def demonstrations(self, split, seed):  # right half the time: training does the rest
            rng = random.Random(f"{seed}:{split}")
            while True:
                task = rng.choice(self.tasks(split))
                said = rng.choice([task.data["word"], "what?"])
                policy = lambda _, said=said: ScriptedTurn(content=said)
                yield Demonstration(task=task, policy=policy)

``terminated`` means that the episode is over by the environment's own rules: nothing is
bootstrapped. ``truncated`` means that it was cut short: a critic bootstraps, otherwise the return
ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

import gymnasium
import numpy as np

from agentrl.env.spaces import ActionSpace, ObservationSpace
from agentrl.errors import EnvError
from agentrl.sandbox.base import SandboxProvider
from agentrl.types import Action, Message, Score, Task, ToolCall, Turn

Observation: TypeAlias = str | Sequence[Message]
"""Text (becomes a user message) or chat messages. Empty: nothing is said to the model."""


@dataclass(slots=True, kw_only=True)
class Episode:
    """What a rubric sees of a finished episode."""

    task: Task
    messages: Sequence[Message]
    turns: Sequence[Turn]
    info: Mapping[str, Any]
    """The ``info`` of the last ``step`` (of ``reset`` if there was none)."""
    sandboxes: SandboxProvider
    turn_rewards: Sequence[float] = ()
    artifacts: Mapping[str, bytes] = field(default_factory=dict)
    """The files of the tools' workspace that ``Env.artifacts`` asks for, by relative path. The
    workspace had ended, with all that ran in it, before the rubric was asked;
    :func:`agentrl.sandbox.grading.grade_artifacts` judges them in a fresh sandbox."""
    num_inherited_tokens: int = 0
    """Sampled by the episode that this one branched off from."""

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy produced over all turns, inherited ones included."""
        return self.num_inherited_tokens + sum(turn.end - turn.start for turn in self.turns)


class Rubric(Protocol):
    """Gives the outcome reward of an episode. ``score`` may be sync or async."""

    def score(self, episode: Episode) -> Any:
        """Return a :class:`~agentrl.types.Score` (or an awaitable of one).

        Raises:
            SandboxError, InfrastructureError: ours; the trajectory fails and is excluded.
        """
        ...


class Env(gymnasium.Env[Any, Any]):
    """A synchronous text environment with the interface of gymnasium.

    Class attributes a subclass may set:

    * ``tools``: names of registered tools, paths of YAML specs, or functions marked with
      ``@agentrl.tool.tool``, that the model may call.
    * ``artifacts``: patterns (``*.py``, ``src/*``) of the files that the agent is to make in its
      workspace; the rubric finds them in ``Episode.artifacts``.
    * ``rubric``: gives the outcome reward. Without one, the outcome is 0 and only the rewards of
      ``step`` count; ``info["success"]`` of the last step then says whether it succeeded
      (default: a positive sum of rewards).
    * ``sandboxed``: episodes need sandboxes, so a machine without them is refused at the start.
    * ``process``: run each environment in a process of its own, so that a hang that holds the
      interpreter lock can be ended. The default for ``./file.py`` environments.
    """

    tools: Sequence[str | Callable[..., Any]] = ()
    artifacts: Sequence[str] = ()
    rubric: Rubric | None = None
    sandboxed: ClassVar[bool] = False
    process: ClassVar[bool] = False
    observation_space = ObservationSpace()
    action_space = ActionSpace()

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of ``train``, ``val`` or ``test``. Must not depend on the instance."""
        raise EnvError(
            f"{type(self).__name__} has no tasks: implement tasks(split), or give data.{split}=FILE"
        )

    def demonstrations(self, split: str, seed: int) -> Iterator[Demonstration]:
        """Yield scripted episodes without end, for a supervised warm start. Optional."""
        raise EnvError(
            f"{type(self).__name__} has no demonstrations, which a model without any training "
            "needs: implement demonstrations(split, seed), or set model.path to a trained model"
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode of ``options["task"]``, or of a task sampled with ``seed``."""
        raise NotImplementedError

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Answer one turn: observation, reward of the turn, terminated, truncated, info.

        Tool calls have already run; their answers are in ``action.tool_results`` and are shown to
        the model before the observation.
        """
        raise NotImplementedError

    def tool_state(self, tool: str) -> Mapping[str, Any]:
        """Return what ``tool`` needs to know of this task; asked once, when it is first called.

        Also asked for ``"workspace"`` when a tool opens the sandbox that tools share: return
        ``{"files": {path: text}}`` to put files there, ``{}`` for names that mean nothing here.
        """
        return {}

    def anchor(self) -> str | None:
        """Return a key of the present state, equal for equal states (GiGPO). Optional."""
        return None

    def snapshot(self) -> Any:
        """Return the present state, for :meth:`restore`. Optional (tree sampling).

        Asked between two turns. Anything that can be pickled; it is pickled at once, so it may
        share objects with the environment. Draws of chance still to come belong to the state: give
        the state of the generator too.
        """
        raise EnvError(
            f"{type(self).__name__} has no snapshot(), which tree sampling needs: implement "
            "snapshot() and restore(state), or set rollout.tree.rounds=0"
        )

    def restore(self, state: Any) -> None:
        """Go on from a state that :meth:`snapshot` of another instance returned. Optional.

        Called after :meth:`reset` with the task and the seed of that instance's episode, so a state
        need only hold what ``step`` changes.
        """
        raise EnvError(
            f"{type(self).__name__} has no restore(state), which tree sampling needs: implement "
            "snapshot() and restore(state), or set rollout.tree.rounds=0"
        )

    def pick_task(self, seed: int | None, options: Mapping[str, Any] | None) -> Task:
        """Return the task of ``options``, or one of the train split drawn with ``seed``.

        Raises:
            EnvError: the option is no :class:`~agentrl.types.Task`, or there are no tasks.
        """
        task = (options or {}).get("task")
        if task is None:
            tasks = self.tasks("train")
            if not tasks:
                raise EnvError(f"{type(self).__name__}.tasks('train') is empty")
            return tasks[int(np.random.default_rng(seed).integers(len(tasks)))]
        if not isinstance(task, Task):
            raise EnvError(f"options['task'] must be a Task, got {type(task).__name__}")
        return task


@dataclass(slots=True, kw_only=True)
class ScriptedTurn:
    """One assistant turn of a demonstration."""

    content: str = ""
    tool_calls: Sequence[ToolCall] = ()


class ScriptedPolicy(Protocol):
    """A policy that needs no model: sees the conversation, returns the next turn."""

    def __call__(self, messages: Sequence[Message]) -> ScriptedTurn:
        """Return the next assistant turn."""
        ...


@dataclass(slots=True, kw_only=True)
class Demonstration:
    """A task and the policy that plays it; the loop runs it against the real environment.

    ``messages`` may be given instead where the pack can write the episode down without running
    it: the whole conversation, tool answers included. It opens with what ``reset`` returns.
    """

    task: Task
    policy: ScriptedPolicy | None = None
    messages: Sequence[Message] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class AsyncEnv(Protocol):
    """The same interface with coroutines, for environments that wait on a network."""

    tools: Sequence[str | Callable[..., Any]]
    rubric: Rubric | None

    def tasks(self, split: str) -> Sequence[Task]:
        """See :meth:`Env.tasks`."""
        ...

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """See :meth:`Env.reset`."""
        ...

    async def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """See :meth:`Env.step`."""
        ...

    async def tool_state(self, tool: str) -> Mapping[str, Any]:
        """See :meth:`Env.tool_state`."""
        ...

    async def anchor(self) -> str | None:
        """See :meth:`Env.anchor`. Optional."""
        ...

    async def snapshot(self) -> Any:
        """See :meth:`Env.snapshot`. Optional."""
        ...

    async def restore(self, state: Any) -> None:
        """See :meth:`Env.restore`. Optional."""
        ...

    async def close(self) -> None:
        """See :meth:`Env.close`."""
        ...


def missing_for_branching(cls: type) -> list[str]:
    """Return which of ``snapshot`` and ``restore`` an environment class does not implement."""
    return [
        name
        for name in ("snapshot", "restore")
        if getattr(cls, name, None) in (None, getattr(Env, name))
    ]


__all__ = [
    "AsyncEnv",
    "Demonstration",
    "Env",
    "Episode",
    "Observation",
    "Rubric",
    "Score",
    "ScriptedPolicy",
    "ScriptedTurn",
    "Task",
    "missing_for_branching",
]
