"""The python tool: what the model reads of each way a cell can end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agentrl_tools.executions import describe
from agentrl_tools.python.tool import PythonTool

from agentrl.errors import InfrastructureError, SandboxError, ToolError
from agentrl.sandbox.base import ExecResult, SandboxStatus
from agentrl.testing import FakeSandboxes
from agentrl.tool.base import ToolContext, ToolReply

TRACEBACK = 'Traceback (most recent call last):\n  File "<cell>", line 1\nNameError: no x\n'


def context(sandboxes: FakeSandboxes, **state: Any) -> ToolContext:
    return ToolContext(
        trajectory_id="t",
        seed=0,
        sandboxes=sandboxes,
        state=state,
        workspace=sandboxes.acquire,
    )


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (ExecResult(status=SandboxStatus.OK, stdout="3\n"), "3"),
        (ExecResult(status=SandboxStatus.OK, result="[1, 2]"), "[1, 2]"),
        (ExecResult(status=SandboxStatus.OK, stdout="a\n", result="7"), "a\n7"),
        (ExecResult(status=SandboxStatus.OK), "(no output)"),
        (ExecResult(status=SandboxStatus.OK, stderr="warned\n"), "warned"),
        (ExecResult(status=SandboxStatus.TIMEOUT, stdout="1\n"), "1\ntimeout: stopped after 2 s"),
        (ExecResult(status=SandboxStatus.OOM), "out of memory"),
        (ExecResult(status=SandboxStatus.PIDS_LIMIT), "too many processes or threads"),
        (ExecResult(status=SandboxStatus.STATE_LOST), "python was restarted: all names are lost"),
        (
            ExecResult(status=SandboxStatus.TIMEOUT, state_lost=True),
            "timeout: stopped after 2 s\npython was restarted: all names are lost",
        ),
        (
            ExecResult(status=SandboxStatus.OUTPUT_LIMIT, stdout="aaa", truncated_bytes=9),
            "aaa\n[9 more bytes]",
        ),
        (
            ExecResult(status=SandboxStatus.OK, stdout="a\n... [9 bytes cut]", truncated_bytes=9),
            "a\n... [9 bytes cut]",
        ),
    ],
)
def test_every_result_is_described(result: ExecResult, expected: str):
    assert describe(result, wall_s=2.0) == expected


def run_one(result: ExecResult) -> str | ToolReply:
    sandboxes = FakeSandboxes(lambda code: result)

    async def main() -> str | ToolReply:
        tool = PythonTool()
        await tool.open(context(sandboxes))
        return await tool.call(code="x")

    return asyncio.run(main())


def test_of_a_traceback_the_last_line_is_told():
    result = ExecResult(status=SandboxStatus.ERROR, stdout="before\n", error=TRACEBACK)
    assert run_one(result) == "before\nNameError: no x"


def test_a_long_last_line_is_cut():
    result = ExecResult(status=SandboxStatus.ERROR, error="ValueError: " + "x" * 10_000)
    answer = run_one(result)
    assert isinstance(answer, str) and len(answer) <= 300


@pytest.mark.parametrize(
    "result",
    [
        *(
            ExecResult(status=status)
            for status in (
                SandboxStatus.TIMEOUT,
                SandboxStatus.OOM,
                SandboxStatus.PIDS_LIMIT,
                SandboxStatus.OUTPUT_LIMIT,
                SandboxStatus.STATE_LOST,
            )
        ),
        ExecResult(status=SandboxStatus.ERROR, state_lost=True),
    ],
)
def test_a_cell_that_a_limit_ended_says_so_to_the_environment_too(result: ExecResult):
    text = describe(result, wall_s=5.0)
    assert run_one(result) == ToolReply(content=text, cut_short=True)


def test_setup_runs_at_open_and_cells_follow_in_the_workspace_which_stays_open():
    sandboxes = FakeSandboxes(lambda code: ExecResult(status=SandboxStatus.OK, stdout=code))

    async def main() -> str | ToolReply:
        tool = PythonTool()
        await tool.open(context(sandboxes, setup="def check(f): ..."))
        said = await tool.call(code="check(1)")
        await tool.close()
        await tool.close()
        return said

    assert asyncio.run(main()) == "check(1)"
    (sandbox,) = sandboxes.opened
    assert sandbox.cells == ["def check(f): ...", "check(1)"]
    assert not sandbox.closed
    assert PythonTool(memory_mb=64).workspace_limits.memory_mb == 64


@pytest.mark.parametrize("status", [SandboxStatus.SANDBOX_DEAD, SandboxStatus.INFRA_ERROR])
def test_a_sandbox_that_fails_on_our_side_is_no_answer(status: SandboxStatus):
    sandboxes = FakeSandboxes(lambda code: ExecResult(status=status, error="lost"))

    async def main() -> None:
        tool = PythonTool()
        await tool.open(context(sandboxes))
        with pytest.raises(SandboxError, match="lost"):
            await tool.call(code="1")

    asyncio.run(main())


def test_setup_code_that_fails_is_the_environments_fault():
    sandboxes = FakeSandboxes(lambda code: ExecResult(status=SandboxStatus.ERROR, error=TRACEBACK))
    with pytest.raises(InfrastructureError, match="NameError: no x"):
        asyncio.run(PythonTool().open(context(sandboxes, setup="x")))


def test_no_sandbox_to_be_had_is_our_failure():
    with pytest.raises(SandboxError):
        asyncio.run(PythonTool().open(context(FakeSandboxes(fails=True))))


def test_code_with_nul_is_the_models_mistake():
    async def main() -> None:
        tool = PythonTool()
        await tool.open(context(FakeSandboxes()))
        with pytest.raises(ToolError):
            await tool.call(code="1\x00")

    asyncio.run(main())


def test_a_call_before_open_is_an_error_of_ours():
    with pytest.raises(SandboxError):
        asyncio.run(PythonTool().call(code="1"))
