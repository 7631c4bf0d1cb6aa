from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agentrl_envs.code_sandbox import CodeSandbox

from agentrl.env.check import check_env
from agentrl.env.config import EnvConfig
from agentrl.errors import EnvError
from agentrl.types import Action, ToolCall, ToolResult, ToolStatus


def run_cell(
    *cells: str,
    status: ToolStatus = ToolStatus.OK,
    name: str = "python",
    cut_short: bool = False,
) -> Action:
    calls = tuple(ToolCall(name=name, arguments={"code": cell}) for cell in cells)
    results = tuple(
        ToolResult(name=name, content="", status=status, cut_short=cut_short) for _ in cells
    )
    return Action(text="", content="", tool_calls=calls, tool_results=results)


def say(text: str, *, truncated: bool = False) -> Action:
    return Action(text=text, content=text, truncated=truncated)


def started(**kwargs: Any) -> CodeSandbox:
    env = CodeSandbox(**kwargs)
    env.reset(options={"task": env.tasks("train")[0]})
    return env


def value_of(source: str | None) -> Any:
    assert source is not None
    space: dict[str, Any] = {}
    exec(source, space)
    return space["f"](0)


def test_the_environment_keeps_its_contract() -> None:
    assert asyncio.run(check_env(EnvConfig(id="code_sandbox"))) == []


def test_the_workspace_is_submitted_when_the_model_stops_calling() -> None:
    env = started()
    assert env.step(run_cell("def f(x):\n    return 1"))[1:4] == (0.0, False, False)
    env.step(run_cell("def f(x):\n    return 2"))
    *_, terminated, truncated, info = env.step(say("done"))
    assert terminated and not truncated
    assert value_of(info["submission"]) == 2
    assert [value_of(source) for source in info["submissions"]] == [1, 2, 2]


def test_a_block_in_the_final_message_takes_precedence() -> None:
    block = "```python\ndef f(x):\n    return 3\n```"
    env = started()
    env.step(run_cell("def f(x):\n    return 1"))
    assert value_of(env.step(say(block))[4]["submission"]) == 3
    env = started()
    env.step(run_cell("def f(x):\n    return 1"))
    assert env.step(say(f"{block}\n{block}"))[4]["submission"] is None
    env = started()
    env.step(run_cell("def f(x):\n    return 1"))
    *_, terminated, _, info = env.step(say(block, truncated=True))
    assert terminated and value_of(info["submission"]) == 1


def test_the_last_call_ends_the_episode() -> None:
    env = started(max_calls=2)
    assert env.step(run_cell("x = 1"))[2] is False
    observation, reward, terminated, truncated, info = env.step(run_cell("y = 1"))
    assert (observation, reward, terminated, truncated) == ("", 0.0, True, False)
    assert info["submission"] is None
    env = started(max_calls=3)
    assert env.step(run_cell("a = 1", "b = 1", "c = 1"))[2] is True


@pytest.mark.parametrize(
    "action",
    [
        run_cell("def f(x):\n    return 9", status=ToolStatus.TIMEOUT),
        run_cell("def f(x):\n    return 9", status=ToolStatus.ERROR),  # such as: no call is left
        run_cell("def f(x):\n    return 9", name="other"),
        Action(
            text="",
            content="",
            tool_calls=(ToolCall(name="python", arguments={"code": 5}),),
            tool_results=(ToolResult(name="python", content="", status=ToolStatus.ERROR),),
        ),
        Action(
            text="",
            content="",
            tool_calls=(
                ToolCall(name="python", arguments={"code": "def f(x): return 9"}, error="no JSON"),
            ),
            tool_results=(ToolResult(name="python", content="", status=ToolStatus.ERROR),),
        ),
    ],
)
def test_calls_that_ran_nothing_define_nothing(action: Action) -> None:
    env = started()
    assert env.step(action)[4]["submission"] is None


def test_a_cell_that_ran_out_of_time_does_not_spoil_what_follows() -> None:
    env = started()
    env.step(run_cell("while True:\n    pass", cut_short=True))
    submission = env.step(run_cell("def f(x):\n    return 4"))[4]["submission"]
    assert "while" not in submission and value_of(submission) == 4


def test_episodes_do_not_leak_into_each_other() -> None:
    env = started(max_calls=1)
    env.step(run_cell("def f(x):\n    return 1"))
    env.reset(options={"task": env.tasks("train")[1]})
    info = env.step(say("done"))[4]
    assert info == {"submission": None, "submissions": [None]}


def test_the_python_tool_is_given_check_for_this_task() -> None:
    env = started()
    task = env.tasks("train")[0]
    space: dict[str, Any] = {}
    exec(env.tool_state("python")["setup"], space)
    assert callable(space["check"])
    x, y = task.data["visible"][0]
    assert repr(y) in env.tool_state("python")["setup"]
    hidden = [x for x, _ in task.data["hidden"] if x not in [x for x, _ in task.data["visible"]]]
    assert hidden and not any(repr(x) in env.tool_state("python")["setup"] for x in hidden)
    with pytest.raises(EnvError, match="before reset"):
        CodeSandbox().tool_state("python")
