"""The arms of ``vllm_engine.py``: what plays a pass.

Replicas of all arms live beside each other. Between its passes an arm does nothing: plain vLLM
waits for a line, ours for a request.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from vllm_loop import LoopWork, generation
from vllm_work import MARK, Played, Session, play

from agentrl.rollout.engines.config import VLLMEngineConfig
from agentrl.rollout.engines.vllm import VLLMEngine
from agentrl.rollout.engines.vllm_installed import find_vllm
from agentrl.types import GenerateRequest, Generation, SamplingParams


class PlainReplicas:
    """Plain vLLM (``LLM`` or ``AsyncLLM``), a process for each replica.

    Args:
        arm: ``raw-llm`` or ``raw-async``.
        model_dir: of the model, as transformers saves one; jobs are written there too.
    """

    def __init__(
        self,
        arm: str,
        options: argparse.Namespace,
        model_dir: Path,
        sessions: dict[str, Session],
    ) -> None:
        self._processes = [
            _start_plain(_write_job(arm, index, options, model_dir, sessions))
            for index in range(options.replicas)
        ]

    def wait_until_ready(self) -> None:
        """Return when every replica can play."""
        for process in self._processes:
            _answer(process)

    async def play(self, number: int) -> Played:
        """Play every session once, with no prefix cached."""
        begin = time.perf_counter()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        played = Played()
        for process in self._processes:
            played.merge(json.loads(_answer(process)))
        played.seconds = time.perf_counter() - begin
        return played

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=60.0)
            except subprocess.TimeoutExpired:
                process.kill()


def _write_job(
    arm: str,
    index: int,
    options: argparse.Namespace,
    model_dir: Path,
    sessions: dict[str, Session],
) -> Path:
    engine: dict[str, Any] = {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "max_model_len": options.max_context,
        "max_num_seqs": options.max_num_seqs,
        # Replicas start at once, so none can go by what is free on the device.
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": options.cache_mb << 20,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
    }
    if find_vllm().is_cpu:
        engine |= {"enforce_eager": True, "block_size": 32}
        # With chunks the CPU build dies of requests with seeds; see vllm_setup.py.
        engine |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}
    else:
        engine["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    job = {
        "arm": arm,
        "engine": engine,
        "turns": options.turns,
        "temperature": options.temperature,
        "sessions": {
            name: {field: getattr(sessions[name], field) for field in Session.__dataclass_fields__}
            for name in list(sessions)[index :: options.replicas]
        },
    }
    path = model_dir / f"{arm}-{index}.json"
    path.write_text(json.dumps(job))
    return path


def _start_plain(job: Path) -> subprocess.Popen[str]:
    program = str(Path(__file__).with_name("vllm_work.py"))
    return subprocess.Popen(
        [sys.executable, program, str(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said: deque[str] = deque(maxlen=300)
    for line in process.stdout:
        if line.startswith(MARK):
            return line.removeprefix(MARK)
        said.append(line)
    raise RuntimeError("a plain replica ended:\n" + "".join(said))


class OurReplicas:
    """agentrl's ``VLLMEngine``: the replicas of the arms ``engine`` and ``loop``."""

    def __init__(self, model: Any, options: argparse.Namespace) -> None:
        self._model = model
        self._engines = [
            VLLMEngine(
                model,
                VLLMEngineConfig(
                    max_context=options.max_context,
                    max_num_seqs=options.max_num_seqs,
                    gpu_memory_fraction=options.gpu_memory_fraction / options.replicas,
                    cpu_cache_mb=options.cache_mb,
                    dtype=options.dtype,
                ),
            )
            for _ in range(options.replicas)
        ]

    async def start(self) -> None:
        """Start them, one by one: vLLM measures free memory meanwhile."""
        for engine in self._engines:
            await engine.start()

    async def prepare(self, number: int) -> None:
        """Give them weights, which drops the prefixes of the pass before."""
        for engine in self._engines:
            await engine.update_weights(self._model.named_parameters(), number)
        gc.collect()
        gc.freeze()

    async def generate(self, place: int, request: GenerateRequest) -> Generation:
        """Have the replica of a session generate a turn."""
        return await self._engines[place % len(self._engines)].generate(request)

    async def close(self) -> None:
        """Stop them."""
        for engine in self._engines:
            await engine.close()


class EngineArm:
    """The engine alone, a task for each session."""

    def __init__(
        self, replicas: OurReplicas, options: argparse.Namespace, sessions: dict[str, Session]
    ) -> None:
        self._replicas, self._options, self._sessions = replicas, options, sessions

    async def play(self, number: int) -> Played:
        """Play every session once, with no prefix cached."""
        await self._replicas.prepare(number)
        places = {name: place for place, name in enumerate(self._sessions)}
        played = Played()

        async def turn_of(name: str, turn: int, prompt: list[int], session: Session) -> Any:
            sampling = SamplingParams(
                max_tokens=session.num_sampled,
                temperature=self._options.temperature,
                seed=session.seed + turn,
            )
            request = GenerateRequest(prompt_ids=prompt, sampling=sampling, session_id=name)
            result = await self._replicas.generate(places[name], request)
            return result.ids, result.num_cached_tokens or 0

        begin = time.perf_counter()
        await play(self._sessions, turn_of, played)
        played.seconds = time.perf_counter() - begin
        return played


class LoopArm:
    """The agent loop over it, with an environment that answers at once."""

    def __init__(self, replicas: OurReplicas, options: argparse.Namespace, work: LoopWork) -> None:
        self._replicas, self._options, self._work = replicas, options, work

    async def play(self, number: int) -> Played:
        """Play every session once, with no prefix cached."""
        await self._replicas.prepare(number)
        places: dict[str, int] = {}
        turns: dict[str, int] = {}
        played = Played()

        async def generate(request: GenerateRequest) -> Generation:
            name = request.session_id
            place = places.setdefault(name, len(places))
            turn = turns[name] = turns.get(name, -1) + 1
            sampling = SamplingParams(
                max_tokens=request.sampling.max_tokens,
                temperature=self._options.temperature,
                seed=1000 * place + turn,
            )
            given = GenerateRequest(
                prompt_ids=request.prompt_ids, sampling=sampling, session_id=name
            )
            result = await self._replicas.generate(place, given)
            cached = result.num_cached_tokens or 0
            prompt = len(request.prompt_ids)
            played.add(f"s{place}", turn, prompt=prompt, cached=cached, ids=result.ids)
            return generation(result.ids, request)

        begin = time.perf_counter()
        await self._work.run(generate)
        played.seconds = time.perf_counter() - begin
        return played


Arm = PlainReplicas | EngineArm | LoopArm
