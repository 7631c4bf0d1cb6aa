"""Where the tasks of a run come from, how long it is, and what is told of them."""

from __future__ import annotations

import json
from asyncio import CancelledError
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.agent.renderer import Renderer
from agentrl.data.config import ColumnsConfig, CurriculumConfig, DataConfig
from agentrl.env.base import Env
from agentrl.env.config import EnvConfig
from agentrl.env.entries import EnvEntry
from agentrl.errors import ConfigError, DataError, EnvError, RegistryError, TrainingError
from agentrl.testing import make_tokenizer
from agentrl.tool.binding import Toolbox
from agentrl.train.config import TrainerConfig
from agentrl.train.environments import Environment
from agentrl.train.tasks import (
    bound_lengths,
    describe,
    load_tasks,
    open_curriculum,
    open_feed,
    prompt_counter,
    tasks_of,
    total_steps,
)
from agentrl.types import Task


class Bare(Env):
    """Has no tasks."""


class Own(Env):
    """Has tasks of its own."""

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(id=f"{split}-{i}", data={"own": f"{split}-{i}"}) for i in range(3)]


def environment(env: Env) -> Environment:
    return Environment(
        entry=EnvEntry(name="e", config=EnvConfig(id="e")), env=env, toolbox=Toolbox([])
    )


def write(path: Path, prompts: Sequence[str], **more: Any) -> str:
    rows = [{"prompt": prompt, "answer": "a", **more} for prompt in prompts]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_a_file_replaces_the_environments_tasks_of_its_split(tmp_path: Path) -> None:
    data = DataConfig(train=write(tmp_path / "a.jsonl", ["p", "q"]))
    tasks = load_tasks([environment(Own())], data)
    assert [task.data["prompt"] for task in tasks["train"]["e"]] == ["p", "q"]
    assert [task.id for task in tasks["val"]["e"]] == ["val-0", "val-1", "val-2"]
    assert describe(tasks, data, {"train": 4}) == (
        f"tasks: 2 train ({data.train}; 4 prompts too long), 3 val (of the environment), "
        "3 test (of the environment)"
    )


def test_an_environment_without_tasks_lives_on_files(tmp_path: Path) -> None:
    data = DataConfig(
        train=write(tmp_path / "a.jsonl", ["p"]), test=write(tmp_path / "b.jsonl", ["x"])
    )
    tasks = load_tasks([environment(Bare())], data)
    assert [len(tasks[split]["e"]) for split in ("train", "val", "test")] == [1, 0, 1]
    with pytest.raises(EnvError, match="Bare has no tasks: .* give data.train=FILE"):
        load_tasks([environment(Bare())], DataConfig())
    with pytest.raises(EnvError, match="data.train=FILE"):
        tasks_of(environment(Bare()), DataConfig(test=data.test), "train")


def test_evaluation_on_training_tasks_is_refused_by_content(tmp_path: Path) -> None:
    def verl(split: str) -> dict[str, Any]:
        return {"extra_info": {"split": split, "index": 0}}

    train = write(tmp_path / "a.jsonl", ["p"], **verl("train"))
    same = write(tmp_path / "b.jsonl", ["p"], **verl("test"))
    other = write(tmp_path / "c.jsonl", ["q"], **verl("test"))
    with pytest.raises(DataError, match="1 tasks of split 'test' are in the train split too"):
        load_tasks([environment(Bare())], DataConfig(train=train, test=same))
    load_tasks([environment(Bare())], DataConfig(train=train, test=other))


def test_large_files_are_compared_by_content_too(tmp_path: Path) -> None:
    def numbered(path: Path, prompts: Sequence[str]) -> str:
        rows = [
            {"prompt": p, "answer": "a", "nr": f"{path.stem}{i}"} for i, p in enumerate(prompts)
        ]
        path.write_text("\n".join(map(json.dumps, rows)))
        return str(path)

    data = DataConfig(
        train=numbered(tmp_path / "a.jsonl", [f"p{i}" for i in range(3000)]),
        val=numbered(tmp_path / "b.jsonl", [f"q{i}" for i in range(50)] + ["p1234"]),
        columns=ColumnsConfig(id="nr"),
    )
    with pytest.raises(DataError, match=r"1 tasks of split 'val' .*'b50'"):
        load_tasks([environment(Bare())], data)


