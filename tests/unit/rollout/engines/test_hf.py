"""The HF engine as a rollout engine: contract, limits, life and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from agentrl.errors import ConfigError, EngineError, EngineLost
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.engines.config import HFEngineConfig
from agentrl.rollout.engines.hf import HFEngine
from agentrl.testing.random_models import BUILDERS, VOCAB, build
from agentrl.types import GenerateRequest, Generation, SamplingParams, StopReason
from agentrl.weights.checksum import checksums

Body = Callable[[HFEngine], Awaitable[Any]]


def request(
    prompt: list[int], session: str = "s", *, max_tokens: int = 8, **how: Any
) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, **how)
    return GenerateRequest(prompt_ids=prompt, sampling=sampling, session_id=session)


def with_engine(body: Body, *, model: str = "qwen3", seed: int = 0, **config: Any) -> Any:
    async def main() -> Any:
        settings = {"num_slots": 4, "max_context": 128, **config}
        engine = HFEngine(build(model, seed), HFEngineConfig(**settings), policy_version=3)
        await engine.start()
        try:
            return await body(engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(main(), timeout=60))


def recomputed(model: Any, prompt: list[int], ids: list[int], temperature: float) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("name", list(BUILDERS))
def test_logprobs_equal_a_full_forward_of_transformers(name: str) -> None:
    async def body(engine: HFEngine) -> list[tuple[list[int], Generation]]:
        turns, prompt = [], list(range(40))
        for turn in range(3):
            answer = await engine.generate(
                request(prompt, max_tokens=12, temperature=0.8, seed=turn)
            )
            turns.append((prompt, answer))
            prompt = [*prompt, *answer.ids, 1, 2, 3, 4, 5]
        return turns

    for prompt, answer in with_engine(body, model=name):
        expected = recomputed(build(name), prompt, answer.ids, 0.8)
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)
        assert len(answer.ids) == len(answer.policy_version) == 12


def test_half_precision_stays_near_full_precision() -> None:
    async def body(engine: HFEngine) -> Generation:
        return await engine.generate(request(list(range(40)), max_tokens=12))

    answer = with_engine(body, dtype="bfloat16")
    expected = recomputed(build(), list(range(40)), answer.ids, 1.0)
    assert answer.logprobs == pytest.approx(expected, abs=0.1)


def test_it_is_a_rollout_engine() -> None:
    engine: RolloutEngine = HFEngine(build())
    assert engine.policy_version == 0


def test_stop_tokens_end_a_turn_and_are_part_of_it() -> None:
    async def body(engine: HFEngine) -> tuple[Generation, Generation, Generation]:
        free = await engine.generate(request([1, 2, 3], "a", max_tokens=20, seed=5))
        stop = free.ids[4]
        stopped = await engine.generate(
            request([1, 2, 3], "b", max_tokens=20, seed=5, stop_token_ids=(90, stop))
        )
        # The last token allowed may itself be the stop token: that is a stop, not a cut.
        count = len(stopped.ids)
        exact = await engine.generate(
            request([1, 2, 3], "c", max_tokens=count, seed=5, stop_token_ids=(stop,))
        )
        return free, stopped, exact

    free, stopped, exact = with_engine(body)
    assert free.stop_reason is StopReason.LENGTH and len(free.ids) == 20
    assert stopped.stop_reason is StopReason.STOP
    assert stopped.ids == free.ids[: len(stopped.ids)] and len(stopped.ids) <= 5
    assert stopped.policy_version == [3] * len(stopped.ids)
    assert exact.stop_reason is StopReason.STOP


@pytest.mark.parametrize("cut", [1, 7])
def test_a_turn_that_was_cut_goes_on_as_if_it_had_not_been(cut: int) -> None:
    async def body(engine: HFEngine) -> tuple[Generation, Generation]:
        prompt = list(range(20))
        whole = await engine.generate(request(prompt, "a", max_tokens=10, seed=5))
        rest = await engine.generate(
            request(prompt + whole.ids[:cut], "b", max_tokens=10 - cut, seed=5, first_index=cut)
        )
        return whole, rest

    whole, rest = with_engine(body)
    assert rest.ids == whole.ids[cut:] and rest.logprobs == whole.logprobs[cut:]


def test_what_the_cache_still_held_of_a_prompt_is_told() -> None:
    async def body(engine: HFEngine) -> tuple[Generation, Generation]:
        first = await engine.generate(request(list(range(20)), "a", max_tokens=4))
        second = await engine.generate(request([*range(20), *first.ids, 7], "a", max_tokens=4))
        return first, second

    first, second = with_engine(body)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 23)


def test_health_is_that_of_a_running_loop() -> None:
    async def body(engine: HFEngine) -> None:
        await engine.check_health()
        await engine.close()
        with pytest.raises(EngineLost, match="closed"):
            await engine.check_health()

    with_engine(body)


def test_one_token_prompts_and_one_token_answers_work() -> None:
    async def body(engine: HFEngine) -> Generation:
        return await engine.generate(request([1], max_tokens=1))

    assert len(with_engine(body).ids) == 1


def test_a_context_may_be_used_up_to_the_last_token() -> None:
    async def body(engine: HFEngine) -> Generation:
        return await engine.generate(request(list(range(100)), max_tokens=28))

    assert len(with_engine(body).ids) == 28


@pytest.mark.parametrize(
    ("prompt", "how", "says"),
    [
        (list(range(100)), {"max_tokens": 29}, r"100 prompt tokens \+ 29 max_tokens exceed.*128"),
        ([], {}, "prompt is empty"),
        ([1.5], {}, "whole numbers"),
        ([[1], [2, 3]], {}, "whole numbers"),
        ([5, VOCAB], {}, "vocabulary 0..100"),
        ([5, -1], {}, "vocabulary"),
        ([5], {"max_tokens": 0}, "max_tokens=0"),
        ([5], {"temperature": -1.0}, "temperature=-1.0"),
        ([5], {"temperature": float("nan")}, "temperature=nan"),
        ([5], {"top_p": 0.0}, "top_p=0.0"),
        ([5], {"top_k": -2}, "top_k=-2"),
        ([5], {"seed": -1}, "seed=-1"),
        ([5], {"stop_token_ids": (-1,)}, "stop_token_ids"),
        ([5], {"first_index": -1}, "first_index=-1"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    prompt: list[Any], how: dict[str, Any], says: str
) -> None:
    async def body(engine: HFEngine) -> Generation:
        with pytest.raises(EngineError, match=says):
            await engine.generate(request(prompt, **how))
        return await engine.generate(request([1, 2]))

    assert len(with_engine(body).ids) == 8


def test_a_session_serves_one_request_at_a_time() -> None:
    async def body(engine: HFEngine) -> None:
        first = asyncio.create_task(engine.generate(request([1, 2])))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="has a request running"):
            await engine.generate(request([1, 2]))
        assert len((await first).ids) == 8

    with_engine(body)


def test_later_turns_and_shared_prompts_are_not_prefilled_again() -> None:
    async def body(engine: HFEngine) -> None:
        prompt = list(range(50))
        answer = await engine.generate(request(prompt, "a", max_tokens=10))
        assert engine.stats.prefilled == 49
        # The last sampled token was never fed, so it is prefilled with the tool's answer.
        await engine.generate(request([*prompt, *answer.ids, 7, 8, 9], "a"))
        assert engine.stats.prefilled == 49 + 3
        await asyncio.gather(
            *(engine.generate(request(prompt, f"other-{i}", seed=i)) for i in range(3))
        )
        assert engine.stats.prefilled == 49 + 3
        await engine.end_session("a")
        await engine.generate(request([*prompt[:40], 99, 98], "new"))
        assert engine.stats.prefilled == 49 + 3 + 1

    with_engine(body)


def test_a_group_that_arrives_at_once_prefills_its_prompt_once() -> None:
    async def body(engine: HFEngine) -> None:
        prompts = [list(range(60)), list(range(60)), [*range(30), 99, 98, 97], list(range(60))]
        await asyncio.gather(
            *(engine.generate(request(ids, f"s{i}", seed=i)) for i, ids in enumerate(prompts))
        )
        assert engine.stats.prefilled == 59 + 2

    with_engine(body)


def test_displaced_sessions_come_back_without_prefill() -> None:
    async def body(engine: HFEngine) -> None:
        prompts = {f"s{i}": [i] * 20 for i in range(9)}
        answers = await asyncio.gather(
            *(engine.generate(request(ids, name)) for name, ids in prompts.items())
        )
        done = engine.stats.prefilled
        for (name, ids), answer in zip(prompts.items(), answers, strict=True):
            await engine.generate(request([*ids, *answer.ids, 1], name))
        assert engine.stats.prefilled == done + 9

    with_engine(body)


def test_cancelling_frees_the_slot_and_the_session() -> None:
    async def body(engine: HFEngine) -> Generation:
        tasks = [
            asyncio.create_task(engine.generate(request([i], f"s{i}", max_tokens=100)))
            for i in range(6)
        ]
        for _ in range(5):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended)
        again = await engine.generate(request([0], "s0", max_tokens=100))
        fresh = await engine.generate(request([0], "fresh", max_tokens=100))
        assert again == fresh
        assert engine.stats.decoded < 6 * 100
        return again

    assert len(with_engine(body).ids) == 100


def test_abort_returns_what_there_is() -> None:
    async def body(engine: HFEngine) -> list[Generation]:
        tasks = [
            asyncio.create_task(engine.generate(request([i], f"s{i}", max_tokens=120)))
            for i in range(6)
        ]
        while engine.stats.decoded < 20:
            await asyncio.sleep(0)
        assert await engine.abort("unknown") == 0
        assert await engine.abort("s1") == 1
        assert (await tasks[1]).stop_reason is StopReason.ABORT
        assert await engine.abort() == 5
        return await asyncio.gather(*tasks)

    results = with_engine(body)
    assert {one.stop_reason for one in results} == {StopReason.ABORT}
    assert 0 < len(results[0].ids) < 120
    assert len(results[0].ids) == len(results[0].logprobs) == len(results[0].policy_version)


def test_ending_a_session_is_idempotent_and_aborts_its_request() -> None:
    async def body(engine: HFEngine) -> Generation:
        await engine.end_session("never seen")
        task = asyncio.create_task(engine.generate(request([1], "a", max_tokens=120)))
        for _ in range(4):
            await asyncio.sleep(0)
        await engine.end_session("a")
        await engine.end_session("a")
        return await task

    assert with_engine(body).stop_reason is StopReason.ABORT


# ------------------------------------------------------------------ weights


def trained(name: str, seed: int = 1) -> list[tuple[str, torch.Tensor]]:
    return [(key, value.detach()) for key, value in build(name, seed).named_parameters()]


@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied", "qwen2", "llama", "gpt2"])
def test_updated_weights_are_those_of_a_new_engine(name: str) -> None:
    prompt = list(range(30))

    async def update(engine: HFEngine) -> Generation:
        await engine.generate(request(prompt, "a"))
        served = await engine.update_weights(trained(name), version=4)
        assert engine.policy_version == served.version == 4
        assert served.sums == checksums(trained(name))
        specs = {spec.name: (spec.shape, spec.dtype) for spec in engine.weight_specs()}
        assert specs == {key: (tuple(v.shape), "float32") for key, v in trained(name)}
        return await engine.generate(request(prompt, "a", seed=9))

    async def fresh(engine: HFEngine) -> Generation:
        return await engine.generate(request(prompt, "a", seed=9))

    updated, expected = with_engine(update, model=name), with_engine(fresh, model=name, seed=1)
    assert (updated.ids, updated.logprobs) == (expected.ids, expected.logprobs)
    assert updated.policy_version == [4] * 8


def test_tied_weights_may_come_under_both_names_but_must_agree() -> None:
    async def body(engine: HFEngine) -> None:
        params = dict(trained("qwen3"))
        params["lm_head.weight"] = params["model.embed_tokens.weight"].clone()
        await engine.update_weights(params.items(), version=4)
        params["lm_head.weight"] = params["lm_head.weight"] + 1
        with pytest.raises(EngineError, match="tied but differ"):
            await engine.update_weights(params.items(), version=5)
        del params["model.embed_tokens.weight"]
        await engine.update_weights(params.items(), version=6)

    with_engine(body)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "nan", "twice"])
def test_a_bad_update_is_refused_whole(name: str, damage: str) -> None:
    async def body(engine: HFEngine) -> None:
        before = await engine.generate(request([1, 2, 3], "a", seed=1))
        params = trained(name)
        last, value = params.pop()
        if damage == "unknown":
            params.append((last, value))
            params.append(("model.unheard_of", value))
        elif damage == "shape":
            params.append((last, value[:-1]))
        elif damage == "nan":
            params.append((last, torch.full_like(value, float("nan"))))
        elif damage == "twice":
            params.extend([(last, value), (last, value)])
        with pytest.raises(EngineError, match="weight update"):
            await engine.update_weights(params, version=9)
        after = await engine.generate(request([1, 2, 3], "b", seed=1))
        assert after == before and engine.policy_version == 3

    with_engine(body, model=name)


def test_an_update_waits_for_running_requests_and_holds_new_ones() -> None:
    async def body(engine: HFEngine) -> tuple[Generation, Generation]:
        running = asyncio.create_task(engine.generate(request([1], "a", max_tokens=60)))
        await asyncio.sleep(0)
        update = asyncio.create_task(engine.update_weights(trained("qwen3"), version=4))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(request([1], "b", max_tokens=5)))
        await update
        return await running, await late

    running, late = with_engine(body)
    assert running.policy_version == [3] * 60
    assert late.policy_version == [4] * 5


def test_an_update_that_cannot_drain_fails_at_its_deadline() -> None:
    async def body(engine: HFEngine) -> None:
        task = asyncio.create_task(engine.generate(request([1], "a", max_tokens=120)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match=r"still unfinished after 0\.001 s"):
            await engine.update_weights(trained("qwen3"), version=4)
        assert (await task).policy_version == [3] * 120
        assert engine.policy_version == 3

    with_engine(body, drain_timeout_s=0.001)


# ------------------------------------------------------------------ life


def test_sleep_refuses_requests_and_wake_serves_the_same() -> None:
    async def body(engine: HFEngine) -> None:
        before = await engine.generate(request([1, 2, 3], "a"))
        await engine.sleep()
        await engine.sleep()
        with pytest.raises(EngineError, match="asleep"):
            await engine.generate(request([1, 2, 3], "a"))
        await engine.wake()
        await engine.wake()
        assert await engine.generate(request([1, 2, 3], "a")) == before
        task = asyncio.create_task(engine.generate(request([1], "b")))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="1 requests are unfinished"):
            await engine.sleep()
        await task

    with_engine(body)


def test_weights_may_be_updated_while_asleep() -> None:
    async def body(engine: HFEngine) -> None:
        await engine.sleep()
        await engine.update_weights(trained("qwen3"), version=4)
        await engine.wake()
        assert (await engine.generate(request([1]))).policy_version == [4] * 8

    with_engine(body)


def test_close_fails_unfinished_requests() -> None:
    async def body(engine: HFEngine) -> None:
        tasks = [
            asyncio.create_task(engine.generate(request([1], f"s{i}", max_tokens=120)))
            for i in range(8)
        ]
        await asyncio.sleep(0.01)
        await engine.close()
        await engine.close()
        for task in tasks:
            with pytest.raises(EngineError, match="closed"):
                await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request([1]))
        await engine.end_session("s0")

    with_engine(body)


def test_close_frees_an_update_that_waits_and_who_waits_for_it() -> None:
    async def body(engine: HFEngine) -> None:
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(engine.generate(request([1], "a", max_tokens=120)))
        ]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(engine.update_weights(trained("qwen3"), version=4)))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(engine.generate(request([1], "b"))))
        await asyncio.sleep(0)
        await engine.close()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineError) and "closed" in str(outcome)

    with_engine(body)


def test_the_number_of_threads_is_given_back_to_the_trainer() -> None:
    async def body(engine: HFEngine) -> None:
        plain, seen = engine._runner.decode, []  # pyright: ignore

        def watched(*args: Any) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return plain(*args)

        engine._runner.decode = watched  # pyright: ignore
        await engine.generate(request([1]))
        assert set(seen) == {3}
        assert torch.get_num_threads() == before

    before = torch.get_num_threads()
    with_engine(body, num_threads=3)


def test_an_engine_that_was_not_started_says_so() -> None:
    async def body() -> None:
        engine = HFEngine(build())
        with pytest.raises(EngineError, match="not started"):
            await engine.generate(request([1]))
        await engine.close()

    asyncio.run(body())


def test_a_step_that_breaks_fails_every_request_and_the_engine() -> None:
    async def body(engine: HFEngine) -> None:
        def explode(*_: Any) -> torch.Tensor:
            raise RuntimeError("out of memory")

        engine._runner.decode = explode  # pyright: ignore
        tasks = [engine.generate(request([1], f"s{i}")) for i in range(6)]
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineError) and "out of memory" in str(outcome)
        with pytest.raises(EngineError, match="out of memory"):
            await engine.generate(request([1]))
        with pytest.raises(EngineError, match="out of memory"):
            await engine.update_weights(trained("qwen3"), version=4)

    with_engine(body)


def test_logits_that_are_not_finite_fail_their_request_only() -> None:
    async def body(engine: HFEngine) -> None:
        plain = engine._runner.decode  # pyright: ignore

        def damaged(ids: Any, *rest: Any) -> torch.Tensor:
            logits = plain(ids, *rest)
            logits[torch.from_numpy(ids) == 50] = float("nan")
            return logits

        engine._runner.decode = damaged  # pyright: ignore
        good, bad = await asyncio.gather(
            engine.generate(request([1], "good", max_tokens=1)),
            engine.generate(request([50], "bad", max_tokens=1)),
            return_exceptions=True,
        )
        assert isinstance(good, Generation)
        assert isinstance(bad, EngineError) and "not finite" in str(bad)

    with_engine(body)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_slots": 0},
        {"num_threads": 0},
        {"max_context": 0},
        {"dtype": "floaty"},
        {"drain_timeout_s": 0.0},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(settings))}="):
        HFEngine(build(), HFEngineConfig(**settings))
