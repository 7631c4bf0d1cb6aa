"""What the SGLang engine is set to, what goes to ``/generate``, and what comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import ConfigError, EngineError
from agentrl.rollout.engines.config import SGLangEngineConfig
from agentrl.rollout.engines.http import Reply
from agentrl.types import SamplingParams, StopReason


@dataclass(slots=True, eq=False)
class OpenTurn:
    """A turn that the server works at."""

    session_id: str
    rid: str = ""
    aborted: bool = False
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_cached_tokens: int | None = None


def sampling_body(sampling: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """Return ``sampling_params`` of ``/generate`` for what is missing of a turn."""
    stops = list(sampling.stop_token_ids)
    return {
        "max_new_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": stops,
        "ignore_eos": not stops,
        "sampling_seed": sampling.seed,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


def read_answer(reply: Reply, where: str) -> tuple[list[int], list[float], dict[str, Any]]:
    """Return ids, log-probabilities and the rest of an answer.

    Raises:
        EngineError: they do not belong together.
    """
    try:
        ids = [int(token) for token in reply.body["output_ids"]]
        meta = reply.body["meta_info"]
        pairs = [(value, int(token)) for value, token, *_ in meta["output_token_logprobs"]]
        aborted = meta["finish_reason"]["type"] == "abort"
    except (LookupError, TypeError, ValueError) as error:
        raise EngineError(f"{where}: an answer of another form: {reply.text}") from error
    if aborted:  # between two steps one of them may be a token ahead
        ids, pairs = ids[: len(pairs)], pairs[: len(ids)]
    if [token for _, token in pairs] != ids:
        raise EngineError(f"{where}: log-probabilities of other tokens than were returned")
    logprobs = [math.nan if value is None else float(value) for value, _ in pairs]
    if not all(map(math.isfinite, logprobs)):
        raise EngineError(f"{where}: log-probabilities that are not finite")
    return ids, logprobs, meta


def how_ended(
    turn: OpenTurn, finish: dict[str, Any], sampling: SamplingParams
) -> StopReason | None:
    """Return how a turn ended; None where the server stopped for a token that nobody asked for."""
    if turn.ids and turn.ids[-1] in sampling.stop_token_ids:
        return StopReason.STOP
    if len(turn.ids) >= sampling.max_tokens:
        return StopReason.LENGTH
    if finish["type"] == "abort" or turn.aborted:
        return StopReason.ABORT
    if finish["type"] == "stop" and isinstance(finish.get("matched"), int):
        return None
    raise EngineError(
        f"session {turn.session_id!r}: SGLang ended the turn after {len(turn.ids)} of "
        f"{sampling.max_tokens} tokens with {finish}"
    )


def check_settings(config: SGLangEngineConfig) -> None:
    """Refuse settings that cannot work.

    Raises:
        ConfigError: names the setting.
    """
    for name in ("max_context", "max_connections", "bucket_mb", "tensor_parallel"):
        if getattr(config, name) < 1:
            raise ConfigError(f"rollout {name}={getattr(config, name)}: must be at least 1")
    if config.verify_tensors < 0:
        raise ConfigError(f"rollout verify_tensors={config.verify_tensors}: must be at least 0")
    if config.command and "{port}" not in " ".join(config.command):
        raise ConfigError(
            f"rollout command={config.command}: it must say where to listen, with '{{port}}'"
        )
