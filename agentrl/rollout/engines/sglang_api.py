"""What goes to SGLang's ``/generate`` and what comes back, and how it is left with nothing.

What it does otherwise than one would think:

* A sampled token depends on the request's seed and the token's position in the sequence (with
  ``--enable-deterministic-inference``; without it seeds are ignored). So a turn that goes on with
  its tokens in the prompt says the same: ``first_index`` needs no word.
* It depends on the rest of the batch too: noise goes to tokens in order of probability where any
  request is greedy or cut, and else in order of their ids. A request that says ``top_k`` has it the
  first way whatever runs beside it, at the price of sorting the vocabulary.
* Log-probabilities are those before ``top_k`` and ``top_p``.
* ``ignore_eos`` ignores ``stop_token_ids`` too, and without it the model's own end token stops a
  turn although it was not asked for. Such a turn is gone on with here.
* A turn whose last token is a stop token is said to have ended by length where both hold.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import EngineError
from agentrl.rollout.engines.answers import read_ids, read_logprobs
from agentrl.rollout.engines.http import JsonClient, Reply
from agentrl.types import SamplingParams, StopReason

_SOMETHING_RUNS = 400
"""Status of a cache that cannot be flushed now."""
_FLUSH_WAIT_S = 1.0
_LOOK_AGAIN_S = 0.05


@dataclass(slots=True, eq=False)
class OpenTurn:
    """A turn that the server works at."""

    session_id: str
    rid: str = ""
    aborted: bool = False
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_cached_tokens: int | None = None


def sampling_body(sampling: SamplingParams, *, max_tokens: int, all_tokens: int) -> dict[str, Any]:
    """Return ``sampling_params`` of ``/generate`` for what is missing of a turn.

    Args:
        all_tokens: ``top_k`` where nothing is cut: -1, or the size of the vocabulary, which has the
            server go by order of probability as it does beside requests that are cut.
    """
    stops = list(sampling.stop_token_ids)
    return {
        "max_new_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or all_tokens,
        "stop_token_ids": stops,
        "ignore_eos": not stops,
        "sampling_seed": sampling.seed,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


def read_answer(
    reply: Reply, *, vocab_size: int, where: str
) -> tuple[list[int], list[float], dict[str, Any]]:
    """Return ids, log-probabilities and the rest of an answer.

    Raises:
        EngineError: they do not belong together, or are no such thing.
    """
    try:
        found, meta = reply.body["output_ids"], reply.body["meta_info"]
        pairs = [(value, token) for value, token, *_ in meta["output_token_logprobs"]]
        kind = meta["finish_reason"]["type"]
    except (LookupError, TypeError, ValueError) as error:
        raise EngineError(f"{where}: an answer of another form: {reply.text}") from error
    if not isinstance(kind, str):
        raise EngineError(f"{where}: an answer of another form: {reply.text}")
    cached = meta.get("cached_tokens")
    if cached is not None and not (type(cached) is int and cached >= 0):
        raise EngineError(f"{where}: cached_tokens={cached!r} is no number of tokens")
    ids = read_ids(found, vocab_size=vocab_size, where=where)
    if kind == "abort":  # between two steps one of them may be a token ahead
        ids, pairs = ids[: len(pairs)], pairs[: len(ids)]
    if [token for _, token in pairs] != ids:
        raise EngineError(f"{where}: log-probabilities of other tokens than were returned")
    return ids, read_logprobs([value for value, _ in pairs], where=where), meta


def how_ended(
    turn: OpenTurn, finish: dict[str, Any], sampling: SamplingParams, *, num_new: int
) -> StopReason | None:
    """Return how a turn ended; None where the server stopped for a token that nobody asked for.

    Args:
        num_new: tokens of the turn that came with this answer; without one nothing is gone on with.

    Raises:
        EngineError: it ended before its end.
    """
    if turn.ids and turn.ids[-1] in sampling.stop_token_ids:
        return StopReason.STOP
    if len(turn.ids) >= sampling.max_tokens:
        return StopReason.LENGTH
    if finish["type"] == "abort" or turn.aborted:
        return StopReason.ABORT
    if num_new and finish["type"] == "stop" and isinstance(finish.get("matched"), int):
        return None
    raise EngineError(
        f"session {turn.session_id!r}: SGLang ended the turn after {len(turn.ids)} of "
        f"{sampling.max_tokens} tokens with {finish}"
    )


async def flush_until_nothing_runs(client: JsonClient, *, timeout_s: float) -> None:
    """Abort whatever the server has left, until it can flush its cache.

    It refuses to while anything runs or waits there, as a request may that was cancelled here, and
    waits for that before it says so. An abort may have overtaken it, so it has to be told again.

    Args:
        timeout_s: for each answer.

    Raises:
        EngineError: the server cannot do it.
        NoAnswer: within the time.
        Unreachable: the server is gone.
    """
    while True:
        path = f"/flush_cache?timeout={_FLUSH_WAIT_S}"
        reply = await client.post(path, timeout_s=timeout_s)
        if reply.status == 200:
            return
        if reply.status == _SOMETHING_RUNS:
            path = "/abort_request"
            reply = await client.post(path, {"rid": "", "abort_all": True}, timeout_s=timeout_s)
        if reply.status != 200:
            raise EngineError(f"{client.base_url}{path}: {reply.text}")
        await asyncio.sleep(_LOOK_AGAIN_S)  # there are servers that answer without having waited
