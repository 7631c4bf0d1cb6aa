"""An engine over two ranks does what one process does: gradients, steps, scores, exports."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.dist.ranks import Ranks
from agentrl.testing.random_models import build

_PROGRAM = Path(__file__).with_name("rank_program.py")
_spec = importlib.util.spec_from_file_location("rank_program", _PROGRAM)
assert _spec is not None and _spec.loader is not None
program = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(program)

TOLERANCE = 1e-5
BF16_TOLERANCE = 2e-2
SCENARIOS = program.scenarios()
pytestmark = pytest.mark.timeout(2 * program.DEADLINE_S)

Found = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Found]]]:
    """What each of two processes found in every scenario."""
    directory = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(_PROGRAM), str(directory)]
    processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in (0, 1)]
    try:
        codes = [process.wait(timeout=program.DEADLINE_S) for process in processes]
        assert codes == [0, 0]
        found = [torch.load(directory / f"found_{rank}.pt") for rank in (0, 1)]
        yield [one | {"directory": directory} for one in found]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def alone() -> dict[str, Found]:
    """What one process with all rows finds, by scenario."""
    known: dict[str, Found] = {}
    found = {}
    for name, (_, _, settings) in SCENARIOS.items():
        key = repr(settings)
        if key not in known:
            known[key] = program.train(Ranks.single("cpu"), program.SHARED[0], **settings)
        found[name] = known[key]
    return found


def _error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm, of all tensors together."""
    assert got.keys() == want.keys()
    left, right = (
        torch.cat([found[name].double().flatten() for name in want]) for found in (got, want)
    )
    assert float(right.norm()) > 1e-3
    return float((left - right).norm() / right.norm())


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_take_the_gradient_and_the_steps_of_one_process(
    ranks: list[dict[str, Found]], alone: dict[str, Found], name: str
) -> None:
    tolerance = BF16_TOLERANCE if "bf16" in name else TOLERANCE
    want = alone[name]
    for found in ranks:
        assert _error(found[name]["gradients"], want["gradients"]) < tolerance
        assert _error(found[name]["weights"], want["weights"]) < tolerance


@pytest.mark.parametrize("name", SCENARIOS)
def test_metrics_of_ranks_add_up_to_those_of_one_process(
    ranks: list[dict[str, Found]], alone: dict[str, Found], name: str
) -> None:
    tolerance = 0.05 if "bf16" in name else 1e-4
    same = {"grad_norm", "lr", "skipped"}
    counted = ranks[:1] if name.startswith("shared rows") else ranks
    for step, want in enumerate(alone[name]["metrics"]):
        found = [rank[name]["metrics"][step] for rank in counted]
        assert found[0]["micro_batches"] == found[-1]["micro_batches"] > 0
        for key in want.keys() - {"micro_batches"}:
            values = [metrics[key] for metrics in found if key in metrics]
            if key in same:
                assert len(set(map(repr, values))) == 1, key
                total = values[0]
            else:
                total = max(values) if key.endswith("_max") else sum(values)
            if key != "grad_norm" or torch.isfinite(torch.tensor(want[key])):
                assert total == pytest.approx(want[key], rel=tolerance, abs=tolerance), (step, key)


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_score_their_rows_as_one_process_does(
    ranks: list[dict[str, Found]], alone: dict[str, Found], name: str
) -> None:
    _, parts, _ = SCENARIOS[name]
    lengths = program.LENGTHS
    tolerance = 0.2 if "bf16" in name else 1e-4
    for found, rows in zip(ranks, parts, strict=True):
        for field, want in alone[name]["scores"].items():
            by_row = want.split(lengths)
            own = torch.cat([by_row[row] for row in rows]) if rows else want[:0]
            torch.testing.assert_close(
                found[name]["scores"][field], own, atol=tolerance, rtol=0, msg=field
            )


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_ranks_export_the_same_bits(ranks: list[dict[str, Found]], name: str) -> None:
    first, second = (found[name]["weights"] for found in ranks)
    assert first.keys() == second.keys()
    for tensor in first:
        assert torch.equal(first[tensor], second[tensor]), tensor


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_both(
    ranks: list[dict[str, Found]],
) -> None:
    for found in ranks:
        metrics = found["uneven rows, poisoned"]["metrics"]
        assert [step["skipped"] for step in metrics] == [0.0, 1.0, 0.0]
        weights = found["uneven rows, poisoned"]["weights"]
        assert all(bool(value.isfinite().all()) for value in weights.values())


def test_offloading_between_steps_changes_no_bit(ranks: list[dict[str, Found]]) -> None:
    for found in ranks:
        stayed, moved = found["uneven rows, steps"], found["uneven rows, offloaded steps"]
        for part in ("weights", "scores"):
            for name, value in stayed[part].items():
                assert torch.equal(value, moved[part][name]), name
        assert stayed["metrics"] == moved["metrics"]


def test_a_sharded_model_with_tied_weights_is_written_as_transformers_reads_it(
    ranks: list[dict[str, Found]],
) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(f"{ranks[0]['directory']}/exported")
    want = build("llama-rope3")
    for name, value in want.named_parameters():
        assert torch.equal(loaded.get_parameter(name), value), name
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, want(input_ids=ids).logits)
