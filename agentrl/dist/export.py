"""Names and files of a packed model's weights, as transformers knows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils import logging

from agentrl.dist.packed_model import PackedModel


def live_tensors(packed: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers as they are, or in shards; tied ones once.

    Names are those of the model of transformers itself; a critic's head is ``value_head.*``.
    """
    seen: set[int] = set()
    for name, value in packed.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            yield name.removeprefix("model."), value


def save_pretrained(
    model: Any, tokenizer: Any, directory: Path, whole: Mapping[str, Tensor] | None
) -> None:
    """Write weights, configuration and tokenizer as transformers loads them.

    Args:
        whole: the weights, where the model holds shards; None: those of the model.
    """
    with _quiet():
        if whole is None:
            model.save_pretrained(directory)
        else:
            model.save_pretrained(directory, state_dict=dict(whole))
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing progress bars over the run's own display."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
