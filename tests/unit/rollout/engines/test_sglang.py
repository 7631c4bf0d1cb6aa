"""SGLang's API, with what it does otherwise than one would think."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import shutil
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.errors import ConfigError, EngineError, EngineLost
from agentrl.rollout.engines.config import SGLangEngineConfig
from agentrl.rollout.engines.sglang import SGLangEngine
from agentrl.testing.random_models import build
from agentrl.testing.sglang_server import SGLangServer
from agentrl.types import GenerateRequest, SamplingParams, StopReason
from agentrl.weights.channels import Address, open_sender
from agentrl.weights.checksum import checksums
from agentrl.weights.plan import BucketPlan
from agentrl.weights.push import StreamSource, WeightSink, push
from agentrl.weights.served import WeightSpec

pytestmark = pytest.mark.timeout(120)
PROMPT = [3, 1, 4, 1, 5]


def ask(session: str = "s", **sampling: Any) -> GenerateRequest:
    given = {"max_tokens": 12, "temperature": 0.0, "seed": 7} | sampling
    return GenerateRequest(prompt_ids=PROMPT, sampling=SamplingParams(**given), session_id=session)


@torch.no_grad()
def greedy(model: Any, count: int = 12) -> list[int]:
    ids = list(PROMPT)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def with_server(
    body: Callable[[SGLangEngine, SGLangServer], Awaitable[None]],
    *,
    server: dict[str, Any] | None = None,
    eos: int | None = None,
    builder: str = "tiny-qwen3",
    **settings: Any,
) -> None:
    async def main() -> None:
        model = build(builder)
        model.config.eos_token_id = eos
        local = SGLangServer(model, **(server or {}))
        await local.start()
        config = SGLangEngineConfig(base_url=local.http.url, max_context=200, **settings)
        engine = SGLangEngine(build(builder), config)
        try:
            await engine.start()
            await body(engine, local)
        finally:
            await engine.close()
            await local.close()

    asyncio.run(main())


def moved(model: Any, by: float) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=torch.Generator()))
    return other


def test_greedy_ids_and_logprobs_are_those_of_the_model() -> None:
    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        turn = await engine.generate(ask())
        assert turn.ids == greedy(local.model)
        rows = local.model(torch.tensor([PROMPT + turn.ids])).logits[0, len(PROMPT) - 1 : -1]
        expected = torch.log_softmax(rows, -1).gather(1, torch.tensor(turn.ids)[:, None])[:, 0]
        assert turn.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
        assert turn.stop_reason is StopReason.LENGTH and turn.num_cached_tokens == 0
        again = await engine.generate(ask())
        assert again.num_cached_tokens == len(PROMPT) - 1
        follow = dataclasses.replace(ask(), prompt_ids=[*PROMPT, *turn.ids, 1, 2])
        later = await engine.generate(follow)  # the last token was sampled, and never computed
        assert later.num_cached_tokens == len(PROMPT) + len(turn.ids) - 1

    with_server(body)


def test_an_end_token_that_nobody_asked_for_does_not_end_a_turn() -> None:
    eos = greedy(build("tiny-qwen3"))[3]

    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        for stops in [(), (200,)]:
            turn = await engine.generate(ask(stop_token_ids=stops))
            assert turn.ids == greedy(local.model), stops
        asked = [body for key, body in local.http.requests if key == "POST /generate"]
        assert len(asked) > 2  # it was gone on with
        stopped = await engine.generate(ask(stop_token_ids=(eos,)))
        assert stopped.stop_reason is StopReason.STOP and stopped.ids[-1] == eos

    with_server(body, eos=eos)


def test_a_turn_goes_on_with_the_same_noise_as_if_it_had_not_been_cut() -> None:
    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        whole = await engine.generate(ask(temperature=1.0))
        rest = GenerateRequest(
            prompt_ids=PROMPT + whole.ids[:5],
            sampling=SamplingParams(max_tokens=7, temperature=1.0, seed=7, first_index=5),
            session_id="s",
        )
        assert (await engine.generate(rest)).ids == whole.ids[5:]
        assert (await engine.generate(ask(temperature=1.0, seed=8))).ids != whole.ids

    with_server(body)


def test_a_stop_token_at_the_very_end_is_a_stop() -> None:
    last = greedy(build("tiny-qwen3"), 4)[3]

    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        turn = await engine.generate(ask(max_tokens=4, stop_token_ids=(last,)))
        assert turn.stop_reason is StopReason.STOP

    with_server(body)


def test_an_abort_ends_one_request_and_no_other() -> None:
    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        tasks = [asyncio.create_task(engine.generate(ask(n, max_tokens=90))) for n in "ab"]
        while local.num_running < 2:
            await asyncio.sleep(0.001)
        assert await engine.abort("a") == 1
        first = await tasks[0]
        assert first.stop_reason is StopReason.ABORT
        assert first.ids == greedy(local.model, 90)[: len(first.ids)]
        assert (await tasks[1]).stop_reason is StopReason.LENGTH

    with_server(body, server={"step_s": 0.002})


def test_an_update_waits_for_a_request_that_was_cancelled_here_and_still_runs_there() -> None:
    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        running = asyncio.create_task(engine.generate(ask(max_tokens=150)))
        while not local.num_running:
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        new = moved(local.model, 0.1)
        served = await engine.update_weights(new.named_parameters(), 5)
        assert not local.num_running and served.version == engine.policy_version == 5
        assert served.sums == checksums(new.named_parameters())
        turn = await engine.generate(ask())
        assert turn.ids == greedy(new) and set(turn.policy_version) == {5}
        assert turn.num_cached_tokens == 0  # nothing of the old weights is left

    with_server(body, server={"step_s": 0.002})


def test_weights_come_in_buckets_through_a_channel() -> None:
    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        assert isinstance(engine, WeightSink)
        with pytest.raises(EngineError, match="given no weights"):
            await engine.generate(ask())
        plan = BucketPlan.of(engine.weight_specs(), bucket_bytes=20_000)
        assert len(plan.buckets) > 3
        sender = open_sender("shm", plan, device="cpu", num_receivers=1)
        await engine.connect(plan, sender.address)
        for version in (1, 2):
            new = moved(local.model, 0.05 * version)
            source = StreamSource(new.named_parameters(), sender)
            (served,) = await push(source, [engine], plan=plan, version=version)
            assert served.sums == checksums(new.named_parameters())
            assert (await engine.generate(ask())).ids == greedy(new)
        sender.close()

    with_server(body, server={"load_format": "dummy"})


async def say_nothing(body: Any, query: Mapping[str, str]) -> tuple[int, Any]:
    return 400, {"success": False, "message": "Torch not compiled with CUDA enabled"}


@pytest.mark.parametrize("lost", ["", "norm.weight", "layers.1.mlp.down_proj"])
@pytest.mark.parametrize("by", ["rows", "fingerprints"])
def test_a_server_that_keeps_an_old_tensor_is_found_out(by: str, lost: str) -> None:
    old, new = build("tiny-llama", 1), build("tiny-llama", 2)

    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        if by == "rows":
            local.http._endpoints["POST /weights_checker"] = say_nothing
        await engine.update_weights(old.named_parameters(), 1)
        local.tensors.loses = lambda name: lost in name
        with pytest.raises(EngineError, match="scrambled" if by == "rows" else "stale"):
            await engine.update_weights(new.named_parameters(), 2)
        with pytest.raises(EngineError, match="nothing to sample from.*failed"):
            await engine.generate(ask())
        local.tensors.loses = lambda name: False
        await engine.update_weights(new.named_parameters(), 3)
        assert (await engine.generate(ask())).ids == greedy(new)

    with_server(body, builder="tiny-llama", verify_tensors=99 if by == "rows" else 0)


def test_rows_that_the_server_mistakes_for_others_are_not_asked_for() -> None:
    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        keys = local.model.get_parameter("model.layers.0.self_attn.k_proj.weight")
        mistaken = local.tensors.rows("model.layers.0.self_attn.k_proj.weight", 2)
        assert mistaken is not None and mistaken != keys[:2].tolist()
        await engine.update_weights(local.model.named_parameters(), 1)
        calls = [said["name"] for key, said in local.http.requests if "get_weights" in key]
        assert len(calls) > 20 and not [name for name in calls if "k_proj" in name]

    with_server(body, builder="tiny-llama", verify_tensors=99)


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("fault", ["unknown", "shape"])
def test_wrong_weights_are_refused_before_the_server_is_told(fault: str, channel: bool) -> None:
    """It would say that an unknown tensor was loaded, and end at one of another shape."""

    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        params = {name: value.detach().clone() for name, value in local.model.named_parameters()}
        name = min(params)
        if fault == "unknown":
            params = {"model.layers.9.mlp.up_proj.weight": params[name]} | params
        else:
            params[name] = params[name].reshape(-1, 1)
        if channel:
            given = ((name, tuple(value.shape)) for name, value in params.items())
            specs = [WeightSpec(name=name, shape=shape, dtype="float32") for name, shape in given]
            plan = BucketPlan.of(specs, bucket_bytes=1 << 20)
            with pytest.raises(EngineError, match="proj.weight|embed_tokens"):
                await engine.connect(plan, Address(transport="shm", timeout_s=5.0))
        else:
            with pytest.raises(EngineError, match="weight update: .*(proj.weight|embed_tokens)"):
                await engine.update_weights(params.items(), 1)
        assert "POST /update_weights_from_tensor" not in [key for key, _ in local.http.requests]

    with_server(body)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tie_word_embeddings": False}, "no place for 1 tensors, the first 'lm_head.weight'"),
        ({"num_hidden_layers": 4}, "no place for 11 tensors, the first 'model.layers.3"),
        ({"num_hidden_layers": 2}, "nobody trains, 8 tensors, the first 'model.layers.2"),
    ],
)
def test_a_server_of_another_model_is_refused_before_it_is_sent_anything(
    change: dict[str, Any], problem: str
) -> None:
    given = build("tiny-qwen3").config.to_dict() | change
    del given["layer_types"]
    model = Qwen3ForCausalLM(Qwen3Config(**given))

    async def main() -> None:
        local = SGLangServer(build("tiny-qwen3"))
        await local.start()
        engine = SGLangEngine(model, SGLangEngineConfig(base_url=local.http.url))
        with pytest.raises(ConfigError, match=problem):
            await engine.start()
        await engine.close()
        await local.close()

    asyncio.run(main())


def test_a_server_that_would_cut_tensors_to_its_own_size_is_refused(tmp_path: Path) -> None:
    given = build("tiny-qwen3").config.to_dict()
    wider = Qwen3ForCausalLM(Qwen3Config(**given | {"intermediate_size": 88}))

    async def main() -> None:
        local = SGLangServer(build("tiny-qwen3"))
        await local.start()
        config = SGLangEngineConfig(base_url=local.http.url, max_context=200)
        blind = SGLangEngine(wider, config)
        await blind.start()
        await blind.update_weights(wider.named_parameters(), 1)  # the server says: Success
        local.model.save_pretrained(tmp_path)
        local.model_path = str(tmp_path)
        engine = SGLangEngine(wider, config)
        with pytest.raises(ConfigError, match="intermediate_size = 80, and model.path 88"):
            await engine.start()
        await engine.close()
        await blind.close()
        right = SGLangEngine(local.model, config)
        await right.start()
        await right.close()
        await local.close()

    asyncio.run(main())


def test_a_server_that_weights_end_is_lost_and_the_end_of_its_log_is_shown() -> None:
    async def main() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "agentrl.testing.sglang_server", "--port", "{port}"]
        other = build("tiny-qwen3").config
        other.intermediate_size -= 8
        engine = SGLangEngine(
            Qwen3ForCausalLM(other), SGLangEngineConfig(command=command, port=port)
        )
        try:
            await engine.start()
            update = engine.update_weights(Qwen3ForCausalLM(other).named_parameters(), 1)
            with pytest.raises(EngineLost, match=r"(?s)other shapes.*RuntimeError"):
                await update
            with pytest.raises(EngineError, match="status 1|nothing to sample from"):
                await engine.generate(ask())
        finally:
            await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-6}])
def test_a_turn_that_is_cut_to_the_likeliest_token_is_greedy(cut: dict[str, Any]) -> None:
    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        turn = await engine.generate(ask(temperature=1.0, **cut))
        assert turn.ids == greedy(local.model)
        assert (await engine.generate(ask(temperature=1.0))).ids != turn.ids

    with_server(body)


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_runs_beside_a_turn_does_not_change_it_where_a_run_is_deterministic(
    deterministic: bool,
) -> None:
    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        alone = await engine.generate(ask(temperature=1.0))
        beside = asyncio.create_task(engine.generate(ask("greedy", max_tokens=150)))
        while not local.num_running:
            await asyncio.sleep(0.001)
        among = await engine.generate(ask(temperature=1.0))
        assert not beside.done()
        assert (among.ids == alone.ids) == deterministic
        await engine.abort()
        await beside

    with_server(body, server={"step_s": 0.002}, deterministic=deterministic)


def test_weights_that_somebody_else_changed_are_noticed_with_the_next_answer() -> None:
    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        await engine.update_weights(local.model.named_parameters(), 1)
        local._weight_version = "other"
        with pytest.raises(EngineError, match="stale policy.*'other', not 1"):
            await engine.generate(ask())

    with_server(body)


def test_a_server_that_goes_away_is_lost() -> None:
    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        task = asyncio.create_task(engine.generate(ask(max_tokens=150)))
        while not local.num_running:
            await asyncio.sleep(0.001)
        await engine.check_health()
        await local.close()
        with pytest.raises(EngineLost):
            await task
        with pytest.raises(EngineLost):
            await engine.check_health()

    with_server(body, server={"step_s": 0.01})


def test_sleep_gives_memory_back_and_level_two_forgets_the_weights() -> None:
    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        for level, tags in ((1, {"kv_cache"}), (2, {"kv_cache", "weights"})):
            await engine.sleep(level)
            assert local._released == tags
            with pytest.raises(EngineError, match="asleep"):
                await engine.generate(ask())
            await engine.wake()
            assert not local._released
        with pytest.raises(EngineError, match="forgot its weights"):
            await engine.generate(ask())
        await engine.update_weights(local.model.named_parameters(), 1)
        await engine.generate(ask())

    with_server(body)


def test_what_the_server_refuses_is_refused_with_its_words() -> None:
    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        with pytest.raises(EngineError, match="maximum of 20"):
            await engine.generate(ask(max_tokens=100))

    with_server(body, server={"context_length": 20})


def answered(*ids: Any, logprobs: Any = None, **meta: Any) -> dict[str, Any]:
    """Return an answer of ``/generate``, as a server that says anything at all would give it."""
    values = [-0.5] * len(ids) if logprobs is None else logprobs
    pairs = [[value, token, None] for value, token in zip(values, ids, strict=True)]
    given = {"finish_reason": {"type": "length"}, "output_token_logprobs": pairs}
    return {"output_ids": list(ids), "meta_info": given | meta}


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "another form"),
        ([], "another form"),
        ({"output_ids": [1, 2, 3]}, "another form"),
        (answered(1, 2, 3) | {"meta_info": []}, "another form"),
        (answered(1, 2, 3, output_token_logprobs=None), "another form"),
        (answered(1, 2, 3, finish_reason=None), "another form"),
        (answered(1, 2, 3, finish_reason={"type": []}), "another form"),
        (answered(1, 2, 3, cached_tokens="all"), "cached_tokens"),
        (answered(1, 2, 3, cached_tokens=-1), "cached_tokens"),
        (answered("1", "2", "3"), "whole numbers"),
        (answered(1.0, 2, 3), "whole numbers"),
        (answered(True, 2, 3), "whole numbers"),
        (answered(-1, 2, 3), "whole numbers from 0"),
        (answered(10**6, 2, 3), "whole numbers from 0 to"),
        (answered(1, 2, 3, logprobs=["x", -1, -1]), "no numbers"),
        (answered(1, 2, 3, logprobs=[[], -1, -1]), "no numbers"),
        (answered(1, 2, 3, logprobs=[0.5, -1, -1]), "probability above 1"),
        (answered(1, 2, 3, logprobs=[None, -1, -1]), "not finite"),
        (answered(1, 2, 3, output_token_logprobs=[[-0.5, 1, None]]), "other tokens"),
        (answered(1, 2, 3, 4), "4 tokens where 3 were asked for"),
        (answered(1, 7, 3), "went on after stop token 7"),
        (answered(finish_reason={"type": "stop", "matched": 9}), "after 0 of 3 tokens"),
        (answered(1, 2, finish_reason={"type": "length"}), "after 2 of 3 tokens"),
    ],
)
def test_an_answer_that_is_no_exact_record_is_refused(answer: Any, problem: str) -> None:
    async def say(body: Any, query: Mapping[str, str]) -> tuple[int, Any]:
        return 200, answer

    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        local.http._endpoints["POST /generate"] = say
        with pytest.raises(EngineError, match=problem):
            await engine.generate(ask(max_tokens=3, stop_token_ids=(7,)))

    with_server(body)


def test_an_update_ends_at_once_where_the_server_cannot_flush_its_cache() -> None:
    async def say(body: Any, query: Mapping[str, str]) -> tuple[int, Any]:
        return 500, "no scheduler"

    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        local.http._endpoints["POST /flush_cache"] = say
        with pytest.raises(EngineError, match="flush_cache.*no scheduler"):
            await engine.update_weights(local.model.named_parameters(), 1)
        assert (await engine.generate(ask())).ids == greedy(local.model)  # nothing was touched

    with_server(body)


@pytest.mark.parametrize("rows", [[None], [[None]], ["x"], [[1.0], 2.0], [[[1.0]]]])
def test_weights_that_are_read_back_as_something_else_are_no_weights(rows: Any) -> None:
    async def say(body: Any, query: Mapping[str, str]) -> tuple[int, Any]:
        return 200, rows

    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        local.http._endpoints["POST /get_weights_by_name"] = say
        with pytest.raises(EngineError, match="scrambled|another form"):
            await engine.update_weights(local.model.named_parameters(), 1)

    with_server(body)


def test_shared_memory_that_is_too_small_is_told_and_left_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(path: str) -> shutil._ntuple_diskusage:
        return shutil._ntuple_diskusage(4096, 0, 4096)

    async def body(engine: SGLangEngine, local: SGLangServer) -> None:
        monkeypatch.setattr(shutil, "disk_usage", full)
        with pytest.raises(EngineError, match=r"0\.0 MiB are free in /dev/shm; lower weight_sync"):
            await engine.update_weights(local.model.named_parameters(), 1)
        assert (await engine.generate(ask())).ids == greedy(local.model)  # nothing was touched

    with_server(body)


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_lets_nobody_in_is_not_waited_for(status: int) -> None:
    async def say(body: Any, query: Mapping[str, str]) -> tuple[int, Any]:
        return status, "go away"

    async def main() -> None:
        local = SGLangServer(build("tiny-qwen3"))
        local.http._endpoints["GET /server_info"] = say
        await local.start()
        config = SGLangEngineConfig(base_url=local.http.url)
        engine = SGLangEngine(build("tiny-qwen3"), config)
        with pytest.raises(EngineError, match=f"status {status}: go away"):
            await engine.start()
        await engine.close()
        await local.close()

    asyncio.run(main())


def test_a_server_that_is_not_there_is_waited_for_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        "agentrl.rollout.engines.sglang_server.logger.warning",
        lambda text, *values: said.append(text % values),
    )

    async def main() -> None:
        config = SGLangEngineConfig(base_url="http://127.0.0.1:9", start_timeout_s=2.0)
        engine = SGLangEngine(build("tiny-qwen3"), config)
        with pytest.raises(EngineError, match="not ready after 2 s"):
            await engine.start()
        await engine.close()

    asyncio.run(main())
    assert len(said) == 1 and "waiting for the SGLang server at http://127.0.0.1:9" in said[0]


def test_a_server_of_ours_that_ends_is_reported_with_its_log() -> None:
    async def main() -> None:
        command = ["sh", "-c", "echo out of memory on {port}; exit 3"]
        engine = SGLangEngine(build("tiny-qwen3"), SGLangEngineConfig(command=command), index=2)
        with pytest.raises(EngineLost, match="status 3: out of memory on 30002"):
            await engine.start()
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("log", [None, "missing/server.log"])
def test_a_server_that_cannot_be_run_says_why_and_leaves_no_file(
    log: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log_path = None if log is None else str(tmp_path / log)
    command = ["no-such-program" if log is None else "sh", "{port}"]

    async def main() -> None:
        for starts in (True, False):
            config = SGLangEngineConfig(command=command, log_path=log_path)
            engine = SGLangEngine(build("tiny-qwen3"), config)
            if starts:
                with pytest.raises(EngineError, match=r"cannot be run with its log.*log_path"):
                    await engine.start()
            await engine.close()

    asyncio.run(main())
    assert not list(tmp_path.iterdir())


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="{port}"):
        SGLangEngine(build("tiny-qwen3"), SGLangEngineConfig(command=["serve"]))
