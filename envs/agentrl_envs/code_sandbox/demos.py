"""Scripted policies for generated tasks: for the warm start, and to say what scores mean.

A script is a generator of attempts. It is sent whether the last attempt passed the visible
examples (None where it was not checked) and stops when the episode is to end.
:class:`Scripted` plays one in the real environment; :func:`write_down` needs none, since what
``check`` prints follows from the program: a warm start takes ten thousand episodes.

* :func:`imperfect`: what the warm start imitates. It guesses a reading, sometimes does not check
  it, often gives up after a failed check, often spoils what passed; but where it goes on after a
  failed check, it is to a reading not tried yet. It solves half of level 1, and reinforcement
  learning has to do the rest.
* :func:`persistent`: checks, and tries the readings in turn until one passes. Solves all.
* :func:`oracle`: reads correctly without checking. Solves all.
* :func:`guess`: takes a random reading and hopes.
* :func:`random_program`: composes random operations, whatever the task says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentrl.env.base import Demonstration, ScriptedTurn
from agentrl.types import Message, Task, ToolCall

from .check import NO_OUTPUT, check_report
from .generate import GeneratedTasks
from .operations import OPERATIONS, apply_program, program_source

SYSTEM_PROMPT = "Define f with the python tool. check(f) runs the examples."
FINAL_MESSAGE = "done"


@dataclass(slots=True, frozen=True)
class Attempt:
    """One call of the ``python`` tool: define ``f``, and run the examples if ``check``."""

    program: Sequence[str]
    check: bool

    @property
    def code(self) -> str:
        """The cell to run."""
        return program_source(self.program) + ("\ncheck(f)" if self.check else "")


Script: TypeAlias = Generator[Attempt, bool | None, None]
MakeScript: TypeAlias = Callable[[Task, random.Random], Script]


@dataclass(slots=True, frozen=True, kw_only=True)
class Habits:
    """How often the imperfect policy does what; probabilities."""

    check: float = 0.85
    """Checks what it writes."""
    stop: float = 0.3
    """Gives up after a failed check."""
    blind: float = 0.05
    """Changes the reading after a failed check, and does not check again."""
    slip: float = 0.35
    """Changes the reading after a passed check, and does not check again."""


def imperfect(task: Task, rng: random.Random, habits: Habits = Habits()) -> Script:
    """Guess a reading, perhaps check it, perhaps go on to the next one."""
    readings: list[list[str]] = task.data["readings"]
    reading = rng.randrange(len(readings))
    check = rng.random() < habits.check
    while True:
        passed = yield Attempt(readings[reading], check)
        reading = (reading + 1) % len(readings)
        draw = rng.random()
        if passed is None:
            return
        if passed:
            if draw >= habits.slip:
                return
            check = False
        elif draw < habits.stop:
            return
        elif draw < habits.stop + habits.blind:
            check = False


def persistent(task: Task, rng: random.Random) -> Script:
    """Try the readings in turn, from a random one on, until one passes."""
    readings: list[list[str]] = task.data["readings"]
    first = rng.randrange(len(readings))
    for offset in range(len(readings)):
        passed = yield Attempt(readings[(first + offset) % len(readings)], True)
        if passed:
            return


def oracle(task: Task, rng: random.Random) -> Script:
    """Submit the right reading at once, unchecked."""
    yield Attempt(task.data["readings"][task.data["answer"]], False)


def guess(task: Task, rng: random.Random) -> Script:
    """Submit a random reading, unchecked."""
    yield Attempt(rng.choice(task.data["readings"]), False)


def random_program(task: Task, rng: random.Random) -> Script:
    """Submit random operations with random readings, as many as the task has."""
    operations = rng.sample(OPERATIONS, len(task.data["readings"][0]))
    program = [
        rng.choice(op.readings).format(k=rng.choice(op.values) if op.values else 0)
        for op in operations
    ]
    yield Attempt(program, False)


class Scripted:
    """A script as a policy that plays the real environment."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._checked: bool | None = None
        """None before the first attempt."""

    def __call__(self, messages: Sequence[Message]) -> ScriptedTurn:
        """Return the next turn, reading the tool's answer off the last message."""
        try:
            if self._checked is None:
                attempt = next(self._script)
            else:
                attempt = self._script.send(_verdict(messages) if self._checked else None)
        except StopIteration:
            return ScriptedTurn(content=FINAL_MESSAGE)
        self._checked = attempt.check
        call = ToolCall(name="python", arguments={"code": attempt.code})
        return ScriptedTurn(tool_calls=(call,))


def _verdict(messages: Sequence[Message]) -> bool:
    """Return whether the last message reports a full pass."""
    passed, _, rest = messages[-1]["content"].partition("/")
    return rest == f"{passed} pass"


def write_down(task: Task, script: Script) -> list[Message]:
    """Return the episode that ``script`` plays, the answers being those of the sandbox."""
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": task.data["prompt"]},
    ]
    for attempt, answer in _play(task, script):
        function = {"name": "python", "arguments": {"code": attempt.code}}
        calls = [{"type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "content": answer, "name": "python"})
    messages.append({"role": "assistant", "content": FINAL_MESSAGE})
    return messages


def _play(task: Task, script: Script) -> Iterator[tuple[Attempt, str]]:
    """Yield each attempt with the tool's answer."""
    visible = task.data["visible"]
    verdict: bool | None = None
    first = True
    while True:
        try:
            attempt = next(script) if first else script.send(verdict)
        except StopIteration:
            return
        first = False
        if attempt.check:
            num_passed = sum(apply_program(attempt.program, x) == y for x, y in visible)
            verdict = num_passed == len(visible)
            yield attempt, check_report(num_passed, len(visible))
        else:
            verdict = None
            yield attempt, NO_OUTPUT


def submitted(task: Task, script: Script) -> Sequence[str] | None:
    """Return the program that ``script`` defines last; None if it defines none."""
    program = None
    for attempt, _ in _play(task, script):
        program = attempt.program
    return program


def solves(task: Task, program: Sequence[str] | None) -> bool:
    """Return whether ``program`` passes all hidden tests."""
    if program is None:
        return False
    return all(apply_program(program, x) == y for x, y in task.data["hidden"])


def success_rate(make_script: MakeScript, tasks: Sequence[Task], seed: int) -> float:
    """Return the share of ``tasks`` that a scripted policy solves."""
    rngs = (random.Random(f"{seed}/{task.id}") for task in tasks)
    results = [
        solves(task, submitted(task, make_script(task, rng)))
        for task, rng in zip(tasks, rngs, strict=True)
    ]
    return sum(results) / len(results)


def demonstrations(
    split: str,
    seed: int,
    *,
    level: int = 1,
    habits: Habits = Habits(),
) -> Iterator[Demonstration]:
    """Yield episodes of the imperfect policy without end, each on a fresh task."""
    tasks = GeneratedTasks(level, split, seed=seed)
    index = 0
    while True:
        task = tasks[index % len(tasks)]
        rng = random.Random(f"demonstration/{seed}/{index}")
        yield Demonstration(task=task, messages=write_down(task, imperfect(task, rng, habits)))
        index += 1
