"""Hide and seek: an environment of your own, with a tool of your own, in one file each.

agentrl envs check ./examples/custom_env/env.py:HideAndSeek
agentrl train --env ./examples/custom_env/env.py:HideAndSeek
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl import Demonstration, Env, Task
from agentrl.env.base import Observation
from agentrl.seeding import derive_seed
from agentrl.types import Action, Message

THINGS = ("lamp", "ring", "map", "key", "coin", "book", "cup", "doll")
ROOMS = ("attic", "barn", "cellar", "den", "hall", "loft")
SYSTEM = "Search rooms. Then say the room."
TOOL = str(Path(__file__).with_name("search.yaml"))


class HideAndSeek(Env):
    """A thing is in one of three rooms. Searching tells; then the model names the room.

    Args:
        max_searches: calls of the ``search`` tool before the episode ends without an answer.
    """

    tools = (TOOL,)

    def __init__(self, max_searches: int = 3) -> None:
        self._max_searches = max_searches
        self._num_searches = 0
        self._place = ""

    def tasks(self, split: str) -> Sequence[Task]:
        """Every (thing, rooms, place), put into a split by a hash, so that none is in two."""
        return [task for task in _all_tasks() if _split_of(task.id) == split]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode with the task of the options."""
        data = self.pick_task(seed, options).data
        self._place, self._num_searches = data["place"], 0
        return _opening(data), {}

    def tool_state(self, tool: str) -> Mapping[str, Any]:
        """Tell the tool, but not the model, where the thing is."""
        return {"place": self._place}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Tools have already run. A turn without a call is the answer."""
        self._num_searches += len(action.tool_calls)
        if action.tool_calls:
            return "", 0.0, self._num_searches > self._max_searches, False, {"success": False}
        found = action.content.strip() == self._place
        return "", float(found), True, False, {"success": found}

    def demonstrations(self, split: str, seed: int) -> Iterator[Demonstration]:
        """Show how it may go, right about half the time: mostly one search, then a guess."""
        rng = random.Random(f"{seed}:{split}")
        tasks = self.tasks(split)
        while True:
            task = rng.choice(tasks)
            messages = _play(task.data, rng)
            success = messages[-1]["content"] == task.data["place"]
            yield Demonstration(task=task, messages=messages, metadata={"success": success})


def _all_tasks() -> Iterator[Task]:
    for thing, rooms in itertools.product(THINGS, itertools.permutations(ROOMS, 3)):
        for place in rooms:
            data = {"thing": thing, "rooms": list(rooms), "place": place}
            yield Task(id=f"{thing}-{'-'.join(rooms)}-{place}", data=data)


def _split_of(task_id: str) -> str:
    bucket = derive_seed(task_id) % 10
    return "test" if bucket < 2 else "val" if bucket < 3 else "train"


def _opening(data: Mapping[str, Any]) -> list[Message]:
    question = f"Where is the {data['thing']}: {', '.join(data['rooms'])}?"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def _play(data: Mapping[str, Any], rng: random.Random) -> list[Message]:
    messages = _opening(data)
    rooms: list[str] = rng.sample(data["rooms"], 3)
    while len(rooms) > 1 and rng.random() < 0.45:
        room = rooms.pop()
        function = {"name": "search", "arguments": {"room": room}}
        calls = [{"type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        found = room == data["place"]
        answer = "found" if found else "nothing"
        messages.append({"role": "tool", "name": "search", "content": answer})
        if found:
            rooms = [room]
    messages.append({"role": "assistant", "content": rng.choice(rooms)})
    return messages
