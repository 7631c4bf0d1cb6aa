"""The HF engine against one-at-a-time, plain batched ``generate``, and the machine.

Work: 64 sessions of 3 to 6 turns; a prompt of 60 to 100 tokens, 4 to 40 sampled tokens a turn
(lognormal, median 12), 8 to 22 tokens of tool answer between turns; a Qwen3 of 0.36 M parameters
with random weights. Every arm samples the same number of tokens, and only those count: what
``generate`` computes beyond a session's length, until its longest neighbour is done, does not.

Arms, interleaved forwards and backwards:

* ``ours-1``, ``ours-8``, ``ours-64``: that many sessions at once, 64 in all.
* ``ours-64-loose``: the same with ``deterministic=False``; the difference is the price.
* ``generate-64``: ``transformers.generate`` on all living sessions, left-padded, turn by turn.
* ``episodes-256-*``: 256 sessions with a little Python and a pipe's round trip between turns (what
  an agent loop does); the steps in the event loop, each on an executor, or in bursts (ours).
* ``floor-64``: nothing but the matrix products of decode steps at 64 rows.

Rates are per second of wall clock, and per CPU second of this process for machines that are shared.

Run: ``python benchmarks/hf_engine.py [--repeats 3] [--threads 1] [--only ARM] [--json]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from agentrl.rollout.engines.config import HFEngineConfig
from agentrl.rollout.engines.hf import HFEngine
from agentrl.rollout.engines.hf_scheduler import Scheduler
from agentrl.seeding import derive_seed
from agentrl.types import GenerateRequest, SamplingParams

VOCAB, MAX_CONTEXT, NUM_SLOTS = 640, 512, 64


@dataclass(slots=True, frozen=True)
class Session:
    """What one session will do, fixed beforehand."""

    prompt: list[int]
    num_sampled: list[int]
    answers: list[list[int]]


def sessions(num: int, seed: int = 0) -> list[Session]:
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randrange(low, high))]

    made = []
    for _ in range(num):
        turns = rng.randrange(3, 7)
        lengths = [max(4, min(40, round(rng.lognormvariate(2.5, 0.5)))) for _ in range(turns)]
        made.append(Session(ids(60, 101), lengths, [ids(8, 23) for _ in range(turns)]))
    return made


def build_model() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 96, "intermediate_size": 256}
    heads: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}
    config = Qwen3Config(**sizes, **heads, vocab_size=VOCAB, tie_word_embeddings=True)
    return Qwen3ForCausalLM(config).eval()


# ------------------------------------------------------------------ ours


async def play(
    engine: HFEngine, name: str, work: Session, between: Callable[[], Coroutine[Any, Any, None]]
) -> int:
    ids, total = list(work.prompt), 0
    for turn, (count, answer) in enumerate(zip(work.num_sampled, work.answers, strict=True)):
        sampling = SamplingParams(max_tokens=count, seed=derive_seed(name, turn))
        request = GenerateRequest(prompt_ids=ids, sampling=sampling, session_id=name)
        result = await engine.generate(request)
        total += len(result.ids)
        await between()
        ids += result.ids + answer
    await engine.end_session(name)
    return total


async def nothing() -> None:
    return None


async def ours(engine: HFEngine, works: list[Session], concurrency: int) -> int:
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int) -> int:
        async with gate:
            return await play(engine, f"s{index}", works[index], nothing)

    return sum(await asyncio.gather(*(one(index) for index in range(len(works)))))


class PipeTools:
    """Echo processes, as sandboxes are: one line in, one line out."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._idle: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()
        self._all = processes
        for process in processes:
            self._idle.put_nowait(process)

    @classmethod
    async def start(cls, num: int = 16) -> PipeTools:
        pipe = asyncio.subprocess.PIPE
        return cls(
            [
                await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)
                for _ in range(num)
            ]
        )

    async def turn(self) -> None:
        sum(range(5000))  # about what parsing a turn costs
        process = await self._idle.get()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"x" * 200 + b"\n")
        await process.stdout.readline()
        self._idle.put_nowait(process)

    async def close(self) -> None:
        for process in self._all:
            process.terminate()
            await process.wait()


class InlineEngine(HFEngine):
    """For comparison: a step inside the event loop, then one pass of the loop."""

    async def _advance(self, scheduler: Scheduler) -> None:
        self._deliver(scheduler.step())
        await asyncio.sleep(0)


class ExecutorEngine(HFEngine):
    """For comparison: every step is handed to the worker thread and awaited."""

    async def _advance(self, scheduler: Scheduler) -> None:
        loop = asyncio.get_running_loop()
        self._deliver(await loop.run_in_executor(self._pool, scheduler.step))
        await asyncio.sleep(0)


# ------------------------------------------------------------------ transformers


def generate(model: Any, works: list[Session]) -> int:
    """All living sessions in one left-padded batch, one call a turn."""
    histories, useful = [list(work.prompt) for work in works], 0
    for turn in range(max(len(work.num_sampled) for work in works)):
        alive = [i for i, work in enumerate(works) if turn < len(work.num_sampled)]
        width = max(len(histories[i]) for i in alive)
        ids = torch.tensor([[0] * (width - len(histories[i])) + histories[i] for i in alive])
        mask = torch.tensor(
            [[0] * (width - len(histories[i])) + [1] * len(histories[i]) for i in alive]
        )
        longest = max(works[i].num_sampled[turn] for i in alive)
        settings = GenerationConfig(
            max_new_tokens=longest, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None
        )
        output = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        for row, i in enumerate(alive):
            count = works[i].num_sampled[turn]
            sampled = output[row, width : width + count].tolist()
            useful += len(sampled)
            histories[i] += sampled + works[i].answers[turn]
    return useful


