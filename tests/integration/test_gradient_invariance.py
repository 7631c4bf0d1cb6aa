"""The gradient of a mini-batch does not depend on how it is cut, ordered, padded or spread.

Every loss under every aggregation, with KL, entropy bonus and importance weights, through a small
model: in one process over micro-batches, orders and padding; and by an engine that is sharded over
two processes. This file is also the program of those processes.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algo.aggregate import AGGREGATIONS, denominators, token_weights
from agentrl.algo.loss import LOSSES, PolicyLoss, PreparedLoss, make_loss
from agentrl.batch import Batch
from agentrl.dist.config import EngineConfig
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.packed_model import PackedModel
from agentrl.dist.ranks import Ranks, join_ranks, leave_ranks
from agentrl.dist.scoring import TokenScorer
from agentrl.dist.sharding import full_tensor
from agentrl.testing.random_models import VOCAB, build

TOLERANCE = 1e-6
"""Norm of a difference of gradients over the norm of the gradient."""
DEADLINE_S = 120.0
LENGTHS = [9, 14, 6, 3, 17, 11]
SESSIONS = [0, 0, 1, 2, 3, 4]  # the first two rows are segments of one session
DUMMY_LENGTHS = [23, 2]
UNTRAINED_ROW = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "dro": {"beta": 0.3},
    "gspo": {"clip_low": 0.05, "clip_high": 0.05},  # some rows are clipped, some are not
    "clip_cov": {"share": 0.1, "cov_low": 0.1},
    "kl_cov": {"share": 0.1},
    "dppo_tv": {"tv_low": 0.004, "tv_high": 0.004},
    "dppo_kl": {"kl_low": 0.002, "kl_high": 0.002},
}
CASES = list(itertools.product(LOSSES.names(), AGGREGATIONS))
ENGINE_CASES = [case for case in CASES if case[1] in ("token-mean", "turn-mean")]
"""What engines are tried with: of an aggregation they only see the weights."""

ONE_PROCESS: dict[str, list[list[int]]] = {
    "one row at a time": [[0], [1], [2], [3], [4], [5]],
    "another order": [[5, 2, 0, 4, 1, 3]],
    "another order and cut": [[4, 1], [3], [5, 0, 2]],
}
TWO_RANKS: dict[str, tuple[list[int], list[int]]] = {
    "half each": ([0, 2, 4], [1, 3, 5]),  # the segments of session 0 on different ranks
    "uneven": ([4], [0, 1, 2, 3, 5]),
    "an empty rank": ([], [0, 1, 2, 3, 4, 5]),
    "a rank without a trained token": ([UNTRAINED_ROW], [0, 1, 2, 4, 5]),
}


def _model() -> Any:
    """A small model in float32; at half its usual weights rounding leaves a margin."""
    model = build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.5)
    return model


def _mini_batch(model: Any, *, dummy_lengths: Sequence[int] = ()) -> Batch:
    """Rows of two turns, with all that losses read; dummies are rows that train nothing."""
    generator = torch.Generator().manual_seed(0)

    def noise(length: int) -> Tensor:
        return torch.randn(length, generator=generator)

    rows: dict[str, list[Tensor]] = {}
    for index, length in enumerate([*LENGTHS, *dummy_lengths]):
        turn = torch.arange(length) * 2 // length
        mask = (noise(length) < 0.7) & (torch.arange(length) > 1)
        if index == UNTRAINED_ROW or index >= len(LENGTHS):
            mask[:] = False
        fields = {
            "ids": torch.randint(0, VOCAB, (length,), generator=generator),
            "loss_mask": mask,
            "turn": torch.where(mask, turn + 2 * (index == 1), -1),
            "advantages": 2 * noise(length),
            "old_noise": 0.4 * noise(length),
            "ref_noise": 0.4 * noise(length),
            "is_weights": noise(length).exp(),
        }
        for name, value in fields.items():
            rows.setdefault(name, []).append(value)
    sessions = torch.tensor([*SESSIONS, *(10 + i for i in range(len(dummy_lengths)))])
    batch = Batch.from_rows(rows, {"session": sessions})
    # Row by row, so that these inputs are the same bits however the mini-batch is laid out.
    scorer = TokenScorer(PackedModel(model), temperature=1.0)
    with torch.no_grad():
        parts = [scorer(batch.select([row]), fields=("logprobs",)) for row in range(batch.num_rows)]
    present = torch.cat([part["logprobs"] for part in parts])
    batch.tokens["old_logprobs"] = present + batch.tokens.pop("old_noise")
    batch.tokens["ref_logprobs"] = present + batch.tokens.pop("ref_noise")
    _put_weights(batch)
    _put_choices(batch, present)
    return batch


def _put_weights(batch: Batch) -> None:
    """Add the weights of every aggregation, once over the whole mini-batch."""
    mask, turn = batch.tokens["loss_mask"], batch.tokens["turn"]
    sessions = batch.rows["session"][batch.row_of_token]
    totals = denominators(mask, sessions, turn)
    for mode in AGGREGATIONS:
        batch.tokens[f"loss_weights/{mode}"] = token_weights(
            mask, sessions, turn, mode, totals, norm_tokens=16
        )


def _put_choices(batch: Batch, present: Tensor) -> None:
    """Add the tokens that losses choose, once over the whole mini-batch."""
    mask = batch.tokens["loss_mask"]
    for name in LOSSES.names():
        loss = make_loss(name, SETTINGS.get(name, {}))
        if isinstance(loss, PreparedLoss):
            found = loss.prepare(
                present[mask],
                batch.tokens["advantages"][mask],
                old_logprobs=batch.tokens["old_logprobs"][mask],
                generator=torch.Generator().manual_seed(0),
            )
            for field, value in found.items():
                assert bool(value.any())
                whole = torch.zeros(batch.num_tokens, dtype=value.dtype)
                batch.tokens[f"{name}/{field}"] = whole.masked_scatter(mask, value)


def _case(name: str, mode: str, batch: Batch, num_tokens: int) -> tuple[PolicyLoss, Batch]:
    """Return the loss, and the batch with the fields of that loss and aggregation."""
    prefix = f"{name}/"
    chosen = {
        field.removeprefix(prefix): value
        for field, value in batch.tokens.items()
        if field.startswith(prefix)
    }
    weights = {"loss_weights": batch.tokens[f"loss_weights/{mode}"]}
    loss = PolicyLoss(
        token_loss=make_loss(name, SETTINGS.get(name, {})),
        num_tokens=num_tokens,
        extra=tuple(chosen),
        entropy_coef=0.01,
        kl_coef=0.02,
        kl_kind="k3+",
    )
    return loss, Batch(batch.cu_seqlens, batch.tokens | chosen | weights, batch.rows)


def _gradients(model: Any, batch: Batch, parts: Sequence[Sequence[int]]) -> Tensor:
    """Gradients of all cases, added up over micro-batches: [cases, parameters]."""
    parameters = list(model.parameters())
    num_tokens = int(batch.tokens["loss_mask"].sum())
    total = torch.zeros(len(CASES), sum(p.numel() for p in parameters))
    scorer = TokenScorer(PackedModel(model), temperature=1.0)
    for rows in parts:
        part = batch.select(rows)
        scores = scorer(part, fields=("logprobs", "entropy"))
        for index, (name, mode) in enumerate(CASES):
            loss_fn, inputs = _case(name, mode, part, num_tokens)
            loss, _ = loss_fn(scores, inputs)
            found = torch.autograd.grad(loss, parameters, retain_graph=True)
            total[index] += torch.cat([gradient.flatten() for gradient in found])
    return total


@pytest.fixture(scope="module")
def model() -> Any:
    return _model()


@pytest.fixture(scope="module")
def whole(model: Any) -> Tensor:
    """Gradients of the mini-batch in one piece."""
    return _gradients(model, _mini_batch(model), [range(len(LENGTHS))])


@pytest.fixture(scope="module", autouse=True)
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Any]]]:
    """Two processes, started before the other tests so that they work beside them."""
    directory = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(directory)]
    processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in (0, 1)]
    try:
        yield directory, processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def two_ranks(ranks: tuple[Path, list[Any]]) -> dict[str, Tensor]:
    """Gradients that an engine over two processes takes, each with a part of the rows."""
    directory, processes = ranks
    assert [process.wait(timeout=DEADLINE_S) for process in processes] == [0, 0]
    return torch.load(directory / "gradients.pt")


def _assert_equal(got: Tensor, want: Tensor, case: str) -> None:
    assert float(want.norm()) > 1e-4, f"{case}: there is no gradient to compare"
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error <= TOLERANCE, f"{case}: relative error {error:.1e}"


@pytest.mark.parametrize("layout", ONE_PROCESS)
def test_micro_batches_and_order(model: Any, whole: Tensor, layout: str) -> None:
    found = _gradients(model, _mini_batch(model), ONE_PROCESS[layout])
    for index, (name, mode) in enumerate(CASES):
        _assert_equal(found[index], whole[index], f"{name}, {mode}")


def test_dummy_rows_and_longer_padding(model: Any, whole: Tensor) -> None:
    padded = _mini_batch(model, dummy_lengths=DUMMY_LENGTHS)
    assert padded.to_padded("ids").shape == (8, 23)
    found = _gradients(model, padded, [[6, *range(len(LENGTHS)), 7]])
    for index, (name, mode) in enumerate(CASES):
        _assert_equal(found[index], whole[index], f"{name}, {mode}")


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_two_ranks(two_ranks: dict[str, Tensor], whole: Tensor, layout: str) -> None:
    for found, (name, mode) in zip(two_ranks[layout], ENGINE_CASES, strict=True):
        _assert_equal(found, whole[CASES.index((name, mode))], f"{name}, {mode}")


@pytest.mark.parametrize("tokens_per_micro_batch", [1, 30, 10_000])
def test_the_engine_takes_the_same_gradient(
    model: Any, whole: Tensor, tokens_per_micro_batch: int
) -> None:
    engine = FSDPEngine(model, None, EngineConfig(lr=0.0, grad_clip=0.0), ranks=Ranks.single("cpu"))
    batch = _mini_batch(model, dummy_lengths=DUMMY_LENGTHS)
    gradients: dict[str, Tensor] = {}

    def keep(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradients[name] = parameter.grad.flatten().clone()

    hooks = [
        value.register_post_accumulate_grad_hook(lambda p, name=name: keep(name, p))
        for name, value in model.named_parameters()
    ]
    num_tokens = int(batch.tokens["loss_mask"].sum())
    for name, mode in ENGINE_CASES:
        want = whole[CASES.index((name, mode))]
        loss, inputs = _case(name, mode, batch, num_tokens)
        metrics = engine.train_mini_batch(
            inputs, loss, tokens_per_micro_batch=tokens_per_micro_batch
        )
        found = torch.cat([gradients[key] for key, _ in model.named_parameters()])
        _assert_equal(found, want, f"{name}, {mode}")
        assert metrics["grad_norm"] == pytest.approx(float(want.norm()), rel=1e-4)
    for hook in hooks:
        hook.remove()


def test_the_cases_differ(whole: Tensor) -> None:
    """Losses and aggregations that gave one gradient would make the tests above say little."""
    same = {frozenset(("gpg", "reinforce"))}  # two names of one loss
    for (i, (name, mode)), (j, (other, other_mode)) in itertools.combinations(enumerate(CASES), 2):
        aliases = {mode, other_mode} in ({"session-mean", "seq-mean-token-mean"}, {mode})
        if aliases and (name == other or frozenset((name, other)) in same):
            continue
        distance = float((whole[i] - whole[j]).norm() / whole[j].norm())
        assert distance > 1e-3 and math.isfinite(distance), (CASES[i], CASES[j])


def _run_rank(directory: Path, rank: int) -> None:
    """Let the sharded engine take every gradient, in every layout, of this rank's rows."""
    torch.set_num_threads(1)
    ranks = join_ranks(
        (directory / "rendezvous").as_uri(),
        rank=rank,
        world_size=2,
        device="cpu",
        timeout_s=DEADLINE_S / 2,
    )
    batch = _mini_batch(_model())
    num_tokens = int(batch.tokens["loss_mask"].sum())
    engine = FSDPEngine(_model(), None, EngineConfig(lr=0.0, grad_clip=0.0), ranks=ranks)
    gradients: dict[str, Tensor] = {}
    for name, value in engine.model.named_parameters():
        value.register_post_accumulate_grad_hook(
            lambda p, name=name: gradients.update({name: p.grad})
        )
    totals: dict[str, list[Tensor]] = {layout: [] for layout in TWO_RANKS}
    for (name, mode), (layout, rows) in itertools.product(ENGINE_CASES, TWO_RANKS.items()):
        # Weights and totals are the whole mini-batch's: a driver that sends out parts has them.
        loss, inputs = _case(name, mode, batch.select(rows[rank]), num_tokens)
        engine.train_mini_batch(inputs, loss, tokens_per_micro_batch=30)
        found = [full_tensor(gradients[key]) for key, _ in engine.model.named_parameters()]
        totals[layout].append(torch.cat([gradient.flatten() for gradient in found]))
    if rank == 0:
        stacked = {layout: torch.stack(found) for layout, found in totals.items()}
        torch.save(stacked, directory / "gradients.pt")
    leave_ranks()


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]), int(sys.argv[2]))
