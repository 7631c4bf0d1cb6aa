"""Turns that a vLLM core is generating: the only work done per token. Imports no vLLM.

vLLM's own front end builds a cumulative output, a log-probability object and, if asked, text for
every token of every request; of a turn that is trained on only the end counts. So tokens are
appended to flat lists where the core puts them out, and a turn leaves once, when it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl.rollout.engines.vllm_wire import Turn
from agentrl.types import StopReason

_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}


@dataclass(slots=True)
class _Open:
    """A turn that is being generated."""

    key: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0


class TurnTable:
    """Collects the core's outputs by request.

    Requests go by the core's own ids, which are ``str(key)``.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        """Turns that have not ended."""
        return len(self._open)

    def begin(self, key: int) -> str:
        """Open a turn; returns the id that the core is to know it by."""
        name = str(key)
        self._open[name] = _Open(key)
        return name

    def names(self, keys: Iterable[int]) -> list[str]:
        """Return the core's ids of those turns that are open."""
        return [name for name in map(str, keys) if name in self._open]

    def abort(self, names: Iterable[str]) -> list[Turn]:
        """End open turns with the tokens they have."""
        return [_ended(self._open.pop(name), StopReason.ABORT) for name in names]

    def drop(self, name: str) -> None:
        """Forget a turn that the core never took."""
        self._open.pop(name, None)

    def take(self, outputs: Iterable[Any]) -> list[Turn]:
        """Append what one step put out.

        Args:
            outputs: vLLM's ``EngineCoreOutput`` objects. ``new_logprobs.logprobs`` has one row per
                new token, the sampled token in its first column.

        Returns:
            the turns that ended with it.
        """
        ended: list[Turn] = []
        for output in outputs:
            turn = self._open.get(output.request_id)
            if turn is None:  # aborted while this step was under way
                continue
            new_ids, rows = output.new_token_ids, output.new_logprobs
            if rows is not None:
                if len(new_ids) == 1:  # a scalar, no view: the step's buffer can be used again
                    turn.logprobs.append(rows.logprobs.item(0))
                else:
                    turn.logprobs.extend(rows.logprobs[:, 0].tolist())
            turn.ids += new_ids
            if output.prefill_stats is not None:
                turn.num_cached_tokens = output.prefill_stats.num_cached_tokens
            if output.finish_reason is not None:
                del self._open[output.request_id]
                ended.append(_ended(turn, _reason(output.finish_reason)))
        return ended


def _reason(finish_reason: Any) -> StopReason:
    name = str(finish_reason)
    if name not in _REASONS:
        raise RuntimeError(f"vLLM ended a request with {name!r}")
    return _REASONS[name]


def _ended(turn: _Open, reason: StopReason) -> Turn:
    return Turn(
        key=turn.key,
        ids=np.array(turn.ids, dtype=np.int32).tobytes(),
        logprobs=np.array(turn.logprobs, dtype=np.float32).tobytes(),
        reason=reason,
        num_cached_tokens=turn.num_cached_tokens,
    )
