"""Times training on several GPUs of one host against each of them by itself.

    python benchmarks/scaling.py --ranks 2 --models qwen2.5-0.5b qwen3-1.7b --json scaling.json

Weak scaling: as many tokens per rank, whatever the number of ranks. In the arm ``alone`` every
rank trains a model of its own at the same time; in ``together`` they train one, sharded. Arms take
turns: alone, together, together, alone. Afterwards the gradient that one rank takes of a mini-batch
is compared with what the ranks take of it together. On a CPU it runs at toy size over gloo.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_step import SHAPES, Work, make_work
from transformers import AutoModelForCausalLM

from agentrl.batch import RowView
from agentrl.dist.balance import partition_rows
from agentrl.dist.config import EngineConfig, Precision
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.ranks import Ranks, group_of_one, join_ranks, leave_ranks
from agentrl.dist.sharding import full_tensor

TIMEOUT_S = 300.0


class Rank:
    """One process of the benchmark."""

    def __init__(self, directory: Path, rank: int, args: argparse.Namespace) -> None:
        on_gpu = torch.cuda.is_available()
        self.device = torch.device(f"cuda:{rank}" if on_gpu else "cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        self.directory = directory
        self.rank = rank
        self.args = args
        self.meetings = 0

    def meet(self, *, together: bool) -> Ranks:
        """Leave the group of before and enter the next one."""
        leave_ranks()
        self.meetings += 1
        if not together:
            group_of_one(self.device)
            return Ranks.single(self.device)
        return join_ranks(
            (self.directory / f"meeting-{self.meetings}").as_uri(),
            rank=self.rank,
            world_size=self.args.ranks,
            device=self.device,
            timeout_s=TIMEOUT_S,
        )

    def engine(self, model: str, ranks: Ranks, **settings: Any) -> FSDPEngine:
        """Build a model with the same random weights everywhere."""
        torch.manual_seed(0)
        with torch.device(self.device):
            module = AutoModelForCausalLM.from_config(SHAPES[model](), dtype=torch.float32)
        given: dict[str, Any] = {"lr": 1e-6, "precision": Precision.bf16} | settings
        return FSDPEngine(module, None, EngineConfig(**given), ranks=ranks, deterministic=False)

    def rate(self, model: str, *, together: bool) -> list[float]:
        """Return the tokens per second and rank of every timed step."""
        ranks = self.meet(together=together)
        torch.compiler.reset()
        engine = self.engine(model, ranks, compile=self.args.compile)
        work = self.work(model, self.args.tokens * ranks.world_size)
        mine = self.share(work, ranks)
        rates = []
        for step in range(2 + self.args.repeats):
            dist.barrier()
            self.wait()
            started = time.perf_counter()
            engine.train_mini_batch(mine, work.loss, tokens_per_micro_batch=work.budget)
            self.wait()
            seconds = time.perf_counter() - started
            if step >= 2:
                rates.append(work.batch.num_tokens / seconds / ranks.world_size)
        return rates

    def gradients(self, model: str, *, together: bool, **settings: Any) -> dict[str, torch.Tensor]:
        """Return the whole gradient of one mini-batch, as the optimizer would see it."""
        ranks = self.meet(together=together)
        engine = self.engine(model, ranks, grad_clip=0.0, **settings)
        work = self.work(model, self.args.gradient_tokens, budget=self.args.gradient_tokens // 4)
        found: dict[str, torch.Tensor] = {}

        def keep(*_: Any) -> None:
            for name, value in engine.model.named_parameters():
                found[name] = full_tensor(value.grad).cpu()

        assert engine._optimizer is not None
        engine._optimizer.register_step_pre_hook(keep)
        mine = self.share(work, ranks)
        engine.train_mini_batch(mine, work.loss, tokens_per_micro_batch=work.budget)
        return found

    def work(self, model: str, tokens: int, budget: int | None = None) -> Work:
        """Return rows of the whole mini-batch, as likely as random weights find them."""
        config = SHAPES[model]()
        work = make_work(
            config, tokens=tokens, budget=budget or self.args.budget, longest=self.args.longest
        )
        noise = torch.randn(work.batch.num_tokens, generator=torch.Generator().manual_seed(1))
        work.batch.tokens["old_logprobs"] = 0.1 * noise - math.log(config.vocab_size)
        return work

    def share(self, work: Work, ranks: Ranks) -> RowView:
        """Return this rank's rows."""
        parts = partition_rows(work.batch.lengths.tolist(), ranks.dp_size)
        return RowView(work.batch, torch.tensor(parts[ranks.dp_rank], dtype=torch.int64))

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give memory back before the next arm."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def differences(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return the relative difference of all, and the largest of a tensor.

    Tensors whose gradient is next to nothing count in the first alone.
    """
    norms = {name: float(value.double().norm()) for name, value in want.items()}
    errors = {name: float((got[name].double() - want[name].double()).norm()) for name in want}
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    whole = sum(error**2 for error in errors.values()) ** 0.5 / total
    largest = max(errors[name] / norm for name, norm in norms.items() if norm > 1e-4 * total)
    return whole, largest


def run_rank(directory: Path, rank: int, args: argparse.Namespace) -> None:
    place = Rank(directory, rank, args)
    for model in args.models:
        rates: dict[str, list[float]] = {"alone": [], "together": []}
        for arm in ("alone", "together", "together", "alone"):
            rates[arm] += place.rate(model, together=arm == "together")
            place.free()
        found: dict[str, Any] = {"model": model, "rank": rank, "rates": rates, "gradients": {}}
        for precision in Precision if model in args.gradients else ():
            alone = place.gradients(model, together=False, precision=precision)
            place.free()
            together = place.gradients(model, together=True, precision=precision)
            place.free()
            found["gradients"][str(precision)] = differences(together, alone)
        with (directory / f"found-{rank}.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
        if rank == 0:
            median = {arm: statistics.median(values) for arm, values in rates.items()}
            print(f"# {model}: {median}, gradients {found['gradients']}", flush=True)
    leave_ranks()


def report(directory: Path, ranks: int) -> list[dict[str, Any]]:
    """Print the table; return its rows."""
    by_rank = [
        [json.loads(line) for line in (directory / f"found-{rank}.jsonl").open()]
        for rank in range(ranks)
    ]
    print(
        "| model | alone, tokens/s per GPU | together, tokens/s per GPU | efficiency | gradients |"
    )
    print("|---|---|---|---|---|")
    rows = []
    for found in zip(*by_rank, strict=True):
        rates = {
            arm: [rate for one in found for rate in one["rates"][arm]]
            for arm in ("alone", "together")
        }
        alone, together = (statistics.median(values) for values in rates.values())
        gradients = found[0]["gradients"]
        said = ", ".join(
            f"{p} {whole:.1e} (worst {worst:.1e})" for p, (whole, worst) in gradients.items()
        )
        spans = {arm: f"{min(v):,.0f} to {max(v):,.0f}" for arm, v in rates.items()}
        print(
            f"| {found[0]['model']} | {alone:,.0f} ({spans['alone']}) | {together:,.0f} "
            f"({spans['together']}) | {together / alone:.3f} | {said} |"
        )
        rows.append({"model": found[0]["model"], "rates": rates, "gradients": gradients})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["toy"])
    parser.add_argument("--gradients", nargs="*", default=[], help="models whose are compared")
    parser.add_argument("--tokens", type=int, default=65_536, help="of a mini-batch, per rank")
    parser.add_argument("--budget", type=int, default=32_768, help="tokens per micro-batch")
    parser.add_argument("--gradient-tokens", type=int, default=16_384)
    parser.add_argument("--longest", type=int, default=4_096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank is not None:
        run_rank(args.directory, args.as_rank, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--directory", folder, "--as-rank"]
        processes = [
            subprocess.Popen([*command, str(rank)], env=os.environ) for rank in range(args.ranks)
        ]
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            sys.exit(f"ranks ended with {codes}")
        rows = report(Path(folder), args.ranks)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