def test_the_length_of_a_prompt_is_that_of_its_rendering(tmp_path: Path) -> None:
    renderer = Renderer(make_tokenizer())
    words = ["x", "x x x x", "x x x x x x x x x x x x"]
    count = prompt_counter(renderer, Toolbox([]))
    lengths = [count([{"role": "user", "content": text}]) for text in words]
    assert lengths == sorted(set(lengths))
    source = write(tmp_path / "a.jsonl", words)
    data = DataConfig(train=source, max_prompt_tokens=lengths[1])
    tasks = load_tasks([environment(Own())], data)
    own = [environment(Own())]
    assert bound_lengths(tasks, own, data, renderer, max_context_tokens=999) == {"train": 1}
    assert [task.data["prompt"] for task in tasks["train"]["e"]] == words[:2]
    assert len(tasks["val"]["e"]) == 3, "the environment's own tasks have prompts of its own"


def test_a_prompt_that_the_context_cannot_hold_is_dropped_and_counted(tmp_path: Path) -> None:
    renderer = Renderer(make_tokenizer())
    words = ["x", "x x x x x x x x x x x x x x x x x x x x"]
    length = prompt_counter(renderer, Toolbox([]))([{"role": "user", "content": words[1]}])
    data = DataConfig(train=write(tmp_path / "a.jsonl", words))
    own = [environment(Own())]
    roomy = bound_lengths(load_tasks(own, data), own, data, renderer, max_context_tokens=length + 1)
    assert roomy == {}
    tasks = load_tasks(own, data)
    assert bound_lengths(tasks, own, data, renderer, max_context_tokens=length) == {"train": 1}
    assert [task.data["prompt"] for task in tasks["train"]["e"]] == words[:1]


def test_calls_of_tools_in_a_prompt_count_as_they_are_rendered(tmp_path: Path) -> None:
    renderer = Renderer(make_tokenizer())
    call = {"function": {"name": "run", "arguments": {"code": "x = 1 # " * 200}}}
    prompt = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", **call}]},
        {"role": "tool", "content": "1"},
    ]
    rows = [{"prompt": messages, "answer": "a"} for messages in (prompt, prompt[:1])]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(train=str(tmp_path / "a.jsonl"), max_prompt_tokens=150)
    own = [environment(Own())]
    assert prompt_counter(renderer, Toolbox([]))(prompt) > 150  # type: ignore[arg-type]
    tasks = load_tasks(own, data)
    assert bound_lengths(tasks, own, data, renderer, max_context_tokens=999) == {"train": 1}


@pytest.mark.parametrize(
    ("epochs", "num_tasks", "steps"),
    [(1, 100, 4), (1, 96, 3), (2, 96, 6), (0.5, 96, 2), (0.1, 30, 1), (3, 32, 3), (0.3, 320, 3)],
)
def test_epochs_are_dealt_out_in_whole_steps(epochs: float, num_tasks: int, steps: int) -> None:
    trainer = TrainerConfig(epochs=epochs, total_steps=0, prompts_per_step=32)
    assert total_steps(trainer, num_tasks) == steps
    assert total_steps(TrainerConfig(total_steps=7), num_tasks) == 7


@pytest.mark.parametrize("epochs", [1e9, 1e18, 1e308])
def test_more_steps_than_any_run_has_are_refused(epochs: float) -> None:
    trainer = TrainerConfig(epochs=epochs, total_steps=0, prompts_per_step=32)
    with pytest.raises(ConfigError, match=r"over 1000 tasks makes .* at most 1000000000"):
        total_steps(trainer, 1000)


