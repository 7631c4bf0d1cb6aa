"""Fill the gap in a note: find the file, look the fact up, edit the file. Graded by the file.

agentrl envs check ./examples/tools/env.py:FillTheGap
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl_tools.search.tool import Search

from agentrl import Demonstration, Env, Score, Task
from agentrl.env.base import Episode, Observation
from agentrl.types import Action, Message

SYSTEM = "Files are in notes/. Look facts up with search. Edit the file, then say done."
QUESTION = "One line of a note has ??? in place of a word. Put the right word there."
# A sentence with its gap, the word, a word that is wrong, and what to search for.
FACTS = (
    ("The first pendulum clock was built in ???.", "1656", "1750", "pendulum clock"),
    ("Common glass is melted at about ??? degrees.", "1500", "600", "glass sand soda"),
    ("Young swifts may fly for ??? months on end.", "ten", "two", "young swift flight"),
    ("A lunar day has 24 hours and ??? minutes.", "50", "10", "lunar day tides"),
    ("Gutenberg built his press in ???.", "Mainz", "Paris", "Gutenberg printing"),
    ("Paper was first made in ???.", "China", "Egypt", "paper first made"),
    ("Common swifts spend the winter in ???.", "Africa", "Spain", "swift winters"),
    ("What holds the bubbles in dough is called ???.", "gluten", "lime", "dough bubbles protein"),
    ("From true to magnetic north it is the ???.", "declination", "latitude", "magnetic north"),
    ("The map projection of Mercator keeps ???.", "angles", "areas", "Mercator projection"),
    ("A layer of zinc protects ???.", "iron", "glass", "zinc rust"),
    ("Of all colours a prism bends ??? most.", "violet", "red", "prism colours"),
)


class NoteRubric:
    """The note must hold the right word and be otherwise as it was, and so must the others."""

    async def score(self, episode: Episode) -> Score:
        """Compare every note, byte for byte."""
        wanted = {
            path: text.replace("???", episode.task.data["word"]).encode()
            for path, text in _notes(episode.task.data).items()
        }
        success = dict(episode.artifacts) == wanted
        return Score(reward=float(success), success=success)


class FillTheGap(Env):
    """Four notes, one with a gap; the corpus of ``search`` holds what belongs there."""

    tools = ("search_files", "search", "edit_file", "bash")
    artifacts = ("notes/*",)
    rubric = NoteRubric()
    sandboxed = True

    def __init__(self) -> None:
        self._data: Mapping[str, Any] = {}

    def tasks(self, split: str) -> Sequence[Task]:
        """Every fact, among others in 20 arrangements; splits share no fact."""
        facts = {"train": range(8), "val": range(8, 10), "test": range(10, 12)}[split]
        return [
            Task(id=f"{fact}-{seed}", data={"fact": fact, "seed": seed, "word": FACTS[fact][1]})
            for fact in facts
            for seed in range(20)
        ]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode with the task of the options."""
        self._data = self.pick_task(seed, options).data
        return _opening(), {}

    def tool_state(self, tool: str) -> Mapping[str, Any]:
        """Put the notes into the workspace that the tools share."""
        return {"files": _notes(self._data)} if tool == "workspace" else {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Tools have already run; a turn without a call ends the episode."""
        return "", 0.0, not action.tool_calls, False, {}

    def demonstrations(self, split: str, seed: int) -> Iterator[Demonstration]:
        """Find, look up, edit; the wrong word is put in one half of the time."""
        rng = random.Random(f"{seed}:{split}")
        tasks, corpus = self.tasks(split), Search()
        while True:
            task = rng.choice(tasks)
            line, right, wrong, query = FACTS[task.data["fact"]]
            word = rng.choice([right, wrong])
            ((path, number),) = _gaps(_notes(task.data))
            edit = {"path": path, "command": "replace", "old_text": "???", "new_text": word}
            around = _around(_notes(task.data)[path].replace("???", word), number)
            messages = [
                *_opening(),
                *_call("search_files", {"pattern": "???", "literal": True}),
                _answer("search_files", f"{path}:{number}: {line}"),
                *_call("search", {"query": query}),
                _answer("search", corpus.call(query=query)),
                *_call("edit_file", edit),
                _answer("edit_file", f"changed {path}:\n{around}"),
                {"role": "assistant", "content": "done"},
            ]
            metadata = {"success": word == right}
            yield Demonstration(task=task, messages=messages, metadata=metadata)


def _notes(data: Mapping[str, Any]) -> dict[str, str]:
    """Return path to text: three sentences a note, one of all of them with its gap open."""
    rng = random.Random(f"notes:{data['fact']}:{data['seed']}")
    gap = FACTS[data["fact"]]
    others = [line.replace("???", word) for line, word, *_ in FACTS if line != gap[0]]
    lines = rng.sample(others, 11)
    lines.insert(rng.randrange(12), gap[0])
    return {f"notes/{n}.md": "\n".join(lines[3 * n : 3 * n + 3]) + "\n" for n in range(4)}


def _gaps(notes: Mapping[str, str]) -> list[tuple[str, int]]:
    return [
        (path, number)
        for path, text in notes.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if "???" in line
    ]


def _around(text: str, number: int) -> str:
    """Return what edit_file shows of a note of three lines."""
    lines = list(enumerate(text.splitlines(), start=1))
    return "\n".join(f"{place}\t{line}" for place, line in lines if abs(place - number) <= 2)


def _opening() -> list[Message]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


def _call(name: str, arguments: dict[str, Any]) -> list[Message]:
    function = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [function]}]


def _answer(name: str, content: str) -> Message:
    return {"role": "tool", "name": name, "content": content}
