"""Evaluation of a model behind an OpenAI-compatible server, in token ids.

The record of an episode is exact to the token, so the server must take the prompt as ids and give
the ids of its answer: vLLM's does (``/v1/completions`` with ``return_token_ids``). One that answers
in text alone is refused when the run starts: its text, tokenised again here, need not be what the
model said. Chat completions are not used: they would render the conversation a second time.

There are no weights to update: a run that trains is refused when it first tries.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from typing import Any

from agentrl.errors import ConfigError, EngineError, EngineLost
from agentrl.rollout.engines.answers import check_length, read_ids, read_logprobs
from agentrl.rollout.engines.config import OpenAIEngineConfig
from agentrl.rollout.engines.http import JsonClient, NoAnswer, Reply, Unreachable
from agentrl.rollout.engines.request_checks import check_request
from agentrl.rollout.engines.setting_checks import check_settings
from agentrl.types import GenerateRequest, Generation, StopReason
from agentrl.weights.served import ServedWeights, WeightSpec

_ANY_VOCABULARY = 1 << 31
_MAX_PAUSE_S = 30.0
_MAX_DOUBLINGS = 64


class OpenAIEngine:
    """A :class:`~agentrl.rollout.engine.RolloutEngine` without weights.

    Args:
        config: settings.
        seed: of the spread of pauses.

    Raises:
        ConfigError: a setting that cannot work.
    """

    def __init__(self, config: OpenAIEngineConfig | None = None, *, seed: int = 0) -> None:
        self.config = config or OpenAIEngineConfig()
        check_settings(self.config)
        self.policy_version = 0
        self._client = JsonClient(
            self.config.base_url,
            api_key_env=self.config.api_key_env,
            max_connections=self.config.max_connections,
        )
        self._model = self.config.model
        self._random = random.Random(seed)
        self._calls: dict[asyncio.Task[Reply], str] = {}
        self._started = self._closed = False

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Find the model, and see whether the server speaks in token ids.

        Raises:
            ConfigError: it serves several models and none is named, or answers without token ids
                or log-probabilities.
            EngineError: it cannot be reached.
        """
        if self._started or self._closed:
            raise EngineError("the engine was started before; build a new one")
        if self._model is None:
            self._model = await self._only_model()
        probe = {"prompt": [0], "max_tokens": 1, "temperature": 0.0}
        reply = await self._ask("POST", "/completions", {**self._common(), **probe})
        choice = _choice(reply, self.config.base_url)
        if not isinstance(choice.get("token_ids"), list):
            raise ConfigError(
                f"the server at {self.config.base_url} answers in text without token ids, from "
                "which no exact record can be made; serve the model with vLLM (0.10 or newer), or "
                "use rollout=sglang for an SGLang server"
            )
        _logprobs(choice, choice["token_ids"], self.config.base_url)
        self._started = True

    async def _only_model(self) -> str:
        reply = await self._ask("GET", "/models")
        data = reply.body.get("data") if isinstance(reply.body, dict) else None
        items = data if isinstance(data, list) else []
        names = [item.get("id") for item in items if isinstance(item, dict)]
        if len(names) != 1 or not isinstance(names[0], str):
            raise ConfigError(
                f"the server at {self.config.base_url} serves {len(names)} models {names[:5]}; "
                "name one with rollout.engine.kwargs.model"
            )
        return names[0]

    async def check_health(self) -> None:
        """Ask for the list of models.

        Raises:
            EngineLost: there is no answer to it.
        """
        try:
            await self._client.get("/models", timeout_s=self.config.timeout_s)
        except EngineError as error:
            raise EngineLost(str(error)) from error

    async def close(self) -> None:
        """Fail unfinished requests and close the connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self.abort()
        await self._client.close()

    # ------------------------------------------------------------------ requests

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate one turn; see :class:`~agentrl.rollout.engine.RolloutEngine`.

        Log-probabilities are as the server computes them, by default before temperature: for
        looking at, not for training.

        Raises:
            EngineError: the server refused the request, answered something else than was asked
                for, or could not be reached, retries spent.
        """
        if not self._started or self._closed:
            raise EngineError("the engine is not running: it was closed, or never started")
        prompt = check_request(
            request, max_context=self.config.max_context, vocab_size=_ANY_VOCABULARY
        )
        body = self._body(request, prompt.tolist())
        call = asyncio.ensure_future(self._ask("POST", "/completions", body))
        self._calls[call] = request.session_id
        task = asyncio.current_task()
        try:
            reply = await call
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise
            return _aborted()
        finally:
            del self._calls[call]
        return _generation(_choice(reply, self.config.base_url), request, self.config.base_url)

    async def end_session(self, session_id: str) -> None:
        """Abort what is unfinished of a session."""
        await self.abort(session_id)

    async def abort(self, session_id: str | None = None) -> int:
        """Give up requests; a server that answers at the end only has no tokens to return."""
        calls = [call for call, name in self._calls.items() if session_id in (None, name)]
        for call in calls:
            call.cancel()
        return len(calls)

    def _common(self) -> dict[str, Any]:
        return {"model": self._model, "return_token_ids": True, "logprobs": 0}

    def _body(self, request: GenerateRequest, prompt: list[int]) -> dict[str, Any]:
        sampling = request.sampling
        body = self._common() | {
            "prompt": prompt,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # stop tokens are those that are asked for, no others
            "skip_special_tokens": False,
        }
        return body | ({"top_k": sampling.top_k} if sampling.top_k else {})

    async def _ask(self, method: str, path: str, body: Any = None) -> Reply:
        """Ask until there is an answer that is the server's last word.

        Raises:
            EngineError: it refused, or the retries are spent.
        """
        failure: EngineError | None = None
        for attempt in range(self.config.max_retries + 1):
            wait_s = 0.0
            try:
                reply = await self._client.request(
                    method, path, body, timeout_s=self.config.timeout_s
                )
            except (Unreachable, NoAnswer) as error:
                failure = error
            else:
                if reply.status == 200:
                    return reply
                failure = EngineError(f"{self.config.base_url}{path}: {reply.text}")
                if reply.status not in (408, 429) and reply.status < 500:
                    raise failure
                wait_s = reply.retry_after_s
            if attempt < self.config.max_retries:
                doubled = 2.0 ** min(attempt, _MAX_DOUBLINGS)
                pause_s = self.config.retry_pause_s * doubled * (0.5 + self._random.random())
                await asyncio.sleep(min(max(pause_s, wait_s), _MAX_PAUSE_S))
        raise EngineError(f"{failure} ({self.config.max_retries + 1} attempts)") from failure

    # ------------------------------------------------------------------ no weights, no sleep

    def weight_specs(self) -> Sequence[WeightSpec]:
        """Return nothing: the weights are the server's."""
        return ()

    async def update_weights(
        self, params: Iterable[tuple[str, Any]], version: int
    ) -> ServedWeights:
        """Refuse.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            f"weights of version {version} cannot be loaded into the server at "
            f"{self.config.base_url}: rollout=openai is for evaluation; train with rollout=vllm, "
            "sglang or hf"
        )

    async def sleep(self, level: int = 1) -> None:
        """Do nothing: the server is somebody else's."""

    async def wake(self) -> None:
        """Do nothing."""


