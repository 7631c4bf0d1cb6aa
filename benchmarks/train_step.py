"""Times a training step of an engine on one GPU, against a loop written by hand.

    python benchmarks/train_step.py --model qwen2.5-0.5b --json train_step.json

Random weights of real shapes; rows of lognormal length (median 1,200, at most 4,096), every token
but the first trained; bfloat16 compute over float32 master weights; PPO's clip loss with its
metrics, through ``FSDPEngine.train_mini_batch``. Arms take turns, forwards and backwards. On a CPU
it runs at toy size, to see that it works.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from agentrl.algo.loss import PolicyLoss
from agentrl.algo.policy_losses import Vanilla
from agentrl.batch import Batch
from agentrl.dist import open_packed
from agentrl.dist.config import EngineConfig, Precision, Recompute
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.micro_batch import plan_micro_batches
from agentrl.dist.packed_model import Layout
from agentrl.dist.ranks import Ranks

Config = Qwen2Config | Qwen3Config
SHAPES: dict[str, Callable[[], Config]] = {
    "qwen2.5-0.5b": lambda: Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4_864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "qwen3-1.7b": lambda: Qwen3Config(
        vocab_size=151_936, hidden_size=2_048, intermediate_size=6_144, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "toy": lambda: Qwen3Config(
        vocab_size=1_000, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """How a step is taken."""

    name: str
    layout: Layout | None = None
    """In place of what the engine finds best."""
    compile: bool = False
    recompute: Recompute = Recompute.none
    by_hand: bool = False
    """The plain loop, without an engine."""
    budget: int | None = None
    """Tokens of a micro-batch where whole logits would not fit otherwise."""
    steps: int | None = None
    """Timed ones, of an arm that is slow."""


PACKED = Layout(packed=True, plain_head=True)
ARMS = (
    Arm("padded", layout=Layout(packed=False, plain_head=False), budget=8_192, steps=1),
    Arm("packed", layout=Layout(packed=True, plain_head=False), budget=8_192),
    Arm("packed+head", layout=PACKED),
    Arm("packed+head+compile", layout=PACKED, compile=True),
    Arm("same, selective", layout=PACKED, compile=True, recompute=Recompute.selective),
    Arm("same, full", layout=PACKED, compile=True, recompute=Recompute.full),
    Arm("plain loop", by_hand=True),
)


@dataclass
class Work:
    """What every arm does."""

    batch: Batch
    loss: PolicyLoss
    budget: int


@dataclass
class Result:
    """What an arm took."""

    name: str
    tokens_per_s: list[float]
    infer_tokens_per_s: float | None
    peak_gib: float
    mfu_once: float = 0.0
    mfu_square: float = 0.0


def make_work(config: Config, *, tokens: int, budget: int, longest: int, seed: int = 0) -> Work:
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        draw = float(torch.randn(1, generator=generator))
        length = min(longest, max(16, round(0.293 * longest * 2.718281828 ** (0.8 * draw))))
        lengths.append(max(2, min(length, tokens - sum(lengths))))

    def normal(length: int) -> Tensor:
        return torch.randn(length, generator=generator)

    batch = Batch.from_rows(
        {
            "ids": [
                torch.randint(0, config.vocab_size, (n,), generator=generator) for n in lengths
            ],
            "loss_mask": [torch.arange(n) > 0 for n in lengths],
            "advantages": [normal(n) for n in lengths],
            "old_logprobs": [-12 + 0.1 * normal(n) for n in lengths],
        }
    )
    trained = int(batch.tokens["loss_mask"].sum())
    batch.tokens["loss_weights"] = batch.tokens["loss_mask"].float() / trained
    return Work(batch, PolicyLoss(token_loss=Vanilla(), num_tokens=trained), budget)


@contextmanager
def _steps(arm: Arm, config: Config, work: Work, device: torch.device) -> Iterator[list[Any]]:
    """Yield what takes a training step and what scores the batch without gradients."""
    torch.manual_seed(0)
    how = {} if device.type == "cpu" else {"attn_implementation": "sdpa"}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if arm.by_hand else torch.float32, **how
        )
    if arm.by_hand:
        from plain_loop import PlainLoop

        rows = work.batch.tokens["ids"].split(work.batch.lengths.tolist())
        plan = plan_micro_batches(work.batch.lengths.tolist(), work.budget)
        loop = PlainLoop(model)
        micro_batches = [[rows[index] for index in part] for part in plan]
        yield [lambda: loop.train(micro_batches), None]
        return
    layout = arm.layout or PACKED
    with mock.patch.object(open_packed, "find_layout", lambda model: layout):
        engine = FSDPEngine(
            model,
            None,
            EngineConfig(
                lr=1e-6, precision=Precision.bf16, compile=arm.compile, recompute=arm.recompute
            ),
            ranks=Ranks.single(device),
            deterministic=False,
        )

    def train() -> None:
        found = engine.train_mini_batch(work.batch, work.loss, tokens_per_micro_batch=work.budget)
        assert found["skipped"] == 0.0

    yield [
        train,
        lambda: engine.infer_batch(
            work.batch, tokens_per_micro_batch=work.budget, fields=("logprobs",)
        ),
    ]


def time_arm(arm: Arm, config: Config, work: Work, device: torch.device, *, repeats: int) -> Result:
    on_gpu = device.type == "cuda"

    def timed(step: Callable[[], Any]) -> float:
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        return work.batch.num_tokens / (time.perf_counter() - started)

    repeats = arm.steps or repeats
    work = replace(work, budget=min(work.budget, arm.budget or work.budget))
    with _steps(arm, config, work, device) as (train, infer):
        started = time.perf_counter()
        for _ in range(1 if arm.steps else 2):
            train()
        warm_s = time.perf_counter() - started
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        rates = [timed(train) for _ in range(repeats)]
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        infer_rate = None
        if infer is not None:
            infer()
            infer_rate = statistics.median(timed(infer) for _ in range(repeats))
    print(f"# {arm.name}: {statistics.median(rates):,.0f} tokens/s, warm-up {warm_s:.0f} s")
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return Result(arm.name, rates, infer_rate, peak)


def matmul_ceiling(device: torch.device) -> float:
    """FLOP/s of a bfloat16 product of 8192^3 on random data."""
    size = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        torch.mm(left, right)
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        torch.mm(left, right)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 20 * 2 * size**3 / (time.perf_counter() - started)


def flops_per_token(config: Config, batch: Batch) -> tuple[float, float]:
    """6 P + 6 L h S (causal attention once) and 6 P + 12 L h S (the full square)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    params = sum(value.numel() for value in model.parameters())
    lengths = batch.lengths.double()
    context = float(lengths.square().sum() / lengths.sum())
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    square = config.num_hidden_layers * config.num_attention_heads * head_dim * context
    return 6 * params + 6 * square, 6 * params + 12 * square


