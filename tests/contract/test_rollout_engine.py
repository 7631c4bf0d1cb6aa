"""What an engine that samples a model promises: the HF engine, vLLM on its CPU build, SGLang's API
on a stand-in for its server, and replicas behind one face.

One engine of each kind serves the whole module; every test leaves it with the weights of the model
that it was given, and nothing unfinished.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

from agentrl.errors import EngineError
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.engines.config import HFEngineConfig, VLLMEngineConfig
from agentrl.testing.random_models import build
from agentrl.types import GenerateRequest, Generation, SamplingParams, StopReason
from agentrl.weights.checksum import checksums

CONTEXT = 384
MODEL = "tiny-qwen3"
"""Tied embeddings, keys and queries with norms, two query heads to a key head."""
pytestmark = pytest.mark.timeout(300)


class Served:
    """An engine on an event loop that lives as long as the module, and the model it samples."""

    def __init__(self, engine: RolloutEngine, model: Any) -> None:
        self.engine, self.model = engine, model
        self._runner = asyncio.Runner()
        self._version = 0

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    async def update(self, model: Any) -> int:
        """Serve the weights of ``model`` from now on; returns their version."""
        self._version += 1
        await self.engine.update_weights(model.named_parameters(), self._version)
        return self._version

    async def turns(self, *requests: GenerateRequest) -> list[Generation]:
        return await asyncio.gather(*(self.engine.generate(request) for request in requests))

    def close(self) -> None:
        self.run(self.engine.close())
        self._runner.close()


def hf(model: Any) -> RolloutEngine:
    from agentrl.rollout.engines.hf import HFEngine

    return HFEngine(deepcopy(model), HFEngineConfig(max_context=CONTEXT, num_slots=16))


def vllm(model: Any) -> RolloutEngine:
    from agentrl.rollout.engines.vllm import VLLMEngine

    config = VLLMEngineConfig(max_context=CONTEXT, max_num_seqs=16, deterministic=True)
    return VLLMEngine(model, config)


def sglang(model: Any) -> RolloutEngine:
    """A server in a process of its own, with other weights until it is given these."""
    from agentrl.rollout.engines.config import SGLangEngineConfig
    from agentrl.rollout.engines.sglang import SGLangEngine

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "agentrl.testing.sglang_server", "--builder", MODEL]
    command += ["--seed", "2", "--port", "{port}", "--context-length", str(CONTEXT + 1)]
    command += ["--load-format", "dummy"]
    config = SGLangEngineConfig(command=command, port=port, max_context=CONTEXT, bucket_mb=1)
    return SGLangEngine(model, config)


def replicas(model: Any) -> RolloutEngine:
    from agentrl.rollout.serving.replica_set import ReplicaSet

    return ReplicaSet(lambda number: hf(model), 2)


@pytest.fixture(scope="module", params=[hf, replicas, sglang, vllm])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    make: Callable[[Any], RolloutEngine] = request.param
    model = build(MODEL, seed=1)
    found = Served(make(model), model)
    try:
        found.run(found.engine.start())
        found.run(found.update(model))
        yield found
    finally:
        found.close()


def ask(prompt: int | list[int] = 40, session: str = "s", **sampling: Any) -> GenerateRequest:
    ids = [(7 * i) % 100 for i in range(prompt)] if isinstance(prompt, int) else prompt
    sampling = {"max_tokens": 24, "seed": 3} | sampling
    return GenerateRequest(prompt_ids=ids, sampling=SamplingParams(**sampling), session_id=session)


@torch.no_grad()
def logprobs_of(model: Any, prompt: list[int], ids: list[int], temperature: float) -> list[float]:
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    rows = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return rows.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


@torch.no_grad()
def greedy_ids(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def moved(model: Any, seed: int) -> Any:
    """Return a copy of the model after a step of training, so to say."""
    generator = torch.Generator().manual_seed(seed)
    other = deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return other


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_the_model_after_temperature(
    served: Served, temperature: float
) -> None:
    requests = [ask(20 + i, f"s{i}", seed=i, temperature=temperature) for i in range(4)]
    turns = served.run(served.turns(*requests))
    for request, turn in zip(requests, turns, strict=True):
        assert len(turn.ids) == len(turn.logprobs) == len(turn.policy_version) == 24
        assert (turn.stop_reason, set(turn.policy_version)) == (
            StopReason.LENGTH,
            {served.engine.policy_version},
        )
        expected = logprobs_of(served.model, list(request.prompt_ids), turn.ids, temperature)
        assert turn.logprobs == pytest.approx(expected, abs=1e-5)


def test_a_seed_fixes_a_turn_and_another_one_changes_it(served: Served) -> None:
    first, again, other, later = served.run(
        served.turns(
            ask(session="a"),
            ask(session="b"),
            ask(session="c", seed=4),
            ask(session="d", first_index=8),
        )
    )
    assert first.ids == again.ids != other.ids
    # SGLang's noise goes by the position in the session, which is the same here: so a turn that
    # goes on, whose position is another, needs no number.
    by_position = type(served.engine).__name__ == "SGLangEngine"
    assert (first.ids == later.ids) == by_position
    (later_again,) = served.run(served.turns(ask(first_index=8)))
    assert later.ids == later_again.ids


def test_a_turn_ends_with_its_stop_token(served: Served) -> None:
    (free,) = served.run(served.turns(ask()))
    stop = next(token for token in free.ids[3:] if token not in free.ids[:3])
    at = free.ids.index(stop)
    (stopped,) = served.run(served.turns(ask(stop_token_ids=(stop, 200))))
    assert (stopped.ids, stopped.stop_reason) == (free.ids[: at + 1], StopReason.STOP)


def test_a_second_turn_finds_the_first_in_the_cache(served: Served) -> None:
    prompt = [(11 * i) % 97 for i in range(80)]
    (first,) = served.run(served.turns(ask(prompt, "cached", temperature=0.0)))
    follow = [*prompt, *first.ids, 1, 2, 3]
    (second,) = served.run(served.turns(ask(follow, "cached", temperature=0.0)))
    assert second.ids == greedy_ids(served.model, follow, len(second.ids))
    assert second.num_cached_tokens is None or second.num_cached_tokens >= 64


@pytest.mark.parametrize(
    "request_",
    [
        ask([]),
        ask(CONTEXT),
        ask([101]),
        ask([-1]),
        ask(temperature=-1.0),
        ask(top_p=0.0),
        ask(max_tokens=0),
        ask(seed=-1),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    served: Served, request_: GenerateRequest
) -> None:
    with pytest.raises(EngineError, match="session 's'"):
        served.run(served.engine.generate(request_))


def test_aborted_requests_return_with_what_they_have(served: Served) -> None:
    async def run() -> list[Generation]:
        long = [ask(session=f"s{i}", max_tokens=CONTEXT - 40) for i in range(3)]
        running = [asyncio.create_task(served.engine.generate(request)) for request in long]
        await asyncio.sleep(0.02)
        assert await served.engine.abort("s0") == 1
        first = await running[0]
        assert await served.engine.abort() == 2
        assert await served.engine.abort("nobody") == 0
        return [first, *await asyncio.gather(*running[1:])]

    turns = served.run(run())
    (whole,) = served.run(served.turns(ask(max_tokens=CONTEXT - 40)))
    for turn in turns:
        assert turn.stop_reason is StopReason.ABORT
        assert len(turn.ids) < CONTEXT - 40
        assert turn.ids == whole.ids[: len(turn.ids)]
        assert len(turn.ids) == len(turn.logprobs) == len(turn.policy_version)
    assert served.run(served.engine.abort()) == 0


def test_a_cancelled_request_makes_room_at_once(served: Served) -> None:
    async def run() -> Generation:
        for _ in range(20):  # more than fit at once, so that a leak would block the last
            task = asyncio.create_task(served.engine.generate(ask(max_tokens=CONTEXT - 40)))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return await served.engine.generate(ask(max_tokens=2))

    assert len(served.run(run()).ids) == 2


def test_one_request_at_a_time_per_session(served: Served) -> None:
    async def run() -> None:
        first = asyncio.create_task(served.engine.generate(ask(max_tokens=CONTEXT - 40)))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="has a request running"):
            await served.engine.generate(ask())
        await served.engine.end_session("s")
        assert (await first).stop_reason is StopReason.ABORT

    served.run(run())
    served.run(served.engine.end_session("unknown"))


def test_greedy_turns_are_those_of_the_new_model_after_each_update(served: Served) -> None:
    prompt = list(range(40))
    seen = set()
    for seed in range(5):
        model = moved(served.model, seed)
        version = served.run(served.update(model))
        (turn,) = served.run(served.turns(ask(prompt, temperature=0.0)))
        assert turn.ids == greedy_ids(model, prompt, len(turn.ids))
        assert turn.policy_version == [version] * len(turn.ids)
        seen.add(tuple(turn.ids))
    assert len(seen) > 1  # or a stale engine would have passed
    served.run(served.update(served.model))


def test_an_update_says_what_is_served(served: Served) -> None:
    model = moved(served.model, 7)
    found = served.run(served.engine.update_weights(model.named_parameters(), 77))
    assert (found.version, served.engine.policy_version) == (77, 77)
    assert found.sums == checksums(model.named_parameters())
    specs = {spec.name: (spec.shape, spec.dtype) for spec in served.engine.weight_specs()}
    assert specs == {
        name: (tuple(value.shape), "float32") for name, value in model.named_parameters()
    }
    served.run(served.update(served.model))


def test_an_update_waits_for_what_is_unfinished(served: Served) -> None:
    model = moved(served.model, 8)

    async def run() -> tuple[Generation, Generation, int]:
        before = served.engine.policy_version
        old = asyncio.create_task(served.engine.generate(ask(session="old", max_tokens=200)))
        await asyncio.sleep(0.02)
        update = asyncio.create_task(served.update(model))
        await asyncio.sleep(0)
        new = asyncio.create_task(served.engine.generate(ask(session="new", temperature=0.0)))
        version = await update
        assert (await old).policy_version == [before] * 200
        return await old, await new, version

    old, new, version = served.run(run())
    assert old.logprobs == pytest.approx(
        logprobs_of(served.model, list(ask().prompt_ids), old.ids, 1.0), abs=1e-5
    )
    assert set(new.policy_version) <= {version, version - 1}
    served.run(served.update(served.model))


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "not finite"])
def test_wrong_weights_are_refused_by_name_and_right_ones_taken_after_them(
    served: Served, fault: str
) -> None:
    params = {name: value.detach().clone() for name, value in served.model.named_parameters()}
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del params[name]
    elif fault == "unknown":
        params["model.layers.9.mlp.up_proj.weight"] = params[name]
    elif fault == "shape":
        params[name] = params[name].t()
    else:
        params[name][3, 5] = torch.nan
    with pytest.raises(EngineError, match=r"weight update: .*mlp\.up_proj\.weight"):
        served.run(served.engine.update_weights(params.items(), 99))
    served.run(served.update(served.model))
    (turn,) = served.run(served.turns(ask(temperature=0.0)))
    assert turn.ids == greedy_ids(served.model, list(ask().prompt_ids), len(turn.ids))


def test_a_healthy_engine_says_nothing_and_a_closed_one_refuses(served: Served) -> None:
    served.run(served.engine.check_health())
    served.run(served.engine.close())
    served.run(served.engine.close())
    with pytest.raises(EngineError, match="closed"):
        served.run(served.engine.generate(ask()))
