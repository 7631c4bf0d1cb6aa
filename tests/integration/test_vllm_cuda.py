"""vLLM's CUDA build behind the engine: what no CPU can show."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from agentrl.errors import EngineError
from agentrl.rollout.engines.config import VLLMEngineConfig
from agentrl.rollout.engines.vllm import VLLMEngine
from agentrl.testing.random_models import build
from agentrl.types import GenerateRequest, Generation, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
CONTEXT = 512  # the models have as many positions
SHAPES = ["tiny-qwen3", "tiny-llama"]


class Served:
    """An engine on an event loop of its own, and the model it samples."""

    def __init__(self, engine: VLLMEngine, model: Any, runner: asyncio.Runner) -> None:
        self.engine, self.model, self.runner = engine, model, runner

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def turn(self, **how: Any) -> Generation:
        return self.run(self.engine.generate(ask(**how)))

    def update(self, version: int) -> None:
        self.run(self.engine.update_weights(self.model.named_parameters(), version))


def open_engine(model: Any, **settings: Any) -> Iterator[Served]:
    with asyncio.Runner() as runner:
        settings = {"max_context": CONTEXT, "gpu_memory_fraction": 0.05} | settings
        engine = VLLMEngine(model, VLLMEngineConfig(**settings))
        try:
            runner.run(engine.start())
            yield Served(engine, model, runner)
        finally:
            runner.run(engine.close())


@pytest.fixture(scope="module", params=SHAPES)
def exact(request: pytest.FixtureRequest) -> Iterator[Served]:
    """In float32, with kernels whose results do not depend on the batch."""
    yield from open_engine(build(request.param, seed=1).cuda(), deterministic=True)


@pytest.fixture(scope="module")
def fast() -> Iterator[Served]:
    """In bfloat16, with adapters, and memory that can be given back."""
    model = build("tiny-llama", seed=1).to("cuda", torch.bfloat16)
    yield from open_engine(model, sleep=True, lora_rank=4)


def ask(session: str = "s", num_prompt: int = 40, **sampling: Any) -> GenerateRequest:
    sampling = {"max_tokens": 24, "seed": 3} | sampling
    prompt = [(7 * i) % 100 for i in range(num_prompt)]
    return GenerateRequest(
        prompt_ids=prompt, sampling=SamplingParams(**sampling), session_id=session
    )


@torch.no_grad()
def logits_of(model: Any, ids: list[int], num_prompt: int = 40) -> torch.Tensor:
    """Return what the model says of each token of a turn after the prompt of `ask`: [T, V]."""
    prompt = list(ask(num_prompt=num_prompt).prompt_ids)
    whole = torch.tensor([prompt + ids], device="cuda")
    return model(whole).logits[0, len(prompt) - 1 : -1].float().cpu()


def logprobs_of(model: Any, ids: list[int], num_prompt: int = 40) -> torch.Tensor:
    rows = torch.log_softmax(logits_of(model, ids, num_prompt), dim=-1)
    return rows.gather(1, torch.tensor(ids)[:, None])[:, 0]


def test_greedy_answers_are_those_of_the_model_after_each_of_five_updates(exact: Served) -> None:
    seen = set()
    for version in range(5):
        with torch.no_grad():
            for value in exact.model.parameters():
                value.add_(torch.randn_like(value) * 0.05)
        exact.update(version)
        turn = exact.turn(temperature=0.0)
        assert turn.ids == logits_of(exact.model, turn.ids).argmax(-1).tolist()
        expected = logprobs_of(exact.model, turn.ids)
        assert turn.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        seen.add(tuple(turn.ids))
    assert len(seen) == 5  # or the updates changed nothing


def test_a_request_gives_the_same_tokens_whatever_is_sampled_beside_it(exact: Served) -> None:
    async def among(count: int) -> Generation:
        requests = [ask(f"s{i}", seed=3 + i, max_tokens=24 + i) for i in range(count)]
        turns = await asyncio.gather(*(exact.engine.generate(request) for request in requests))
        return turns[0]

    exact.update(7)
    alone = exact.run(among(1))
    for count in (2, 31):
        exact.update(7)  # forgets prefixes
        assert exact.run(among(count)) == alone


def test_log_probabilities_in_bfloat16_are_near_those_of_the_model(fast: Served) -> None:
    fast.update(0)
    turn = fast.turn(max_tokens=200)
    gap = (torch.tensor(turn.logprobs) - logprobs_of(fast.model, turn.ids)).abs()
    assert gap.mean() < 0.05
    fast.run(fast.engine.update_weights(build("tiny-llama", seed=2).cuda().named_parameters(), 1))
    other = fast.turn(max_tokens=200)
    gap = (torch.tensor(other.logprobs) - logprobs_of(fast.model, other.ids)).abs()
    assert gap.mean() > 0.5  # or the comparison sees nothing


@pytest.mark.parametrize("num_prompt", [3, 40, 130, 300, 480])
def test_prompts_of_any_length_are_computed_whole(fast: Served, num_prompt: int) -> None:
    fast.update(num_prompt)
    turn = fast.turn(num_prompt=num_prompt, max_tokens=16)
    expected = logprobs_of(fast.model, turn.ids, num_prompt)
    assert turn.logprobs == pytest.approx(expected.tolist(), abs=0.3)  # bfloat16; noise is nats off


def test_turns_that_begin_while_others_are_decoded_are_computed_whole(fast: Served) -> None:
    async def staggered() -> list[tuple[int, Generation]]:
        async def one(index: int) -> tuple[int, Generation]:
            await asyncio.sleep(0.01 * index)
            length = 20 + 29 * (index % 12)
            request = ask(f"s{index}", num_prompt=length, seed=index, max_tokens=60)
            return length, await fast.engine.generate(request)

        return await asyncio.gather(*(one(index) for index in range(48)))

    fast.update(1)
    for length, turn in fast.run(staggered()):
        expected = logprobs_of(fast.model, turn.ids, length)
        assert turn.logprobs == pytest.approx(expected.tolist(), abs=0.5)


def test_an_adapter_changes_what_is_sampled_as_in_the_model(fast: Served, tmp_path: Path) -> None:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    base = build("tiny-llama", seed=1).to("cuda", torch.bfloat16)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, peft.LoraConfig(**settings, init_lora_weights=False))
    fast.update(0)
    plain = fast.turn(temperature=0.0)
    for version in (5, 6):  # the second replaces the first
        with torch.no_grad():
            for name, value in adapted.named_parameters():
                if "lora_" in name:
                    value.normal_(0.0, 0.03 * version)
        adapted.save_pretrained(str(tmp_path / str(version)))
        fast.run(fast.engine.update_adapters(str(tmp_path / str(version)), version))
        turn = fast.turn(max_tokens=200)
        sampled = torch.tensor(turn.logprobs)
        assert (sampled - logprobs_of(adapted, turn.ids)).abs().mean() < 0.05
        assert (sampled - logprobs_of(fast.model, turn.ids)).abs().mean() > 0.1
        assert turn.policy_version[0] == version
    fast.update(8)
    assert fast.turn(temperature=0.0) == replace(plain, policy_version=[8] * 24)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_asleep_gives_memory_back_and_wakes_as_it_was(fast: Served, level: int) -> None:
    fast.update(0)
    before = fast.turn(temperature=0.0)
    free = torch.cuda.mem_get_info()[0]
    fast.run(fast.engine.sleep(level))
    freed = torch.cuda.mem_get_info()[0] - free
    assert freed > 2 << 30  # of the 7 GB that it takes
    with pytest.raises(EngineError, match="asleep"):
        fast.turn()
    fast.run(fast.engine.wake())
    if level == 2:
        with pytest.raises(EngineError, match="forgot its weights"):
            fast.turn()
        fast.update(0)
    assert fast.turn(temperature=0.0) == before
