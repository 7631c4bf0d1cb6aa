"""Wraps a model for packed rows on every rank alike."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from agentrl.dist.config import EngineConfig
from agentrl.dist.layout import head_problems
from agentrl.dist.packed_model import Head, Layout, PackedModel, find_layout
from agentrl.dist.ranks import Ranks
from agentrl.errors import ConfigError, ModelError


def open_packed(model: Any, config: EngineConfig, ranks: Ranks, *, head: Head) -> PackedModel:
    """Return ``model`` over packed rows; all ranks call it together.

    Raises:
        ConfigError: the attention heads cannot be dealt out as ``sequence_parallel`` wants.
        ModelError: the model cannot be run packed, or not where ranks share sequences.
    """
    text = model.config.get_text_config()
    problems = head_problems(
        "actor" if head == "language" else "critic",
        num_heads=text.num_attention_heads,
        sequence_parallel=config.sequence_parallel,
    )
    if found := list(problems):
        raise ConfigError(found[0])
    layout = _agreed_layout(model, ranks)
    if config.sequence_parallel > 1 and not layout.packed:
        raise ModelError(
            f"sequence_parallel={config.sequence_parallel}: the rows of {type(model).__name__} "
            "have to be padded, and padded rows are not shared; set sequence_parallel=1"
        )
    return PackedModel(
        model,
        head=head,
        layout=layout,
        recompute=config.recompute,
        compile=config.compile,
    )


def _agreed_layout(model: Any, ranks: Ranks) -> Layout:
    """Return what rank 0 finds out on its weights."""
    if ranks.world_size == 1:
        return find_layout(model)
    found: list[Layout | str] = [""]
    if ranks.rank == 0:
        try:
            found[0] = find_layout(model)
        except ModelError as error:  # the others are not to wait for an answer
            found[0] = str(error)
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], str):
        raise ModelError(found[0])
    return found[0]
