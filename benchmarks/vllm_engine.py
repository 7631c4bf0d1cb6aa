"""Rollout through agentrl against plain vLLM, on the same requests.

Arms, whose replicas live beside each other and play in turns, so that what the machine does
meanwhile meets all of them:

* ``raw-llm``: vLLM's ``LLM``, one ``generate`` for each turn of all sessions.
* ``raw-async``: vLLM's ``AsyncLLM``, a task for each session.
* ``engine``: agentrl's ``VLLMEngine``, a task for each session.
* ``loop``: agentrl's ``AgentLoop`` over the same replicas, an environment that answers at once.
* ``front-end``: no engine; microseconds that a token costs on its way from vLLM's core to whoever
  waits for it, in ours and in vLLM's own way.

All arms sample the same number of tokens in the same turns over the same prompts, with the sampled
token's log-probability, nothing decoded, outputs at the end of a turn only. In float32 they must
sample the same tokens; in bfloat16 the share that is equal is printed, since results there depend
on the batch. The first pass of an arm warms up; rates and ratios are medians of the others.

Run: ``python benchmarks/vllm_engine.py [--shape qwen2.5-0.5b --sessions 256 --turns 4
--turn-tokens 128 --replicas 2] [--arms raw-llm,engine,loop]``
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm_arms import Arm, EngineArm, LoopArm, OurReplicas, PlainReplicas
from vllm_front_end import front_end
from vllm_loop import LoopWork
from vllm_work import Played, Session

from agentrl.rollout.engines.vllm_installed import find_vllm
from agentrl.testing.random_models import SERVED

PLAIN = ("raw-llm", "raw-async")
ARMS = (*PLAIN, "engine", "loop", "front-end")


def build_model(options: argparse.Namespace, vocab_size: int) -> Any:
    """Return a model with random weights, large enough to sample more than one token from."""
    config = SERVED[options.shape]().config
    config.vocab_size = max(config.vocab_size, vocab_size)
    config.dtype = options.dtype
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available() and not find_vllm().is_cpu
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    return model.eval()


@asynccontextmanager
async def open_arms(
    names: list[str], options: argparse.Namespace, work: LoopWork, sessions: dict[str, Session]
) -> AsyncIterator[dict[str, Arm]]:
    """Start the replicas of all arms; plain ones at the same time."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model = build_model(options, 1024)
        arms: dict[str, Arm] = {}
        plain = [name for name in names if name in PLAIN]
        if plain:
            model.save_pretrained(folder)
        for name in plain:
            replicas = PlainReplicas(name, options, Path(folder), sessions)
            stack.callback(replicas.close)
            arms[name] = replicas
        for name in plain:
            began = time.perf_counter()
            arms[name].wait_until_ready()  # pyright: ignore[reportAttributeAccessIssue]
            print(f"{name} ready after {time.perf_counter() - began:.0f} s", file=sys.stderr)
        if "engine" in names or "loop" in names:
            ours = OurReplicas(model, options)
            stack.push_async_callback(ours.close)
            await ours.start()
            arms["engine"] = EngineArm(ours, options, sessions)
            arms["loop"] = LoopArm(ours, options, work)
        yield {name: arms[name] for name in names}


async def play_in_turns(
    names: list[str], options: argparse.Namespace, work: LoopWork, sessions: dict[str, Session]
) -> dict[str, list[Played]]:
    """Play one pass of every arm, and again; the first is to warm up."""
    passes: dict[str, list[Played]] = {name: [] for name in names}
    async with open_arms(names, options, work, sessions) as arms:
        for number in range(options.passes + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                played = await arms[name].play(number)
                print(f"pass {number} of {name}: {played.seconds:.2f} s", file=sys.stderr)
                passes[name].append(played)
    return passes


def report(passes: list[Played], reference: Played | None) -> dict[str, Any]:
    """Return the figures of an arm."""
    seconds = [played.seconds for played in passes]
    last = passes[-1]
    found: dict[str, Any] = {
        "tokens": last.num_sampled,
        "seconds": [round(value, 3) for value in seconds],
        "tokens_per_s": round(last.num_sampled / statistics.median(seconds[1:]), 1),
        "prefix_hit_rate_by_turn": {
            turn: round(last.cached_tokens[turn] / last.prompt_tokens[turn], 3)
            for turn in sorted(last.prompt_tokens)
        },
    }
    if reference is not None:
        pairs = [
            (mine, theirs)
            for session, ids in last.ids.items()
            for mine, theirs in zip(ids, reference.ids[session], strict=True)
        ]
        found["equal_tokens"] = round(sum(a == b for a, b in pairs) / len(pairs), 4)
    return found


def ratios(passes: dict[str, list[Played]]) -> dict[str, float]:
    """Return ours over the plain arms: medians over rounds of the ratio within a round."""
    found = {}
    for plain in (name for name in passes if name in PLAIN):
        for ours in (name for name in passes if name not in PLAIN):
            pairs = zip(passes[plain][1:], passes[ours][1:], strict=True)
            within = [theirs.seconds / mine.seconds for theirs, mine in pairs]
            found[f"{ours} over {plain}"] = round(statistics.median(within), 3)
    return found


def main() -> None:
    """See the module."""
    options = arguments()
    arms = options.arms.split(",")
    if unknown := set(arms) - set(ARMS):
        raise SystemExit(f"no such arms: {sorted(unknown)}; there are {', '.join(ARMS)}")
    work = LoopWork(options)
    sessions = work.sessions()
    wanted = options.sessions * options.turns * options.turn_tokens
    longest = max(
        len(s.prompt) + sum(map(len, s.answers)) + options.turns * options.turn_tokens
        for s in sessions.values()
    )
    options.max_context = options.max_context or -(-longest // 64) * 64
    print(f"{wanted} tokens a pass, sessions of up to {longest} tokens", file=sys.stderr)
    results: dict[str, Any] = {}
    if "front-end" in arms:
        arms.remove("front-end")
        results["front-end"] = {name: round(value, 3) for name, value in front_end().items()}
    passes = asyncio.run(play_in_turns(arms, options, work, sessions)) if arms else {}
    reference: Played | None = None
    for name, found in passes.items():
        assert all(played.num_sampled == wanted for played in found), f"{name} did other work"
        results[name] = report(found, reference)
        reference = reference or found[-1]
        if options.dtype == "float32":
            assert results[name].get("equal_tokens", 1.0) == 1.0, f"{name} sampled other tokens"
    shown = {"options": vars(options), "arms": results, "ratios": ratios(passes)}
    print(json.dumps(shown, indent=1))


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
    parser.add_argument("--replicas", type=int, default=1, help="of each arm")
    parser.add_argument("--passes", type=int, default=2, help="after one that warms up")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="of each replica")
    parser.add_argument("--max-context", type=int, default=0, help="0: as the work needs")
    parser.add_argument("--cache-mb", type=int, default=None, help="KV cache of a plain replica")
    parser.add_argument("--gpu-memory-fraction", type=float, default=0.3, help="all of ours")
    options = parser.parse_args()
    on_cpu = find_vllm().is_cpu
    options.dtype = options.dtype or ("float32" if on_cpu else "bfloat16")
    options.cache_mb = options.cache_mb or (512 if on_cpu else 16384)
    return options


if __name__ == "__main__":
    main()
