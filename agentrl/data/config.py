"""Settings of task files, and of the curriculum over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class OverlongPrompts(StrEnum):
    """What happens to a task whose prompt is longer than ``data.max_prompt_tokens``."""

    drop = "drop"
    """It is left out, and counted."""
    refuse = "refuse"
    """Nothing starts; the tasks are named."""


@dataclass(slots=True, kw_only=True)
class ColumnsConfig:
    """Which column of a file is what. ``a.b`` is the field ``b`` of the column ``a``."""

    prompt: str | None = "prompt"
    """What the model is asked: text, or a list of chat messages. Becomes ``task.data["prompt"]``;
    none for environments that build the prompt from other columns."""
    answer: str | None = "answer"
    """The reference. Becomes ``task.data["answer"]``; a file without the column may bring it in
    ``reward_model.ground_truth``. None for tasks without one."""
    id: str | None = None
    """Text or whole numbers, all different. None: ``extra_info.index`` where there is one (with
    ``data_source`` and ``extra_info.split``), else a hash of the row."""
    tags: list[str] = field(default_factory=list)
    """Columns to report results by."""


@dataclass(slots=True, kw_only=True)
class CurriculumConfig:
    """Leaves out tasks that would teach little at present."""

    id: str | None = None
    """``success_band``, one registered under ``agentrl.curricula``, ``package.module:Class`` or
    ``./file.py:Class``. None: every task, every epoch."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of its constructor, checked against its signature."""
    max_skips: int = 100
    """Tasks left out in a row before the next one is taken whatever the curriculum says."""


@dataclass(slots=True, kw_only=True)
class DataConfig:
    """Tasks from files, in place of the environment's own."""

    train: str | None = None
    """A ``.jsonl`` or ``.parquet`` file, a pattern of several (``part-*.parquet``), a directory
    written by ``datasets`` (``save_to_disk``), or ``hf:NAME[:CONFIG][:SPLIT]``. None: the
    environment's own tasks."""
    val: str | None = None
    """The same for the validation split."""
    test: str | None = None
    """The same for the test split."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    max_prompt_tokens: int | None = None
    """Longest prompt of a file's task, in tokens under the model's chat template with the tools'
    schemas; what the environment adds to it is not counted. None: what the context has room for."""
    overlong_prompts: OverlongPrompts = OverlongPrompts.drop
    """What happens to longer ones."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)

    def sources(self) -> dict[str, str]:
        """Return split -> file, for the splits that have one."""
        given = {"train": self.train, "val": self.val, "test": self.test}
        return {split: source for split, source in given.items() if source is not None}