def _choice(reply: Reply, where: str) -> dict[str, Any]:
    try:
        choice = reply.body["choices"][0]
    except (LookupError, TypeError):
        choice = None
    if not isinstance(choice, dict):
        raise EngineError(f"the server at {where} answered with no completion: {reply.text}")
    return choice


def _logprobs(choice: dict[str, Any], ids: Sequence[int], where: str) -> list[float]:
    given = choice.get("logprobs")
    found = given.get("token_logprobs") if isinstance(given, dict) else None
    if not isinstance(found, list) or len(found) != len(ids):
        count = len(found) if isinstance(found, list) else "no"
        raise EngineError(
            f"the server at {where} answered {len(ids)} tokens with {count} log-probabilities; "
            "none are made up: serve the model with vLLM"
        )
    return read_logprobs(found, where=where)


def _generation(choice: dict[str, Any], request: GenerateRequest, where: str) -> Generation:
    ids = read_ids(choice.get("token_ids"), vocab_size=_ANY_VOCABULARY, where=where)
    if not ids:
        raise EngineError(f"the server at {where} answered no token ids")
    check_length(ids, request.sampling, where=where)
    stops = request.sampling.stop_token_ids
    reason = StopReason.STOP if ids[-1] in stops else StopReason.LENGTH
    if reason is StopReason.LENGTH and len(ids) < request.sampling.max_tokens:
        raise EngineError(
            f"the server at {where} ended after {len(ids)} of {request.sampling.max_tokens} tokens "
            f"with finish_reason={choice.get('finish_reason')!r} and no stop token that was asked "
            "for"
        )
    return Generation(
        ids=ids,
        logprobs=_logprobs(choice, ids, where),
        policy_version=[0] * len(ids),
        stop_reason=reason,
    )


def _aborted() -> Generation:
    return Generation(ids=[], logprobs=[], policy_version=[], stop_reason=StopReason.ABORT)