def test_the_feed_tells_what_was_dropped_and_knows_its_tasks() -> None:
    envs = [environment(Own())]
    tasks = load_tasks(envs, DataConfig())
    feed = open_feed(tasks, envs, CurriculumConfig(), seed=0, dropped={"train": 2})
    assert feed.metrics() == {"data/dropped_long": 2, "data/epoch": 0}
    first = [dispatch.task.id for dispatch in islice(feed.starting_at(0), 3)]
    assert sorted(first) == ["train-0", "train-1", "train-2"]
    again = open_feed(tasks, envs, CurriculumConfig(), seed=0, dropped={})
    assert again.state_dict() == feed.state_dict()
    tasks["train"]["e"] = tasks["train"]["e"][::-1]
    other = open_feed(tasks, envs, CurriculumConfig(), seed=0, dropped={})
    assert other.state_dict() != feed.state_dict()


def test_a_curriculum_is_made_by_name_and_checked() -> None:
    assert open_curriculum(CurriculumConfig()) is None
    made = open_curriculum(CurriculumConfig(id="success_band", kwargs={"low": 0.2}))
    assert type(made).__name__ == "SuccessBand"
    with pytest.raises(ConfigError, match=r"data.curriculum.kwargs.lo: .*did you mean 'low'"):
        open_curriculum(CurriculumConfig(id="success_band", kwargs={"lo": 0.2}))
    with pytest.raises(RegistryError, match="unknown curriculum"):
        open_curriculum(CurriculumConfig(id="band"))
    with pytest.raises(ConfigError, match="makes a dict without accept, state_dict, load"):
        open_curriculum(CurriculumConfig(id="builtins:dict"))


class Plain:
    """A curriculum that takes everything and keeps what a test puts in."""

    state: Any = None

    def accept(self, task: Task, *, key: str, epoch: int) -> bool:
        return True

    def update(self, key: str, success_rate: float) -> None: ...

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None: ...


def nested() -> dict[str, Any]:
    state: dict[str, Any] = {}
    for _ in range(5000):
        state = {"a": state}
    return state


class Raises(Plain):
    def __init__(self, how: str) -> None:
        raise {"value": ValueError("no"), "exit": SystemExit(0), "cancel": CancelledError()}[how]


@pytest.mark.parametrize(
    ("how", "error"),
    [("value", "ValueError: no"), ("exit", "SystemExit: 0"), ("cancel", "CancelledError")],
)
def test_a_constructor_that_raises_is_named(how: str, error: str) -> None:
    config = CurriculumConfig(id=f"{__name__}:Raises", kwargs={"how": how})
    with pytest.raises(ConfigError, match=f"Raises': its constructor raised {error}"):
        open_curriculum(config)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": (1, 2)}, "/a is a tuple, which cannot be stored"),
        ({"a": [{1}]}, "/a/0 is a set"),
        ({"a": {1: 2}}, "/a has the key 1, which is no text"),
        ({"a": np.float32(1)}, "/a is a float32"),
        ({"a": object()}, "/a is a object"),
        ({"a": torch.eye(2).to_sparse()}, "/a is a tensor without plain memory"),
        ({"a": torch.eye(2, device="meta")}, "/a is a tensor without plain memory"),
        (nested(), "nested too deeply"),
        ({"a": 10**5000}, "it holds what JSON cannot"),
        (None, "state_dict returned NoneType, not a dictionary"),
        ("text", "state_dict returned str, not a dictionary"),
    ],
)
def test_a_curriculum_whose_state_cannot_be_stored_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, state: Any, message: str
) -> None:
    envs = [environment(Own())]
    tasks = load_tasks(envs, DataConfig())
    config = CurriculumConfig(id=f"{__name__}:Plain")
    monkeypatch.setattr(Plain, "state", state)
    with pytest.raises(TrainingError, match=f"curriculum Plain: .*{message}"):
        open_feed(tasks, envs, config, seed=0, dropped={})
    monkeypatch.setattr(Plain, "state", {"a": [1, None, torch.eye(2)]})
    open_feed(tasks, envs, config, seed=0, dropped={})
