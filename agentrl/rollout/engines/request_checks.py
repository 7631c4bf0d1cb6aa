"""What every engine refuses: requests that cannot be served as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from agentrl.errors import EngineError
from agentrl.types import GenerateRequest, SamplingParams


def check_request(request: GenerateRequest, *, max_context: int, vocab_size: int) -> np.ndarray:
    """Return the prompt as [T] int64.

    Raises:
        EngineError: it cannot be served; the message says what of it and within which limits.
    """
    sampling, who = request.sampling, f"session {request.session_id!r}"
    _check_sampling(sampling, who)
    if not len(request.prompt_ids):
        raise EngineError(f"{who}: the prompt is empty; it needs at least one token")
    prompt = _whole_numbers(request.prompt_ids, who)
    if len(prompt) + sampling.max_tokens > max_context:
        raise EngineError(
            f"{who}: {len(prompt)} prompt tokens + {sampling.max_tokens} max_tokens exceed "
            f"max_context {max_context}; shorten one of them or raise max_context"
        )
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        raise EngineError(
            f"{who}: prompt ids {int(prompt.min())}..{int(prompt.max())} leave the "
            f"vocabulary 0..{vocab_size - 1}; the tokenizer belongs to another model"
        )
    return prompt


def _whole_numbers(ids: Sequence[int], who: str) -> np.ndarray:
    """Return ids as [T] int64; floats are refused, not rounded."""
    try:
        prompt = np.asarray(ids)
    except ValueError:  # ragged
        prompt = np.zeros(0)
    if prompt.dtype.kind not in "iu" or prompt.ndim != 1:
        raise EngineError(f"{who}: prompt_ids must be a flat sequence of whole numbers")
    return prompt.astype(np.int64, copy=True)


def _check_sampling(sampling: SamplingParams, who: str) -> None:
    wrong: list[str] = []
    for name in ("max_tokens", "top_k", "seed", "first_index"):
        if not isinstance(getattr(sampling, name), (int, np.integer)):
            wrong.append(f"{name}={getattr(sampling, name)!r} (a whole number)")
    if wrong:
        raise EngineError(f"{who}: sampling parameters of another type: {', '.join(wrong)}")
    if sampling.max_tokens < 1:
        wrong.append(f"max_tokens={sampling.max_tokens} (at least 1)")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        wrong.append(f"temperature={sampling.temperature} (finite, 0 or more)")
    if not 0 < sampling.top_p <= 1:
        wrong.append(f"top_p={sampling.top_p} (above 0, at most 1)")
    if sampling.top_k < 0:
        wrong.append(f"top_k={sampling.top_k} (0 or more)")
    if not 0 <= sampling.seed < 2**63:
        wrong.append(f"seed={sampling.seed} (0 to 2**63 - 1)")
    if sampling.first_index < 0:
        wrong.append(f"first_index={sampling.first_index} (0 or more)")
    if any(token < 0 for token in sampling.stop_token_ids):
        wrong.append(f"stop_token_ids={sampling.stop_token_ids} (0 or more)")
    if wrong:
        raise EngineError(f"{who}: sampling parameters out of range: {', '.join(wrong)}")
