"""Evaluation against a served model: exact to the token, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from agentrl.errors import ConfigError, EngineError, EngineLost
from agentrl.rollout.engines.config import OpenAIEngineConfig
from agentrl.rollout.engines.openai import OpenAIEngine
from agentrl.testing.json_server import Answer, JsonServer
from agentrl.types import GenerateRequest, SamplingParams, StopReason

pytestmark = pytest.mark.timeout(60)


class Server:
    """Answers as vLLM does, or as a test says."""

    def __init__(self) -> None:
        self.models = ["tiny"]
        self.failures: list[Answer] = []
        self.choice: dict[str, Any] | None = None
        self.delay_s = 0.0
        self.http = JsonServer({"GET /v1/models": self._models, "POST /v1/completions": self._one})

    async def _models(self, body: Any, query: Mapping[str, str]) -> Answer:
        return 200, {"object": "list", "data": [{"id": name} for name in self.models]}

    async def _one(self, body: Any, query: Mapping[str, str]) -> Answer:
        if body["prompt"] != [0]:
            if self.failures:
                return self.failures.pop(0)
            await asyncio.sleep(self.delay_s)
        ids = [40 + i for i in range(body["max_tokens"])]
        choice = {
            "index": 0,
            "text": "...",
            "finish_reason": "length",
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-0.5] * len(ids)},
        }
        return 200, {"choices": [choice | (self.choice or {})]}


def ask(**sampling: Any) -> GenerateRequest:
    given = {"max_tokens": 3, "seed": 9, "stop_token_ids": (7,)} | sampling
    return GenerateRequest(prompt_ids=[1, 2], sampling=SamplingParams(**given), session_id="s")


def with_server(
    body: Callable[[OpenAIEngine, Server], Awaitable[None]],
    *,
    prepare: Callable[[Server], None] = lambda server: None,
    **settings: Any,
) -> None:
    async def main() -> None:
        server = Server()
        prepare(server)
        await server.http.start()
        config = OpenAIEngineConfig(
            base_url=f"{server.http.url}/v1", retry_pause_s=0.001, **settings
        )
        engine = OpenAIEngine(config)
        try:
            await engine.start()
            await body(engine, server)
        finally:
            await engine.close()
            await server.http.close()

    asyncio.run(main())


def test_ids_go_in_and_come_out() -> None:
    async def body(engine: OpenAIEngine, server: Server) -> None:
        turn = await engine.generate(ask(temperature=0.3, top_k=5))
        assert turn.ids == [40, 41, 42] and turn.logprobs == [-0.5] * 3
        assert turn.policy_version == [0, 0, 0] and turn.stop_reason is StopReason.LENGTH
        sent = server.http.requests[-1][1]
        assert sent["prompt"] == [1, 2] and sent["model"] == "tiny"
        assert (sent["temperature"], sent["top_k"], sent["seed"]) == (0.3, 5, 9)
        assert sent["stop_token_ids"] == [7] and sent["ignore_eos"]
        server.choice = {
            "token_ids": [40, 7],
            "finish_reason": "stop",
            "logprobs": {"token_logprobs": [-1.0, -2.0]},
        }
        turn = await engine.generate(ask())
        assert turn.ids == [40, 7] and turn.stop_reason is StopReason.STOP

    with_server(body)


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ({"logprobs": {"token_logprobs": [-1.0] * 2}}, "3 tokens with 2 log-probabilities"),
        ({"logprobs": None}, "with no log-probabilities"),
        ({"logprobs": {"token_logprobs": [-1.0, None, -1.0]}}, "not finite"),
        ({"logprobs": {"token_logprobs": [-1.0, "x", -1.0]}}, "no numbers"),
        ({"logprobs": {"token_logprobs": [-1.0, True, -1.0]}}, "no numbers"),
        ({"logprobs": {"token_logprobs": [-1.0, 10**400, -1.0]}}, "not finite"),
        ({"logprobs": {"token_logprobs": [-1.0, 0.5, -1.0]}}, "probability above 1"),
        ({"logprobs": [-1.0] * 3}, "with no log-probabilities"),
        ({"token_ids": []}, "no token ids"),
        ({"token_ids": "abc"}, "no token ids"),
        ({"token_ids": [1.5, 2, 3]}, "whole numbers"),
        ({"token_ids": ["40", "41", "42"]}, "whole numbers"),
        ({"token_ids": [True, 1, 2]}, "whole numbers"),
        ({"token_ids": [-1, 2, 3]}, "whole numbers from 0"),
        ({"token_ids": [2**31, 2, 3]}, "whole numbers from 0"),
        ({"token_ids": [float("inf"), 2, 3]}, "whole numbers"),
        (
            {"token_ids": [1, 2, 3, 4], "logprobs": {"token_logprobs": [-1.0] * 4}},
            "4 tokens where 3 were asked for",
        ),
        ({"token_ids": [7, 2, 3]}, "went on after stop token 7"),
        (
            {"token_ids": [40], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"},
            "ended after 1 of 3 tokens with finish_reason='stop'",
        ),
    ],
)
def test_an_answer_that_is_no_exact_record_is_refused(choice: dict[str, Any], problem: str) -> None:
    async def body(engine: OpenAIEngine, server: Server) -> None:
        server.choice = choice
        with pytest.raises(EngineError, match=problem):
            await engine.generate(ask())

    with_server(body)


def test_a_server_that_answers_in_text_alone_is_refused_at_start() -> None:
    async def body(engine: OpenAIEngine, server: Server) -> None: ...

    with pytest.raises(ConfigError, match="text without token ids.*rollout=sglang"):
        with_server(body, prepare=lambda server: setattr(server, "choice", {"token_ids": None}))


@pytest.mark.parametrize("models", [None, 3, "tiny", {}, [None], [{}], [{"id": 3}]])
def test_a_list_of_models_that_is_none_is_refused_at_start(models: Any) -> None:
    async def body(engine: OpenAIEngine, server: Server) -> None: ...

    async def listed(body: Any, query: Mapping[str, str]) -> Answer:
        return 200, {"data": models}

    def prepare(server: Server) -> None:
        server.http = JsonServer({"GET /v1/models": listed, "POST /v1/completions": server._one})

    with pytest.raises(ConfigError, match="name one with rollout.engine.kwargs.model"):
        with_server(body, prepare=prepare)


def test_pauses_do_not_grow_beyond_numbers() -> None:
    async def body(engine: OpenAIEngine, server: Server) -> None:
        engine.config.retry_pause_s = 0.0
        server.failures = [(503, "busy")] * 1100
        assert (await engine.generate(ask())).ids == [40, 41, 42]

    with_server(body, max_retries=1200)


def test_failures_of_the_server_are_tried_again_and_refusals_are_not() -> None:
    async def body(engine: OpenAIEngine, server: Server) -> None:
        server.failures = [(503, "busy"), (429, {"error": "slow down"}), (500, "oops")]
        assert (await engine.generate(ask())).ids == [40, 41, 42]
        before = len(server.http.requests)
        server.failures = [(400, {"error": {"message": "prompt too long"}})] * 2
        with pytest.raises(EngineError, match="prompt too long"):
            await engine.generate(ask())
        assert len(server.http.requests) == before + 1
        server.failures = [(503, "busy")] * 9
        with pytest.raises(EngineError, match=r"busy.*\(4 attempts\)"):
            await engine.generate(ask())

    with_server(body, max_retries=3)


def test_a_server_that_is_gone_or_silent_is_an_error_with_a_deadline() -> None:
    async def body(engine: OpenAIEngine, server: Server) -> None:
        server.delay_s = 300.0
        engine.config.timeout_s = 0.1
        with pytest.raises(EngineError, match="did not answer within 0.1 s"):
            await engine.generate(ask())
        engine.config.timeout_s = 30.0
        await server.http.close()
        with pytest.raises(EngineError, match="cannot be reached"):
            await engine.generate(ask())
        with pytest.raises(EngineLost):
            await engine.check_health()

    with_server(body, max_retries=0)


def test_an_abort_returns_without_tokens_and_a_cancellation_raises() -> None:
    async def body(engine: OpenAIEngine, server: Server) -> None:
        server.delay_s = 30.0
        task = asyncio.create_task(engine.generate(ask()))
        while not server.http.requests[-1][1] or server.http.requests[-1][1]["prompt"] == [0]:
            await asyncio.sleep(0.001)
        assert await engine.abort("other") == 0 and await engine.abort("s") == 1
        turn = await task
        assert turn.ids == [] and turn.stop_reason is StopReason.ABORT
        task = asyncio.create_task(engine.generate(ask()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with_server(body)


def test_a_model_is_named_where_there_are_several() -> None:
    async def body(engine: OpenAIEngine, server: Server) -> None: ...

    def two(server: Server) -> None:
        server.models = ["a", "b"]

    with pytest.raises(ConfigError, match="serves 2 models.*kwargs.model"):
        with_server(body, prepare=two)
    with_server(body, prepare=two, model="b")


def test_a_key_that_the_server_repeats_is_kept_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(engine: OpenAIEngine, server: Server) -> None:
        server.failures = [(400, {"error": "no such key: sk-abcdef"})]
        with pytest.raises(EngineError, match=r"no such key: \$\{env:MY_KEY\}"):
            await engine.generate(ask())

    monkeypatch.setenv("MY_KEY", "sk-abcdef")
    with_server(body, api_key_env="MY_KEY")


def test_a_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: OpenAIEngine, server: Server) -> None:
        assert server.http.headers["authorization"] == "Bearer secret"

    monkeypatch.setenv("MY_KEY", "secret")
    with_server(body, api_key_env="MY_KEY")
    monkeypatch.setenv("MY_KEY", "secret\n")
    with pytest.raises(ConfigError, match="MY_KEY.*line break"):
        with_server(body, api_key_env="MY_KEY")
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match="MY_KEY.*no such environment variable"):
        with_server(body, api_key_env="MY_KEY")


def test_training_is_refused() -> None:
    async def body(engine: OpenAIEngine, server: Server) -> None:
        assert engine.weight_specs() == ()
        with pytest.raises(EngineError, match="rollout=openai is for evaluation"):
            await engine.update_weights([], 1)

    with_server(body)
