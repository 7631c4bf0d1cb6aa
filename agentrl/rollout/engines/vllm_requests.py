"""Requests of this process that vLLM's process works at, and the gate before them."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np

from agentrl.errors import EngineError
from agentrl.rollout.engines.config import VLLM_TEMPERATURES
from agentrl.rollout.engines.request_checks import check_request
from agentrl.rollout.engines.vllm_process import EngineProcess
from agentrl.rollout.engines.vllm_wire import Abort, Add, Refused, Turn
from agentrl.types import GenerateRequest, Generation, SamplingParams, StopReason


class Requests:
    """Sends requests, and hands their turns to whoever waits for them."""

    def __init__(self) -> None:
        self._keys = itertools.count()
        self._turns: dict[int, asyncio.Future[Turn]] = {}
        self._sessions: dict[str, int] = {}
        self._gate = asyncio.Event()
        self._gate.set()
        self._none_left = asyncio.Event()
        self._none_left.set()

    def __len__(self) -> int:
        """Requests that have not returned."""
        return len(self._turns)

    # ------------------------------------------------------------------ the gate

    def hold(self) -> None:
        """Let no further request pass :meth:`pass_gate`."""
        self._gate.clear()

    @property
    def held(self) -> bool:
        """Whether requests wait at :meth:`pass_gate`."""
        return not self._gate.is_set()

    def release(self) -> None:
        """Let them pass."""
        self._gate.set()

    async def pass_gate(self, timeout_s: float) -> None:
        """Wait while requests are held.

        Raises:
            EngineError: they still are after ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._gate.is_set():
                    await self._gate.wait()
        except TimeoutError:
            raise EngineError(
                f"an update of the weights that began has not ended after {timeout_s:g} s"
            ) from None

    async def wait_until_none(self) -> None:
        """Wait until every request has returned."""
        await self._none_left.wait()

    # ------------------------------------------------------------------ requests

    async def run(
        self,
        process: EngineProcess,
        request: GenerateRequest,
        prompt: np.ndarray,
        *,
        positional_noise: bool,
        version: int,
    ) -> Generation:
        """Have a request served; cancelling frees what it holds.

        Args:
            prompt: [T] integers, checked.
            positional_noise: see :func:`noise_seed`.
            version: of the weights that it is sampled from.

        Raises:
            EngineError: the session has a request running, or vLLM refused this one.
            EngineLost: the process is gone.
        """
        session = request.session_id
        if session in self._sessions:
            raise EngineError(
                f"session {session!r} has a request running; await it, or give the other one a "
                "session of its own"
            )
        key = next(self._keys)
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._turns[key], self._sessions[session] = future, key
        self._none_left.clear()
        try:
            sampling = _for_vllm(request.sampling, positional_noise)
            process.send(Add(key, prompt.astype(np.int32).tobytes(), sampling))
            turn = await future
        except asyncio.CancelledError:
            if process.lost is None:
                process.send(Abort((key,)))
            raise
        finally:
            del self._turns[key], self._sessions[session]
            if not self._turns:
                self._none_left.set()
        return read_turn(turn, session=session, version=version)

    def abort(self, process: EngineProcess, session_id: str | None) -> int:
        """Tell the core to end a session's request, or all; returns how many."""
        if session_id is None:
            keys = tuple(self._turns)
        else:
            keys = tuple(self._sessions[name] for name in (session_id,) if name in self._sessions)
        if keys:
            process.send(Abort(keys))
        return len(keys)

    def take(self, message: Any) -> None:
        """Hand over a turn, or why there is none; nobody waits for a cancelled one."""
        assert isinstance(message, Turn | Refused), message
        future = self._turns.get(message.key)
        if future is None or future.done():
            return
        if isinstance(message, Turn):
            future.set_result(message)
        else:
            future.set_exception(EngineError(f"vLLM refused the request: {message.message}"))

    def fail(self, error: EngineError) -> None:
        """End all requests with an error, and open the gate to those that would get it too."""
        for future in self._turns.values():
            if not future.done():
                future.set_exception(type(error)(str(error)))
        self._gate.set()


def check_turn(request: GenerateRequest, *, max_context: int, vocab_size: int) -> np.ndarray:
    """Return the prompt as [T] int64.

    Raises:
        EngineError: vLLM cannot serve the request as it is.
    """
    prompt = check_request(request, max_context=max_context, vocab_size=vocab_size)
    coldest, hottest = VLLM_TEMPERATURES
    if not coldest <= (request.sampling.temperature or coldest) <= hottest:
        raise EngineError(
            f"session {request.session_id!r}: temperature={request.sampling.temperature}; vLLM "
            f"samples at {coldest} to {hottest}, and at 0, which is greedy"
        )
    return prompt


def read_turn(turn: Turn, *, session: str, version: int) -> Generation:
    """Return a turn as it came from vLLM's process.

    Raises:
        EngineError: weights that are finite gave log-probabilities that are not.
    """
    ids = np.frombuffer(turn.ids, dtype=np.int32).tolist()
    logprobs = np.frombuffer(turn.logprobs, dtype=np.float32)
    if len(logprobs) != len(ids) or not np.isfinite(logprobs).all():
        raise EngineError(
            f"session {session!r}: vLLM sampled {len(ids)} tokens with "
            f"{int(np.isfinite(logprobs).sum())} finite log-probabilities: the weights of version "
            f"{version} overflow in the dtype that they are served in"
        )
    return Generation(
        ids=ids,
        logprobs=logprobs.tolist(),
        policy_version=[version] * len(ids),
        stop_reason=StopReason(turn.reason),
        num_cached_tokens=turn.num_cached_tokens,
    )


def noise_seed(seed: int, first_index: int, *, positional: bool) -> int:
    """Return the seed of the noise that vLLM draws tokens with.

    vLLM numbers the tokens of a request from 0 each time. Where its noise comes from a stream per
    request, a turn that goes on from ``first_index`` gets a stream of its own, so that it does not
    repeat the noise of its beginning. Where noise goes by the position in the session, the same
    seed continues the same noise, as if the turn had never been interrupted.
    """
    if positional or first_index == 0:
        return seed
    mixed = np.random.SeedSequence([seed, first_index]).generate_state(1, np.uint64)[0]
    return int(mixed >> np.uint64(1))


def _for_vllm(sampling: SamplingParams, positional_noise: bool) -> dict[str, Any]:
    """Return keyword arguments of vLLM's ``SamplingParams``."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
        "seed": noise_seed(sampling.seed, sampling.first_index, positional=positional_noise),
    }
