"""Environments that do what they are told to, also the wrong thing."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from agentrl.env.base import Env, Episode
from agentrl.types import Action, Score, Task

TASKS = {
    split: [Task(id=f"{split}-{index}", data={"split": split, "n": index}) for index in range(3)]
    for split in ("train", "val", "test")
}


class Obedient(Env):
    """``step`` does what the action says."""

    process = False

    def __init__(self, greeting: str = "hello", fail: bool = False) -> None:
        if fail:
            raise ValueError("no such database")
        self.greeting = greeting
        self.num_steps = 0
        self.closed = 0

    def tasks(self, split: str) -> Sequence[Task]:
        return TASKS[split]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.num_steps = 0
        return self.greeting, {"seed": seed}

    def step(self, action: Action) -> tuple[Any, Any, Any, Any, Any]:
        self.num_steps += 1
        command, _, argument = action.text.partition(" ")
        info: dict[str, Any] = {
            "thread": threading.get_ident(),
            "pid": os.getpid(),
            "steps": self.num_steps,
        }
        match command:
            case "sleep":
                time.sleep(float(argument))
            case "hold_the_lock":
                re.match(r"(a+)+$", "a" * 64 + "b")
            case "raise":
                raise ValueError(argument)
            case "exit":
                sys.exit(argument)
            case "die":
                os._exit(int(argument))
            case "spawn":
                child = subprocess.Popen(["sleep", "600"])
                info["child"] = child.pid
            case "unpicklable":
                info["lock"] = threading.Lock()
        return f"{argument} done", 0.5, False, False, info

    def anchor(self) -> str:
        return f"step {self.num_steps}"

    def close(self) -> None:
        if self.greeting == "clingy":
            time.sleep(600)
        if self.greeting == "raises on close":
            raise OSError("already gone")


class Returning(Env):
    """Returns what it was given, whatever it is."""

    def __init__(self, reset: Any = ("hi", {}), step: Any = ("", 0.0, False, False, {})) -> None:
        self._reset, self._step = reset, step

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._reset

    def step(self, action: Action) -> Any:
        return self._step


class SyncRubric:
    """Grades on the environment's worker."""

    def score(self, episode: Episode) -> Any:
        return _scored(str(episode.info.get("verdict", "good")))


class AsyncRubric:
    """Grades on the caller's event loop."""

    async def score(self, episode: Episode) -> Any:
        verdict = str(episode.info.get("verdict", "good"))
        if verdict == "hang":
            await asyncio.sleep(600)
        return _scored(verdict)


def _scored(verdict: str) -> Any:
    match verdict:
        case "hang":
            time.sleep(600)
        case "raise":
            raise KeyError("answer")
        case "nan":
            return Score(reward=math.nan, success=True)
        case "none":
            return None
    return Score(reward=1.0, success=True, parts={"pid": os.getpid() / 1e7})


class GradedSync(Obedient):
    rubric = SyncRubric()


class GradedAsync(Obedient):
    rubric = AsyncRubric()


class UsesSandbox(Obedient):
    """A synchronous rubric that wants a sandbox."""

    class _Rubric:
        def score(self, episode: Episode) -> Score:
            asyncio.run(episode.sandboxes.acquire())  # type: ignore[arg-type]
            return Score(reward=1.0, success=True)

    rubric = _Rubric()


class Isolated(Obedient):
    process = True


class Coroutines:
    """An AsyncEnv."""

    tools: Sequence[str] = ()
    rubric = AsyncRubric()

    def __init__(self, stubborn: bool = False) -> None:
        self.stubborn = stubborn

    def tasks(self, split: str) -> Sequence[Task]:
        return TASKS[split]

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "hello", {"seed": seed}

    async def step(self, action: Action) -> Any:
        command, _, argument = action.text.partition(" ")
        if command == "raise":
            raise ValueError(argument)
        if command == "sleep":
            try:
                await asyncio.sleep(float(argument))
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise
                await asyncio.sleep(0.2)
        return f"{argument} done", 1.0, True, False, {}

    def tool_state(self, tool: str) -> dict[str, Any]:
        return {"tool": tool}

    async def close(self) -> None:
        return None
