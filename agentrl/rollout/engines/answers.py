"""What a server says that it sampled, taken at its word only where it can be true."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from agentrl.errors import EngineError
from agentrl.types import SamplingParams

_ROUNDING = 1e-3
"""By which a log-probability may exceed 0: servers compute in half precision too."""


def read_ids(found: Any, *, vocab_size: int, where: str) -> list[int]:
    """Return token ids; nothing is converted to one.

    Args:
        where: the server, for messages.

    Raises:
        EngineError: no list, or one of something else than ids of the vocabulary.
    """
    if not isinstance(found, list):
        raise EngineError(f"the server at {where} answered no token ids")
    if not all(type(token) is int and 0 <= token < vocab_size for token in found):
        raise EngineError(
            f"the server at {where} answered token ids that are not whole numbers from 0 to "
            f"{vocab_size - 1}: {str(found)[:200]}"
        )
    return found


def read_logprobs(found: Sequence[Any], *, where: str) -> list[float]:
    """Return log-probabilities; None stands for one that the server could not compute.

    Raises:
        EngineError: they are no finite numbers of at most 0.
    """
    if not all(value is None or type(value) in (int, float) for value in found):
        raise EngineError(
            f"the server at {where} answered log-probabilities that are no numbers: "
            f"{str(found)[:200]}"
        )
    values = [math.nan if value is None else _as_float(value) for value in found]
    if not all(map(math.isfinite, values)):
        raise EngineError(f"the server at {where} answered log-probabilities that are not finite")
    if max(values, default=0.0) > _ROUNDING:
        raise EngineError(
            f"the server at {where} answered a log-probability of {max(values):g}, a probability "
            "above 1"
        )
    return values


def check_length(ids: Sequence[int], sampling: SamplingParams, *, where: str) -> None:
    """Refuse a turn that goes on after its end.

    Raises:
        EngineError: more tokens than were asked for, or some after a stop token.
    """
    if len(ids) > sampling.max_tokens:
        raise EngineError(
            f"the server at {where} answered {len(ids)} tokens where {sampling.max_tokens} were "
            "asked for"
        )
    stop = next((token for token in ids[:-1] if token in sampling.stop_token_ids), None)
    if stop is not None:
        raise EngineError(f"the server at {where} went on after stop token {stop}")


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # JSON has whole numbers of any length
        return math.inf
