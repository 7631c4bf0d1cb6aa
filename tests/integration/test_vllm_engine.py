"""vLLM's CPU build behind the engine: what is its own, beyond the contract of every engine.

The engine of the module serves an untied Llama with biases and takes adapters, so that vLLM wraps
its layers; tests/contract/test_rollout_engine.py serves a tied Qwen3.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import psutil
import pytest
import torch

from agentrl.errors import EngineError, EngineLost
from agentrl.rollout.engines.config import VLLMEngineConfig
from agentrl.rollout.engines.vllm import VLLMEngine
from agentrl.testing.random_models import build
from agentrl.types import GenerateRequest, Generation, SamplingParams, StopReason

pytestmark = pytest.mark.timeout(600)
CONTEXT = 384
EOS = 7
"""Said by the model to end a text, as far as its configuration goes; it says it often."""
NUM_KILLS = 50 if os.environ.get("AGENTRL_SOAK") else 1


class Served:
    """An engine on an event loop of its own, and the model it samples."""

    def __init__(self, engine: VLLMEngine, model: Any, runner: asyncio.Runner, spoil: Path) -> None:
        self.engine, self.model, self.runner, self.spoil = engine, model, runner, spoil

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def turn(self, **how: Any) -> Generation:
        return self.run(self.engine.generate(ask(**how)))


def config(**settings: Any) -> VLLMEngineConfig:
    return VLLMEngineConfig(max_context=CONTEXT, max_num_seqs=16, deterministic=True, **settings)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("vllm")
    model = build("tiny-llama", seed=1)
    model.config.eos_token_id = EOS
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setattr(
            "agentrl.rollout.engines.vllm_setup.WORKER_EXTENSION",
            "spoiling_worker.SpoilingExtension",
        )
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setenv("AGENTRL_TEST_SPOIL", str(directory / "spoil"))
        engine = VLLMEngine(model, config(lora_rank=4, max_batched_tokens=512))
        try:
            runner.run(engine.start())
            yield Served(engine, model, runner, directory / "spoil")
        finally:
            runner.run(engine.close())


@pytest.fixture
def sound(served: Served) -> Served:
    """The engine with the weights of its model, whatever a test before did to them."""
    served.run(served.engine.update_weights(served.model.named_parameters(), 0))
    return served


def ask(prompt: int | list[int] = 40, session: str = "s", **sampling: Any) -> GenerateRequest:
    ids = [(7 * i) % 100 for i in range(prompt)] if isinstance(prompt, int) else prompt
    sampling = {"max_tokens": 24, "seed": 3} | sampling
    return GenerateRequest(prompt_ids=ids, sampling=SamplingParams(**sampling), session_id=session)


@torch.no_grad()
def logprobs_of(model: Any, prompt: list[int], ids: list[int], temperature: float) -> list[float]:
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    rows = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return rows.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def test_nothing_is_sampled_from_the_weights_that_vllm_starts_with(served: Served) -> None:
    assert served.engine.policy_version == -1
    with pytest.raises(EngineError, match="given no weights"):
        served.turn()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_an_untied_model_with_wrapped_layers(
    sound: Served, temperature: float
) -> None:
    turn = sound.turn(temperature=temperature)
    expected = logprobs_of(sound.model, list(ask().prompt_ids), turn.ids, temperature)
    assert turn.logprobs == pytest.approx(expected, abs=1e-5)


def test_the_models_own_end_of_sequence_ends_no_turn(sound: Served) -> None:
    turn = sound.turn(temperature=0.0)
    assert EOS in turn.ids[:-1]  # or nothing was tested
    assert turn.stop_reason is StopReason.LENGTH
    stopped = sound.turn(temperature=0.0, stop_token_ids=(EOS,))
    assert stopped.ids == turn.ids[: turn.ids.index(EOS) + 1]
    assert stopped.stop_reason is StopReason.STOP


def test_every_turn_reuses_the_blocks_of_the_one_before_until_weights_change(sound: Served) -> None:
    record, cached = list(ask(70).prompt_ids), []
    for turn in range(3):
        answer = sound.turn(prompt=record, session="episode", seed=turn, max_tokens=40)
        cached.append(answer.num_cached_tokens)
        record += [*answer.ids, 5, 6]
    assert cached == [0, 96, 128]  # whole blocks of 32 of 70, 112 and 154 tokens
    sound.run(sound.engine.update_weights(sound.model.named_parameters(), 1))
    assert sound.turn(prompt=record, max_tokens=1).num_cached_tokens == 0


def test_the_core_itself_has_nothing_left_after_an_abort(sound: Served) -> None:
    async def run() -> tuple[int, list[Generation]]:
        requests = [ask(session=f"s{i}", max_tokens=CONTEXT - 40) for i in range(30)]
        running = [asyncio.create_task(sound.engine.generate(item)) for item in requests]
        await asyncio.sleep(0.05)
        assert await sound.engine.abort() == 30  # 16 run, the others wait inside vLLM
        process = sound.engine._running()
        left = await process.call("drained", timeout_s=30.0, when_idle=True)
        return left, await asyncio.gather(*running)

    left, turns = sound.run(run())
    assert left == 0
    aborted = [turn for turn in turns if turn.stop_reason is StopReason.ABORT]
    whole = [turn for turn in turns if turn.stop_reason is StopReason.LENGTH]
    assert aborted and len(aborted) + len(whole) == 30
    assert all(len(turn.ids) == CONTEXT - 40 for turn in whole), "these ended before the abort came"
    assert sound.engine.num_unfinished == 0


def test_prompts_that_no_single_step_can_take_are_sampled_as_if_alone(sound: Served) -> None:
    prompts = [[(7 * i + j) % 100 for i in range(360)] for j in range(16)]
    requests = [
        ask(prompt, f"s{index}", max_tokens=4, seed=index) for index, prompt in enumerate(prompts)
    ]

    async def together() -> list[Generation]:
        return await asyncio.gather(*(sound.engine.generate(item) for item in requests))

    turns = sound.run(together())
    for index in (0, 9, 15):
        sound.run(sound.engine.update_weights(sound.model.named_parameters(), 0))
        alone = sound.run(sound.engine.generate(requests[index]))
        assert alone.ids == turns[index].ids


def test_a_parameter_that_changes_behind_our_back_is_noticed(sound: Served) -> None:
    sound.spoil.write_text("model.layers.1.mlp.down_proj.weight")
    with pytest.raises(EngineError, match=r"scrambled policy.*'model\.layers\.1\.mlp\.down_proj"):
        sound.run(sound.engine.update_weights(sound.model.named_parameters(), 1))
    with pytest.raises(EngineError, match="nothing to sample from: its last update failed"):
        sound.turn()


def test_an_engine_that_cannot_sleep_says_so(sound: Served) -> None:
    assert not sound.engine.can_sleep
    with pytest.raises(EngineError, match="the CPU build of vLLM never can"):
        sound.run(sound.engine.sleep())
    assert len(sound.turn(max_tokens=2).ids) == 2


def test_an_adapter_changes_what_is_sampled_as_in_the_model(sound: Served, tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    base = build("tiny-llama", seed=1)
    adapted = peft.get_peft_model(base, peft.LoraConfig(**settings, init_lora_weights=False))
    adapted.eval()
    before = sound.turn(temperature=0.0)
    for version in (5, 6):  # the second replaces the first
        with torch.no_grad():
            for name, value in adapted.named_parameters():
                if "lora_" in name:
                    value.normal_(0.0, 0.02 * version)
        adapted.save_pretrained(str(tmp_path / str(version)))
        sound.run(sound.engine.update_adapters(str(tmp_path / str(version)), version))
        turn = sound.turn(temperature=0.7)
        expected = logprobs_of(adapted, list(ask().prompt_ids), turn.ids, 0.7)
        assert turn.logprobs == pytest.approx(expected, abs=2e-5)
        assert (turn.policy_version[0], turn.num_cached_tokens) == (version, 0)
        assert sound.turn(temperature=0.0).logprobs != pytest.approx(before.logprobs, abs=1e-3)
    with pytest.raises(EngineError, match="no_such_folder"):
        sound.run(sound.engine.update_adapters(str(tmp_path / "no_such_folder"), 7))
    assert sound.turn().policy_version[0] == 6
    # Weights that are sent whole are what is sampled, without an adapter of earlier ones.
    sound.run(sound.engine.update_weights(sound.model.named_parameters(), 8))
    assert sound.turn(temperature=0.0) == replace(before, policy_version=[8] * 24)


@pytest.mark.timeout(60 + 60 * NUM_KILLS)
def test_a_killed_engine_loses_its_requests_at_once_and_leaves_no_process() -> None:
    async def kill_one() -> None:
        model = build("tiny-qwen2", seed=1)
        engine = VLLMEngine(model.config, config())
        await engine.start()
        await engine.update_weights(model.named_parameters(), 0)
        requests = [ask(session=f"s{i}", max_tokens=CONTEXT - 40) for i in range(20)]
        running = [asyncio.create_task(engine.generate(item)) for item in requests]
        await asyncio.sleep(0.05)
        group = [process for process in psutil.process_iter() if _group(process) == engine.pid]
        assert group  # the witness that there was something to kill
        os.kill(engine.pid, signal.SIGKILL)
        async with asyncio.timeout(10.0):
            outcomes = await asyncio.gather(*running, return_exceptions=True)
        lost = [outcome for outcome in outcomes if isinstance(outcome, EngineLost)]
        whole = [item for item in outcomes if isinstance(item, Generation)]  # of before the kill
        assert lost and len(lost) + len(whole) == 20
        assert all(len(turn.ids) == CONTEXT - 40 for turn in whole)
        assert "status -9" in str(lost[0])
        for call in (engine.generate(ask()), engine.check_health(), engine.abort()):
            with pytest.raises(EngineLost):
                await call
        await engine.close()
        assert not any(process.is_running() for process in group)

    for _ in range(NUM_KILLS):
        asyncio.run(kill_one())


def _group(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return -1