def table(results: list[Result]) -> str:
    lines = [
        "| arm | tokens/s (min to max) | MFU once / square | peak GiB | scoring tokens/s |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        rates = result.tokens_per_s
        infer = "" if result.infer_tokens_per_s is None else f"{result.infer_tokens_per_s:,.0f}"
        lines.append(
            f"| {result.name} | {statistics.median(rates):,.0f} "
            f"({min(rates):,.0f} to {max(rates):,.0f}) "
            f"| {result.mfu_once:.1%} / {result.mfu_square:.1%} | {result.peak_gib:.1f} | {infer} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=list(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--arms", nargs="*", help="those whose names contain one of these")
    parser.add_argument("--tokens", type=int, default=131_072, help="of a mini-batch")
    parser.add_argument("--budget", type=int, default=32_768, help="tokens per micro-batch")
    parser.add_argument("--longest", type=int, default=4_096)
    parser.add_argument("--repeats", type=int, default=3, help="timed steps, in each direction")
    parser.add_argument("--once", action="store_true", help="do not take the arms backwards too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = SHAPES[args.model]()
    work = make_work(config, tokens=args.tokens, budget=args.budget, longest=args.longest)
    arms = [
        arm
        for arm in ARMS
        if not args.arms or any(arm.name == name or name in arm.name for name in args.arms)
    ]
    ceiling = matmul_ceiling(device)
    once, square = flops_per_token(config, work.batch)
    results: dict[str, Result] = {}
    for arm in arms if args.once else [*arms, *reversed(arms)]:
        torch.compiler.reset()
        found = time_arm(arm, config, work, device, repeats=args.repeats)
        if arm.name in results:
            before = results[arm.name]
            found = replace(
                found,
                tokens_per_s=before.tokens_per_s + found.tokens_per_s,
                peak_gib=max(before.peak_gib, found.peak_gib),
            )
        median = statistics.median(found.tokens_per_s)
        results[arm.name] = replace(
            found, mfu_once=median * once / ceiling, mfu_square=median * square / ceiling
        )
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"{args.model}, {work.batch.num_tokens:,} tokens in {work.batch.num_rows} rows, "
        f"micro-batches of {args.budget:,}; {name}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; matrix product {ceiling / 1e12:.0f} TFLOP/s"
    )
    print(table(list(results.values())))
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "model": args.model,
                    "tokens": work.batch.num_tokens,
                    "budget": args.budget,
                    "device": name,
                    "torch": torch.__version__,
                    "matmul_flops_per_s": ceiling,
                    "flops_per_token": [once, square],
                    "arms": [vars(result) for result in results.values()],
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
