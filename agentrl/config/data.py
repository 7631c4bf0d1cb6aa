"""Refuses settings of task files, the curriculum and the length of the run that cannot work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentrl.data.config import ColumnsConfig, CurriculumConfig
from agentrl.train.config import MAX_STEPS

if TYPE_CHECKING:
    from agentrl.config.schema import Config


def data_problems(config: Config) -> Iterator[str]:
    """Say what is wrong, each with the fix."""
    yield from _length(config)
    yield from _files(config)
    if config.data.curriculum.max_skips < 1:
        yield (
            f"data.curriculum.max_skips={config.data.curriculum.max_skips}: must be at least 1; "
            "without a curriculum set data.curriculum.id=null"
        )
    elif (
        config.data.curriculum.id is None
        and config.data.curriculum.max_skips != CurriculumConfig().max_skips
    ):
        yield (
            f"data.curriculum.max_skips={config.data.curriculum.max_skips} without "
            "data.curriculum.id: nothing skips tasks; name a curriculum, such as success_band, or "
            "leave max_skips out"
        )
    if config.data.curriculum.kwargs and config.data.curriculum.id is None:
        yield (
            f"data.curriculum.kwargs={config.data.curriculum.kwargs} without data.curriculum.id: "
            "name a curriculum, such as success_band"
        )


def _length(config: Config) -> Iterator[str]:
    steps, epochs = config.trainer.total_steps, config.trainer.epochs
    if epochs is None:
        if steps < 1:
            yield f"trainer.total_steps={steps}: must be at least 1, or set trainer.epochs"
        elif steps > MAX_STEPS:
            yield f"trainer.total_steps={steps}: must be at most {MAX_STEPS}"
        return
    if not (epochs > 0 and math.isfinite(epochs)):
        yield f"trainer.epochs={epochs}: must be a finite number above 0"
    elif epochs > MAX_STEPS:
        yield f"trainer.epochs={epochs}: must be at most {MAX_STEPS}"
    if steps:
        yield (
            f"trainer.epochs={epochs} and trainer.total_steps={steps} together: which one is "
            "meant? Leave one out (trainer.epochs=null or trainer.total_steps=0)"
        )
    if len(config.env.mix) > 1:
        yield (
            f"trainer.epochs={epochs} with env.mix: the environments of a mix have epochs of their "
            "own; set trainer.total_steps"
        )


def _files(config: Config) -> Iterator[str]:
    data = config.data
    for split, source in data.sources().items():
        if not source.strip():
            yield f"data.{split}={source!r} is empty: give a file, or leave it out (null)"
    if data.sources() and len(config.env.mix) > 1:
        given = ", ".join(f"data.{split}" for split in data.sources())
        yield (
            f"{given} with env.mix: which of its environments are the tasks for? Files go with one "
            "environment (--env)"
        )
    limit = data.max_prompt_tokens
    if limit is None:
        unread = data.columns != ColumnsConfig() and not data.sources()
        if unread:
            yield "data.columns without a file: set data.train, data.val or data.test"
        return
    if limit < 1:
        yield f"data.max_prompt_tokens={limit}: must be at least 1"
    if not data.sources():
        yield (
            f"data.max_prompt_tokens={limit} without a file: it bounds prompts of data.train, "
            "data.val and data.test"
        )
    if data.columns.prompt is None:
        yield (
            f"data.max_prompt_tokens={limit} with data.columns.prompt=null: there is no prompt to "
            "measure; name its column"
        )
    if limit >= config.rollout.max_context_tokens:
        yield (
            f"data.max_prompt_tokens={limit} leaves no room for an answer within "
            f"rollout.max_context_tokens={config.rollout.max_context_tokens}: lower the first or "
            "raise the second"
        )
