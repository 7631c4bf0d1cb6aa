"""How arms are taken in turn, compared and shown."""

from __future__ import annotations

import pytest

from agentrl.bench import machine
from agentrl.bench.machine import BenchError
from agentrl.bench.results import Arm, interleaved, refuse_unequal_work, table


def arm(name: str, *tokens: float) -> Arm:
    found = Arm(name)
    for number, count in enumerate(tokens):
        found.add(1.0 + number, {"tokens": count})
    return found


def test_arms_are_taken_there_and_back() -> None:
    assert interleaved(["a", "b", "c"], 3) == [*"abc", *"cba", *"abc"]


def test_arms_of_other_work_are_not_compared() -> None:
    refuse_unequal_work([arm("a", 1000, 500), arm("b", 1004, 500)])
    with pytest.raises(BenchError, match="repeat 1: b did 510 tokens, a 500"):
        refuse_unequal_work([arm("a", 1000, 500), arm("b", 1000, 510)])


def test_an_arm_tells_how_far_it_is_from_itself() -> None:
    found = Arm("a")
    for seconds in (1.0, 2.0, 1.0, 2.0):
        found.add(seconds, {})
    assert found.halves_differ == 2.0
    assert (found.median_s, found.range_s) == (1.5, (1.0, 2.0))
    assert arm("a", 1).halves_differ == 1.0


def test_a_table_has_names_left_and_numbers_right() -> None:
    rows = [["a", 0.12345], ["long name", 12345.6], ["none", None]]
    lines = table(["arm", "s"], rows).split("\n")
    assert lines[0] == "arm             s"
    assert lines[2:] == ["a           0.123", "long name  12,346", "none"]


@pytest.mark.parametrize(("used_gib", "refused"), [(1, False), (30, True)])
def test_a_gpu_that_others_use_is_refused(
    used_gib: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        machine.torch.cuda, "mem_get_info", lambda: ((140 - used_gib) << 30, 140 << 30)
    )
    if not refused:
        machine.refuse_busy_gpu()
        return
    with pytest.raises(BenchError, match="CUDA_VISIBLE_DEVICES"):
        machine.refuse_busy_gpu()


def test_the_machine_is_described() -> None:
    found = machine.describe_machine()
    assert found["versions"]["torch"] and found["cores"] >= 1
    ceilings = machine.measure_ceilings()
    assert ceilings.bytes_per_s > 1e6 and ceilings.flops_per_s > 1e6
