"""Rollout through agentrl against plain vLLM, on the same requests.

Arms, each with its own replicas, one arm after the other:

* ``raw-llm``: vLLM's ``LLM``, one ``generate`` for each turn of all sessions.
* ``raw-async``: vLLM's ``AsyncLLM``, a task for each session.
* ``engine``: agentrl's ``VLLMEngine``, a task for each session.
* ``loop``: agentrl's ``AgentLoop`` over it, with an environment that answers at once.
* ``front-end``: no engine; microseconds that a token costs on its way from vLLM's core to whoever
  waits for it, in ours and in vLLM's own way.

All arms sample the same number of tokens in the same turns over the same prompts, with the sampled
token's log-probability, nothing decoded, outputs at the end of a turn only. In float32 they must
sample the same tokens; in bfloat16 the share that is equal is printed, since results there depend
on the batch. The first pass of an arm warms up; rates are those of the best pass of the others.

Run: ``python benchmarks/vllm_engine.py [--shape qwen2.5-0.5b --sessions 256 --turns 4
--turn-tokens 128 --replicas 2] [--arms raw-llm,engine,loop] [--json]``
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm_front_end import front_end
from vllm_work import MARK, Played, Session, play

from agentrl.agent.loop import AgentLoop, EpisodeRequest, LoopLimits
from agentrl.agent.renderer import Renderer
from agentrl.env.config import EnvConfig
from agentrl.env.host import EnvHosts
from agentrl.rollout.engines.config import VLLMEngineConfig
from agentrl.rollout.engines.vllm import VLLMEngine
from agentrl.testing import FakeSandboxes, make_tokenizer
from agentrl.testing.random_models import SERVED
from agentrl.tool.binding import Toolbox
from agentrl.types import Action, GenerateRequest, Generation, SamplingParams, StopReason, Task

ARMS = ("raw-llm", "raw-async", "engine", "loop", "front-end")


# ------------------------------------------------------------------ work


class AnsweringEnv:
    """Begins with a text and answers every turn at once."""

    tools = ()
    rubric = None
    opening = answer = ""

    def tasks(self, split: str) -> list[Task]:
        return []

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict]:
        return f"{seed} {self.opening}", {}

    async def step(self, action: Action) -> tuple[str, float, bool, bool, dict]:
        return self.answer, 0.0, False, False, {}

    async def tool_state(self, tool: str) -> dict[str, Any]:
        return {}

    async def anchor(self) -> None:
        return None

    async def close(self) -> None:
        return None


class LoopArm:
    """Agent loops over something that generates."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        # Bytes alone: no random turn spells a tool call, which the loop would answer.
        self.renderer = Renderer(make_tokenizer(vocab_size=260))
        AnsweringEnv.opening = "x " * (options.prompt_tokens // 2)
        AnsweringEnv.answer = "y " * (options.answer_tokens // 2)

    async def run(self, generate: Any) -> None:
        """Play every session once; ``generate`` gets each turn's request."""
        hosts = EnvHosts(EnvConfig(id="answering"), cls=AnsweringEnv)
        big = 10**9
        limits = LoopLimits(
            max_turns=self.options.turns,
            max_turn_tokens=self.options.turn_tokens,
            max_response_tokens=big,
            max_context_tokens=big,
            trajectory_timeout_s=3600.0,
        )

        async def one(index: int) -> None:
            loop = AgentLoop(
                generate=generate,
                renderer=self.renderer,
                toolbox=Toolbox([]),
                sandboxes=FakeSandboxes(),
                limits=limits,
            )
            request = EpisodeRequest(
                env_id="answering", task=Task(id="t", data={}), seed=index, group_id=str(index)
            )
            trajectory = await loop.run(await hosts.open(), request)
            assert len(trajectory.turns) == self.options.turns, trajectory.error

        await asyncio.gather(*(one(index) for index in range(self.options.sessions)))
        await hosts.close()

    def sessions(self) -> dict[str, Session]:
        """Return what the loops ask for, recorded with a generator that says nothing of its own."""
        stop = self.renderer.stop_token_ids[0]
        seen: dict[str, list[list[int]]] = {}

        async def generate(request: GenerateRequest) -> Generation:
            seen.setdefault(request.session_id, []).append(list(request.prompt_ids))
            ids = [*[200] * (self.options.turn_tokens - 1), stop]
            return generation(ids, request)

        asyncio.run(self.run(generate))
        found = {}
        for number, prompts in enumerate(seen.values()):
            pairs = zip(prompts, prompts[1:], strict=False)
            found[f"s{number}"] = Session(
                prompt=prompts[0],
                answers=[new[len(old) + self.options.turn_tokens :] for old, new in pairs],
                num_sampled=self.options.turn_tokens,
                stop_id=stop,
                seed=1000 * number,
            )
        return found


def generation(ids: list[int], request: GenerateRequest) -> Generation:
    """Return a turn that the loop takes for one that the model ended."""
    ids = [*ids[:-1], request.sampling.stop_token_ids[0]]
    count = len(ids)
    return Generation(
        ids=ids,
        logprobs=[-1.0] * count,
        policy_version=[0] * count,
        stop_reason=StopReason.STOP,
    )


def build_model(options: argparse.Namespace, vocab_size: int) -> Any:
    """Return a model with random weights, large enough to sample more than one token from."""
    config = SERVED[options.shape]().config
    config.vocab_size = max(config.vocab_size, vocab_size)
    config.dtype = options.dtype
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() and not is_cpu_build() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    return model.eval()


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the CPU build."""
    from agentrl.rollout.engines.vllm_installed import find_vllm

    return find_vllm().is_cpu


# ------------------------------------------------------------------ arms


def raw_arm(
    arm: str, options: argparse.Namespace, model_dir: Path, sessions: dict[str, Session]
) -> list[Played]:
    """Passes of plain vLLM, in as many processes as there are replicas."""
    shared = {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "max_model_len": options.max_context,
        "max_num_seqs": options.max_num_seqs,
        "gpu_memory_utilization": options.gpu_memory_fraction / options.replicas,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
    }
    if is_cpu_build():
        shared |= {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 512 << 20}
        # With chunks the CPU build dies of requests with seeds; see vllm_setup.py.
        shared |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}
    else:
        shared["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL"}
    replicas = []
    for index in range(options.replicas):
        mine = list(sessions)[index :: options.replicas]
        job = {
            "arm": arm,
            "engine": shared,
            "turns": options.turns,
            "temperature": options.temperature,
            "sessions": {name: _as_dict(sessions[name]) for name in mine},
        }
        path = model_dir / f"{arm}-{index}.json"
        path.write_text(json.dumps(job))
        program = str(Path(__file__).with_name("vllm_work.py"))
        replicas.append(
            subprocess.Popen(
                [sys.executable, program, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        _answer(replicas[-1])  # one by one: vLLM measures free memory while it starts
    try:
        return [_raw_pass(replicas) for _ in range(options.passes + 1)]
    finally:
        for process in replicas:
            assert process.stdin is not None
            process.stdin.close()
        for process in replicas:
            try:
                process.wait(timeout=60.0)
            except subprocess.TimeoutExpired:
                process.kill()


def _raw_pass(replicas: list[subprocess.Popen[str]]) -> Played:
    begin = time.perf_counter()
    for process in replicas:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    played = Played()
    for process in replicas:
        played.merge(json.loads(_answer(process)))
    played.seconds = time.perf_counter() - begin
    return played


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said: deque[str] = deque(maxlen=300)
    for line in process.stdout:
        if line.startswith(MARK):
            return line.removeprefix(MARK)
        said.append(line)
    raise RuntimeError("a plain replica ended:\n" + "".join(said))


def _as_dict(session: Session) -> dict[str, Any]:
    return {name: getattr(session, name) for name in Session.__dataclass_fields__}


async def our_arm(
    arm: str, options: argparse.Namespace, model: Any, sessions: dict[str, Session], loop: LoopArm
) -> list[Played]:
    """Passes through agentrl's engine, with or without its agent loop."""
    engines = [
        VLLMEngine(
            model,
            VLLMEngineConfig(
                max_context=options.max_context,
                max_num_seqs=options.max_num_seqs,
                gpu_memory_fraction=options.gpu_memory_fraction / options.replicas,
                dtype=options.dtype,
            ),
        )
        for _ in range(options.replicas)
    ]
    try:
        for engine in engines:  # one by one: vLLM measures free memory while it starts
            await engine.start()
        passes = []
        for number in range(options.passes + 1):
            for engine in engines:
                await engine.update_weights(model.named_parameters(), number)  # drops prefixes
            gc.collect()
            gc.freeze()
            begin = time.perf_counter()
            if arm == "engine":
                played = await _engine_pass(engines, options, sessions)
            else:
                played = await _loop_pass(engines, options, loop)
            played.seconds = time.perf_counter() - begin
            passes.append(played)
        return passes
    finally:
        for engine in engines:
            await engine.close()


async def _engine_pass(
    engines: list[VLLMEngine], options: argparse.Namespace, sessions: dict[str, Session]
) -> Played:
    places = {name: number % len(engines) for number, name in enumerate(sessions)}
    played = Played()

    async def turn_of(name: str, turn: int, prompt: list[int], session: Session) -> Any:
        sampling = SamplingParams(
            max_tokens=session.num_sampled,
            temperature=options.temperature,
            seed=session.seed + turn,
        )
        request = GenerateRequest(prompt_ids=prompt, sampling=sampling, session_id=name)
        result = await engines[places[name]].generate(request)
        return result.ids, result.num_cached_tokens or 0

    await play(sessions, turn_of, played)
    return played


async def _loop_pass(
    engines: list[VLLMEngine], options: argparse.Namespace, loop: LoopArm
) -> Played:
    places: dict[str, int] = {}
    turns: dict[str, int] = {}
    played = Played()

    async def generate(request: GenerateRequest) -> Generation:
        name = request.session_id
        place = places.setdefault(name, len(places))
        turn = turns[name] = turns.get(name, -1) + 1
        sampling = SamplingParams(
            max_tokens=request.sampling.max_tokens,
            temperature=options.temperature,
            seed=1000 * place + turn,
        )
        given = GenerateRequest(prompt_ids=request.prompt_ids, sampling=sampling, session_id=name)
        result = await engines[place % len(engines)].generate(given)
        cached = result.num_cached_tokens or 0
        prompt = len(request.prompt_ids)
        played.add(f"s{place}", turn, prompt=prompt, cached=cached, ids=result.ids)
        return generation(result.ids, request)

    await loop.run(generate)
    return played


# ------------------------------------------------------------------ running


def report(name: str, passes: list[Played], reference: Played | None) -> dict[str, Any]:
    """Return the figures of an arm."""
    best = min(passes[1:], key=lambda played: played.seconds)
    hits = {
        turn: round(best.cached_tokens[turn] / best.prompt_tokens[turn], 3)
        for turn in sorted(best.prompt_tokens)
    }
    found: dict[str, Any] = {
        "tokens": best.num_sampled,
        "seconds": [round(played.seconds, 3) for played in passes],
        "tokens_per_s": round(best.num_sampled / best.seconds, 1),
        "prefix_hit_rate_by_turn": hits,
    }
    if reference is not None:
        pairs = [
            (mine, theirs)
            for session, ids in best.ids.items()
            for mine, theirs in zip(ids, reference.ids[session], strict=True)
        ]
        found["equal_tokens"] = round(sum(a == b for a, b in pairs) / len(pairs), 4)
    print(f"{name}: {json.dumps(found)}", file=sys.stderr)
    return found


def main() -> None:
    """See the module."""
    options = arguments()
    arms = options.arms.split(",")
    if unknown := set(arms) - set(ARMS):
        raise SystemExit(f"no such arms: {sorted(unknown)}; there are {', '.join(ARMS)}")
    loop = LoopArm(options)
    sessions = loop.sessions()
    wanted = options.sessions * options.turns * options.turn_tokens
    longest = max(
        len(s.prompt) + sum(map(len, s.answers)) + options.turns * options.turn_tokens
        for s in sessions.values()
    )
    options.max_context = options.max_context or -(-longest // 64) * 64
    print(f"{wanted} tokens a pass, sessions of up to {longest} tokens", file=sys.stderr)
    results: dict[str, Any] = {}
    reference: Played | None = None
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(options, 1024)
        if any(arm.startswith("raw") for arm in arms):
            model.save_pretrained(folder)
        for arm in arms:
            if arm == "front-end":
                results[arm] = {name: round(value, 3) for name, value in front_end().items()}
                print(f"{arm}: {json.dumps(results[arm])}", file=sys.stderr)
                continue
            if arm.startswith("raw"):
                passes = raw_arm(arm, options, Path(folder), sessions)
            else:
                passes = asyncio.run(our_arm(arm, options, model, sessions, loop))
            assert all(played.num_sampled == wanted for played in passes), "other work"
            results[arm] = report(arm, passes, reference)
            reference = reference or passes[-1]
            if options.dtype == "float32":
                assert results[arm].get("equal_tokens", 1.0) == 1.0, "other tokens"
    raw = max((results[arm]["tokens_per_s"] for arm in arms if arm.startswith("raw")), default=0.0)
    ratios = {
        f"{arm} over the better raw arm": round(results[arm]["tokens_per_s"] / raw, 3)
        for arm in ("engine", "loop")
        if raw and arm in results
    }
    print(json.dumps({"options": vars(options), "arms": results, "ratios": ratios}, indent=1))


def arguments() -> argparse.Namespace:
    """Return the settings of a run."""
    assert importlib.util.find_spec("vllm"), "this benchmark needs vLLM"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arms", default="raw-llm,engine,loop")
    parser.add_argument("--shape", default="tiny-qwen3", choices=sorted(SERVED))
    parser.add_argument("--dtype", default=None, help="float32 on the CPU build, else bfloat16")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--turn-tokens", type=int, default=32)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--passes", type=int, default=2, help="after one that warms up")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="of each replica")
    parser.add_argument("--max-context", type=int, default=0, help="0: as the work needs")
    parser.add_argument("--gpu-memory-fraction", type=float, default=0.6, help="all replicas")
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if is_cpu_build() else "bfloat16")
    return options


if __name__ == "__main__":
    main()