def floor(model: Any, steps: int = 200, rows: int = NUM_SLOTS, length: int = 160) -> int:
    """Nothing but a decode step's products, weights fused, cache in place."""
    weights = [
        torch.randn(shape)
        for _ in model.model.layers
        for shape in ((160, 96), (96, 96), (512, 96), (96, 256))
    ]
    head = torch.randn(VOCAB, 96)
    inputs = {size: torch.randn(rows, size) for size in (96, 256)}
    query = torch.randn(rows, 4, 32)
    caches = [torch.randn(2, rows, length, 32) for _ in model.model.layers]
    with torch.inference_mode():
        for _ in range(steps):
            for weight in weights:
                torch.mm(inputs[weight.shape[1]], weight.t())
            for keys, values in caches:
                torch.bmm(torch.bmm(query, keys.transpose(1, 2)), values)
            torch.mm(inputs[96], head.t())
    return steps * rows


# ------------------------------------------------------------------ running


async def started(kind: type[HFEngine] = HFEngine, **settings: Any) -> HFEngine:
    config = HFEngineConfig(num_slots=NUM_SLOTS, max_context=MAX_CONTEXT, **settings)
    engine = kind(build_model(), config)
    await engine.start()
    return engine


async def measure(repeats: int, only: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Useful tokens per second of every arm and repeat: wall clock, and CPU."""
    works, many = sessions(64), sessions(256, seed=1)
    exact, loose = await started(), await started(deterministic=False)
    inline, executor = await started(InlineEngine), await started(ExecutorEngine)
    tools, model = await PipeTools.start(), build_model()

    async def episodes(engine: HFEngine) -> int:
        runs = (play(engine, f"e{i}", work, tools.turn) for i, work in enumerate(many))
        return sum(await asyncio.gather(*runs))

    async def plain(work: Callable[[], int]) -> int:
        return work()

    expected = sum(sum(work.num_sampled) for work in works)
    expected_many = sum(sum(work.num_sampled) for work in many)
    arms: dict[str, tuple[Callable[[], Coroutine[Any, Any, int]], int | None]] = {
        "ours-1": (lambda: ours(exact, works, 1), expected),
        "ours-8": (lambda: ours(exact, works, 8), expected),
        "ours-64": (lambda: ours(exact, works, 64), expected),
        "ours-64-loose": (lambda: ours(loose, works, 64), expected),
        "generate-64": (lambda: plain(lambda: generate(model, works)), expected),
        "floor-64": (lambda: plain(lambda: floor(model)), None),
        "episodes-256-burst": (lambda: episodes(exact), expected_many),
        "episodes-256-inline": (lambda: episodes(inline), expected_many),
        "episodes-256-executor": (lambda: episodes(executor), expected_many),
    }
    arms = {name: arm for name, arm in arms.items() if only in name}
    rates: dict[str, list[float]] = {name: [] for name in arms}
    cpu_rates: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name in list(arms) if repeat % 2 else list(arms)[::-1]:
            run, wanted = arms[name]
            begin, begin_cpu = time.perf_counter(), time.process_time()
            tokens = await run()
            seconds, cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
            assert wanted is None or tokens == wanted, (name, tokens, wanted)
            if repeat:  # the first is for warming up
                rates[name].append(tokens / seconds)
                cpu_rates[name].append(tokens / cpu_s)
        print(f"pass {repeat} of {repeats} done", file=sys.stderr)
    for engine in (exact, loose, inline, executor):
        await engine.close()
    await tools.close()
    return rates, cpu_rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="arms whose name contains this")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rates, cpu_rates = asyncio.run(measure(arguments.repeats, arguments.only))
    median = {name: statistics.median(values) for name, values in rates.items()}
    median_cpu = {name: statistics.median(values) for name, values in cpu_rates.items()}
    ratios = {
        text: median[ours] / median[other]
        for text, ours, other in (
            ("64 over one at a time (wanted: 5)", "ours-64", "ours-1"),
            ("64 over plain generate (wanted: 2)", "ours-64", "generate-64"),
            ("deterministic over loose", "ours-64", "ours-64-loose"),
            ("share of the products' floor", "ours-64", "floor-64"),
        )
        if ours in median and other in median
    }
    if arguments.json:
        report = {"threads": arguments.threads, "tokens_per_s": rates, "ratios": ratios}
        report["tokens_per_cpu_s"] = cpu_rates
        print(json.dumps(report | {"torch": torch.__version__}))
        return
    print(f"torch {torch.__version__}, {arguments.threads} thread(s); sampled tokens per second")
    print(f"{'arm':24} {'wall':>8} {'min':>8} {'max':>8} {'CPU':>8}")
    for name, values in rates.items():
        low, high = min(values), max(values)
        print(f"{name:24} {median[name]:8.0f} {low:8.0f} {high:8.0f} {median_cpu[name]:8.0f}")
    for name, value in ratios.items():
        print(f"{name:36} {value:6.2f}")


if __name__ == "__main__":
    main()
