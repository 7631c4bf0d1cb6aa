"""Does an environment keep its promises? What ``agentrl envs check ID`` runs.

Findings are data: the caller prints them, a pack's test asserts that there are none. Episodes run
through :class:`~agentrl.env.host.EnvHosts`, so an environment that hangs or crashes is a finding
too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from agentrl.env.base import Demonstration, Env, missing_for_branching
from agentrl.env.config import EnvConfig
from agentrl.env.deadline import answer_within
from agentrl.env.episodes import (
    Record,
    actions_of,
    demonstration_fault,
    departure,
    odd_actions,
    play,
    play_on,
    play_policy,
    play_with_states,
)
from agentrl.env.findings import Finding, Level, error, info, warning
from agentrl.env.host import EnvHosts
from agentrl.env.hosted import Hosted
from agentrl.env.registry import make_env
from agentrl.env.task_check import check_tasks, sample_tasks
from agentrl.errors import AgentRLError
from agentrl.types import Action, Task

T = TypeVar("T")
NUM_DEMONSTRATIONS = 8


async def check_env(
    config: EnvConfig,
    *,
    resolve_tool: Callable[[str], Any] | None = None,
    num_tasks: int = 4,
    seed: int = 0,
) -> list[Finding]:
    """Check an environment against its contract.

    Args:
        config: the environment, its arguments and deadlines.
        resolve_tool: raises an :class:`~agentrl.errors.AgentRLError` for a tool that does not
            exist; None leaves tools unchecked.
        num_tasks: how many tasks to play.
        seed: of every episode played.

    Returns:
        What is wrong, worst first and else in the order of the checks; empty where nothing is.

    Raises:
        RegistryError, ConfigError: there is no such environment, or it takes other arguments.
    """
    hosts = EnvHosts(config)
    checks = _Checks(hosts, config, seed)
    try:
        env = await checks.off_loop(lambda: make_env(config.id, config.kwargs), "the constructor")
        if env is None:
            return checks.findings
        tasks = await checks.tasks(env, num_tasks)
        yielded = await checks.off_loop(lambda: _some_demonstrations(env, seed), "") or []
        demonstrations = checks.playable(yielded)
        if not yielded:
            checks.findings.append(
                info(
                    "there are no demonstrations",
                    "implement demonstrations(split, seed) if a model without any training is to "
                    "learn this environment",
                )
            )
        await checks.episodes(tasks, demonstrations, missing_for_branching(type(env)))
        for demonstration in demonstrations:
            await checks.demonstration(demonstration)
        await checks.tools(resolve_tool)
    finally:
        await hosts.close()
    distinct = dict.fromkeys(checks.findings)  # a set would have another order in every process
    return sorted(distinct, key=lambda found: list(Level).index(found.level))


def _train_sample(env: Any, num_tasks: int) -> list[Task]:
    try:
        tasks = sample_tasks(env.tasks("train"), num_tasks)
        return [task for task in tasks if isinstance(task, Task)]
    except (Exception, SystemExit):  # check_tasks has reported it
        return []


def _some_demonstrations(env: Any, seed: int) -> list[Any]:
    overridden = getattr(type(env), "demonstrations", Env.demonstrations)
    if overridden is Env.demonstrations:
        return []
    return list(itertools.islice(env.demonstrations("train", seed), NUM_DEMONSTRATIONS))


class _Checks:
    """The checks that need the environment to run; what they find is in ``findings``."""

    def __init__(self, hosts: EnvHosts, config: EnvConfig, seed: int) -> None:
        self.findings: list[Finding] = []
        self._hosts = hosts
        self._config = config
        self._seed = seed

    async def tasks(self, env: Any, num_tasks: int) -> list[Task]:
        """Check the tasks of every split; return some to play, none where that hangs."""
        asked: list[str] = []
        timeout_s = self._config.tasks_timeout_s
        found = None
        try:
            found = await answer_within(lambda: check_tasks(env, on_split=asked.append), timeout_s)
        except TimeoutError:
            self.findings.append(
                error(
                    f"tasks({asked[-1]!r}) of environment {self._config.id!r} did not return "
                    f"within {timeout_s:g} s",
                    "make it faster, or raise env.tasks_timeout_s",
                )
            )
        except Exception as failure:
            text = f"tasks({asked[-1]!r}) raised {type(failure).__name__}: {failure}"
            self.findings.append(error(text, "mend it"))
        if found is None:
            return []
        self.findings += found
        return await self.off_loop(lambda: _train_sample(env, num_tasks), "tasks") or []

    async def off_loop(self, function: Callable[[], T], what: str) -> T | None:
        """Run a synchronous part on a thread; report what it raises, or that it hangs."""
        try:
            return await answer_within(function, self._config.reset_timeout_s)
        except TimeoutError:
            self.findings.append(
                error(
                    f"{what or 'demonstrations'} did not return within "
                    f"{self._config.reset_timeout_s:g} s",
                    "make it faster, or raise env.reset_timeout_s",
                )
            )
        except Exception as failure:
            self.findings.append(
                error(
                    f"{what or 'demonstrations'} raised {type(failure).__name__}: {failure}",
                    "mend it",
                )
            )
        return None

    async def episodes(
        self, tasks: Sequence[Task], demos: Sequence[Demonstration], missing: Sequence[str]
    ) -> None:
        """Play each task twice, and once with actions that nobody would expect.

        Args:
            missing: which of ``snapshot`` and ``restore`` the environment does not implement.
        """
        if len(missing) == 1:
            self.findings.append(
                error(
                    f"{missing[0]} is missing, though the other one of snapshot and restore is "
                    "there",
                    "implement both, or neither",
                )
            )
        by_task = {demo.task.id: actions_of(demo) for demo in demos if demo.messages}
        for task in tasks:
            actions = by_task.get(task.id) or [Action(text="1", content="1")] * 3
            await self._twice(task, actions)
            if not missing:
                await self._from_snapshots(task, actions)
        for action in odd_actions():
            for task in tasks[:1]:
                await self._guarded(self._play(task, [action]), f"on {_describe(action)}")

    def playable(self, yielded: Sequence[Any]) -> list[Demonstration]:
        """Return the demonstrations that can be played; report the others."""
        found = [(item, demonstration_fault(item)) for item in yielded]
        self.findings += [
            error(
                fault,
                "yield Demonstration(task=Task(...), policy=...), or messages in place of policy",
            )
            for _, fault in found
            if fault is not None
        ]
        return [item for item, fault in found if fault is None]

    async def demonstration(self, demo: Demonstration) -> None:
        """Play a demonstration: the environment must say what it says, and come to its end."""
        env = await self._guarded(self._hosts.open(), "in the constructor")
        if env is None:
            return
        try:
            if demo.messages is not None:
                work = play(env, demo.task, actions_of(demo), self._seed)
            elif env.tools:
                return  # its policy needs the tools, which only the agent loop runs
            else:
                timeout_s = self._config.step_timeout_s
                work = play_policy(env, demo, self._seed, turn_timeout_s=timeout_s)
            record = await self._guarded(work, f"in the demonstration of task {demo.task.id!r}")
        finally:
            await env.close()
        if record is None:
            return
        if demo.messages is not None and (departs := departure(demo.messages, record)):
            self.findings.append(
                error(
                    f"the demonstration of task {demo.task.id!r} {departs}",
                    "write the messages with the code that reset and step use, or give a policy, "
                    "which is played: a model would learn a prompt that it never meets",
                )
            )
        elif not record.ended:
            self.findings.append(
                warning(
                    f"the demonstration of task {demo.task.id!r} stops before the episode ends",
                    "let it run until step returns terminated or truncated",
                )
            )

    async def tools(self, resolve_tool: Callable[[str], Any] | None) -> None:
        """Look every tool up."""
        env = await self._guarded(self._hosts.open(), "in the constructor")
        if env is None or resolve_tool is None:
            return
        for tool in env.tools:
            try:
                resolve_tool(tool)
            except AgentRLError as failure:
                self.findings.append(
                    error(f"tool {tool!r}: {failure}", "name a registered tool or a YAML file")
                )
        await env.close()

    async def _twice(self, task: Task, actions: Sequence[Action]) -> None:
        where = f"on task {task.id!r} with seed {self._seed}"
        first = await self._guarded(self._play(task, actions), where)
        second = await self._guarded(self._play(task, actions), where)
        if first is None or second is None:
            return
        difference = first.difference(second)
        if difference is not None:
            self.findings.append(
                error(
                    f"two runs {where} differ: {difference}",
                    "draw everything from the seed of reset, never from global random state, "
                    "the clock or the order of a set",
                )
            )

    async def _from_snapshots(self, task: Task, actions: Sequence[Action]) -> None:
        """Go on from every state of an episode, each in an instance of its own."""
        where = f"on task {task.id!r} with seed {self._seed}"
        plain = await self._guarded(self._play(task, actions), where)
        kept = await self._guarded(
            self._with_env(lambda env: play_with_states(env, task, actions, self._seed)),
            f"{where}, with a snapshot before every step",
        )
        if plain is None or kept is None:
            return
        played, states = kept
        if difference := plain.difference(played):
            self.findings.append(
                error(
                    f"an episode {where} is another one where snapshots are taken: {difference}",
                    "let snapshot read the state and change nothing",
                )
            )
            return
        for turn, state in enumerate(states):
            left = actions[turn : len(states)]
            record = await self._guarded(
                self._with_env(
                    partial(
                        play_on,
                        task=task,
                        actions=left,
                        seed=self._seed,
                        played=played,
                        state=state,
                    )
                ),
                f"{where}, restored before step {turn + 1}",
            )
            if record is not None and (difference := played.difference(record)):
                self.findings.append(
                    error(
                        f"an episode {where} that is restored before step {turn + 1} goes on "
                        f"otherwise: {difference}",
                        "give everything that step changes in snapshot, the state of random "
                        "generators too, and take it all back in restore",
                    )
                )

    async def _play(self, task: Task, actions: Sequence[Action]) -> Record:
        return await self._with_env(lambda env: play(env, task, actions, self._seed))

    async def _with_env(self, use: Callable[[Hosted], Awaitable[T]]) -> T:
        env = await self._hosts.open()
        try:
            return await use(env)
        finally:
            await env.close()

    async def _guarded(self, work: Coroutine[Any, Any, T], where: str) -> T | None:
        try:
            return await work
        except AgentRLError as failure:
            self.findings.append(
                error(
                    f"{type(failure).__name__} {where}: {failure}",
                    "an episode must go on whatever the model says, and return what Env documents",
                )
            )
            return None


def _describe(action: Action) -> str:
    if action.tool_calls:
        return "an unknown tool call"
    text = dataclasses.asdict(action)["text"]
    return f"the message {text[:20]!r}" + (f" of {len(text)} characters" if len(text) > 20 else "")
