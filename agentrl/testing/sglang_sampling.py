"""How the stand-in for an SGLang server samples: as ``--enable-deterministic-inference`` does.

Noise goes by the seed and the position. Where any request of the batch is greedy or cut by
``top_k`` or ``top_p``, it is added to the tokens of every request in order of probability, and else
in order of their ids: so what a seed says depends on the requests beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_GREEDY_BELOW = 1e-6


def sample(
    logits: Tensor, sampling: Mapping[str, Any], batch: Iterable[Mapping[str, Any]], position: int
) -> tuple[int, float]:
    """Return a token and its log-probability before anything was cut.

    Args:
        logits: float64 [V].
        sampling: ``sampling_params`` of the request.
        batch: those of all requests that run, this one among them.
        position: of the token in the sequence.
    """
    if _is_greedy(sampling):
        scores = torch.log_softmax(logits, dim=-1)
        token = int(scores.argmax())
        return token, float(scores[token])
    scores = torch.log_softmax(logits / sampling["temperature"], dim=-1)
    noise = _noise(sampling["sampling_seed"], position, len(scores))
    if any(_is_greedy(other) or _is_cut(other) for other in batch):
        ordered, order = scores.sort(descending=True, stable=True)
        token = int(order[(_cut(ordered, sampling) + noise).argmax()])
    else:
        token = int((scores + noise).argmax())
    return token, float(scores[token])


def _is_greedy(sampling: Mapping[str, Any]) -> bool:
    return sampling["temperature"] < _GREEDY_BELOW or sampling["top_k"] == 1


def _is_cut(sampling: Mapping[str, Any]) -> bool:
    return sampling["top_k"] != -1 or sampling["top_p"] != 1.0


def _cut(ordered: Tensor, sampling: Mapping[str, Any]) -> Tensor:
    """Return log-probabilities [V] in falling order with those that are cut at minus infinity."""
    probs = ordered.exp()
    cut = probs.cumsum(-1) - probs > sampling["top_p"]
    if sampling["top_k"] != -1:
        cut |= torch.arange(len(probs)) >= sampling["top_k"]
    return ordered.masked_fill(cut, -torch.inf)


def _noise(seed: int, position: int, count: int) -> Tensor:
    """Gumbel noise [count] that depends on the seed and the position alone."""
    source = np.random.Generator(np.random.Philox(key=[seed, position]))
    return torch.from_numpy(source.gumbel(size=count))
