"""The built-in tools that work in a sandbox, on every backend: one workspace, the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from sandbox_arms import StartedBackend

from agentrl.sandbox.base import Sandbox, SandboxBackend, SandboxLimits
from agentrl.tool.base import ToolContext
from agentrl.tool.binding import Toolbox
from agentrl.tool.executor import ToolExecutor
from agentrl.tool.spec import tool_registry
from agentrl.tool.workspace import Workspace
from agentrl.types import ToolCall, ToolResult, ToolStatus

TOOLS = ("python", "bash", "view_file", "edit_file", "search_files")
ESCAPES = ["../../x", "/etc/passwd", "%2e%2e/x", "a\0b", "~/x", "..\\x", "a\u2215b", "x" * 5000]

Call = Callable[..., Awaitable[ToolResult]]

pytestmark = pytest.mark.timeout(120)


class Direct:
    """Gives out boxes of a backend that is started, and keeps what it gave."""

    def __init__(self, backend: SandboxBackend) -> None:
        self._backend = backend
        self.boxes: list[Sandbox] = []

    async def acquire(self, limits: SandboxLimits | None = None) -> Sandbox:
        self.boxes.append(await self._backend.create(limits or SandboxLimits()))
        return self.boxes[-1]


@asynccontextmanager
async def trajectory(
    sandboxes: Direct,
    *,
    files: Mapping[str, str] | None = None,
    specs: Mapping[str, str] | None = None,
    **state: Any,
) -> AsyncIterator[Call]:
    """The tools of one trajectory, as the agent loop opens and closes them."""
    toolbox = Toolbox(TOOLS, replace=specs)

    async def workspace_state() -> Mapping[str, Any]:
        return {"files": files or {}}

    workspace = Workspace(sandboxes, limits=toolbox.workspace_limits, load_state=workspace_state)

    async def context(name: str) -> ToolContext:
        return ToolContext(
            trajectory_id="t",
            seed=0,
            sandboxes=sandboxes,
            state=state.get(name, {}),
            workspace=workspace.open,
        )

    executor = ToolExecutor(toolbox, make_context=context, cut=lambda text, limit: (text, 0))

    async def call(name: str, **arguments: Any) -> ToolResult:
        return await executor.run(ToolCall(name=name, arguments=arguments))

    try:
        yield call
    finally:
        await executor.close()
        await workspace.close()


def hurried(name: str, folder: Path) -> dict[str, str]:
    """A tool whose calls may take a second, for ``trajectory(specs=...)``."""
    spec = yaml.safe_load(tool_registry.get(name).read_text())
    spec["kwargs"] = {**spec["kwargs"], "wall_s": 1.0}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(spec))
    return {name: str(file)}


def test_all_tools_see_one_workspace(backend: StartedBackend):
    sandboxes = Direct(backend.backend)

    async def scenario() -> list[str]:
        async with trajectory(sandboxes, files={"src/a.py": "x = 1\n"}) as call:
            answers = [
                await call("search_files"),
                await call(
                    "edit_file", path="src/a.py", command="insert", line=1, new_text="y = 2"
                ),
                await call(
                    "python", code="import sys; sys.path.append('src'); import a; a.x + a.y"
                ),
                await call("bash", command="cat src/a.py; echo z >new.txt"),
                await call("python", code="open('new.txt').read()"),
                await call("view_file", path="/box/new.txt"),
            ]
        return [answer.content for answer in answers]

    assert backend.run(scenario()) == [
        "src/a.py (6 bytes)",
        "changed src/a.py:\n1\tx = 1\n2\ty = 2",
        "3",
        "x = 1\ny = 2",
        "'z\\n'",
        "1\tz",
    ]
    assert len(sandboxes.boxes) == 1


def test_the_shell_keeps_folder_and_exported_variables_and_nothing_else(backend: StartedBackend):
    async def scenario() -> list[str]:
        async with trajectory(Direct(backend.backend)) as call:
            commands = [
                "mkdir -p d/e; cd d/e; export A=$'x y\\nz' B=1; C=2; exit 3",
                'pwd; echo "$A"; echo "[$C]"; echo err >&2; echo after',
                "unset B; cd ..; pwd",
                "pwd; echo [$B]; (cd /; export A=no); nope",
                "rmdir e; cd /nonexistent",
                "cd /tmp; true",
                "exec false",
                "pwd",
            ]
            return [(await call("bash", command=command)).content for command in commands]

    assert backend.run(scenario()) == [
        "[exit code 3]",
        "/box/d/e\nx y\nz\n[]\nerr\nafter",
        "/box/d",
        "/box/d\n[]\nbash: line 1: nope: command not found\n[exit code 127]",
        "bash: line 1: cd: /nonexistent: No such file or directory\n[exit code 1]",
        "(no output)",
        "[exit code 1]",
        "/tmp",
    ]


def test_a_flood_leaves_out_the_middle_and_keeps_the_end(backend: StartedBackend):
    async def scenario() -> str:
        async with trajectory(Direct(backend.backend)) as call:
            return (await call("bash", command="seq 1 5000; echo done; exit 7")).content

    answer = backend.run(scenario())
    assert answer.startswith("1\n2\n3\n") and answer.endswith("5000\ndone\n[exit code 7]")
    assert "characters left out" in answer and len(answer) < 1800


def test_what_an_environment_sets_up_is_there(backend: StartedBackend):
    state = {"bash": {"setup": "export GREETING=hi; mkdir d; cd d"}, "python": {"setup": "n = 7"}}

    async def scenario() -> list[str]:
        async with trajectory(Direct(backend.backend), **state) as call:
            bash, python = (
                await call("bash", command="echo $GREETING"),
                await call("python", code="n"),
            )
            return [bash.content, python.content]

    assert backend.run(scenario()) == ["hi", "7"]


def test_a_command_that_hangs_is_stopped_and_python_keeps_its_names(
    backend: StartedBackend, tmp_path: Path
):
    async def scenario() -> list[ToolResult]:
        async with trajectory(Direct(backend.backend), specs=hurried("bash", tmp_path)) as call:
            await call("python", code="n = 7")
            stuck = await call("bash", command="export K=1; echo begun; sleep 60")
            return [stuck, await call("bash", command="echo next"), await call("python", code="n")]

    stuck, following, python = backend.run(scenario())
    assert stuck.content == "begun\ntimeout: stopped after 1 s"
    assert stuck.status is ToolStatus.OK
    assert (following.content, python.content) == ("next", "7")


def test_no_path_leads_out_and_nothing_is_written(backend: StartedBackend):
    async def scenario() -> tuple[list[ToolResult], ToolResult]:
        refused: list[ToolResult] = []
        async with trajectory(Direct(backend.backend), files={"a.txt": "a"}) as call:
            for path in ESCAPES:
                edits = {"path": path, "new_text": "overwritten"}
                refused += [
                    await call("view_file", path=path),
                    await call("edit_file", command="create", **edits),
                    await call("edit_file", command="replace", old_text="r", **edits),
                    await call("search_files", glob=path),
                ]
            return refused, await call("search_files")

    refused, listed = backend.run(scenario())
    assert [answer.status for answer in refused] == [ToolStatus.ERROR] * 4 * len(ESCAPES)
    assert all(len(answer.content) < 300 for answer in refused)
    assert listed.content == "a.txt (1 bytes)"


def test_links_that_lead_out_are_not_written_through_also_while_they_are_swapped(
    backend: StartedBackend,
):
    swap = """
import os, threading
os.mkdir("real"); os.symlink("real", "d"); os.symlink("/etc/passwd", "out"); os.mkfifo("fifo")
def swapping():
    while True:
        for target in ("/etc", "real"):
            os.symlink(target, "new"); os.rename("new", "d")
threading.Thread(target=swapping, daemon=True).start()
"""

    async def scenario() -> tuple[list[ToolResult], str, str]:
        async with trajectory(Direct(backend.backend)) as call:
            before = await call("bash", command="cat /etc/passwd")
            await call("python", code=swap)
            answers = [
                await call("edit_file", path="out", command="create", new_text="swapped"),
                await call("view_file", path="out"),
                await call("view_file", path="fifo"),
            ]
            for _ in range(30):
                await call("edit_file", path="d/passwd", command="create", new_text="swapped")
            after = await call("bash", command="cat /etc/passwd")
            return answers, before.content, after.content

    answers, before, after = backend.run(scenario())
    assert {answer.status for answer in answers} == {ToolStatus.ERROR}
    assert before == after


def test_an_edit_that_finds_no_room_leaves_the_file_as_it_was(backend: StartedBackend):
    fill = "f = open('fill', 'wb')\ntry:\n  while True: f.write(b'x' * 65536)\nexcept OSError: pass"
    shrink = "import os; f.close(); os.truncate('fill', os.path.getsize('fill') - 300_000)"

    async def scenario() -> list[ToolResult]:
        async with trajectory(Direct(backend.backend), files={"a.txt": "old\n"}) as call:
            await call("python", code=f"{fill}\n{shrink}")
            large = "y" * 1_500_000
            return [
                await call("edit_file", path="a.txt", command="create", new_text=large),
                await call("edit_file", path="b.txt", command="create", new_text=large),
                await call("view_file", path="a.txt"),
                await call("search_files", glob="[ab].txt"),
                await call("search_files", glob="?.txt"),
            ]

    first, second, seen, literal, listed = backend.run(scenario())
    assert first.status is second.status is ToolStatus.ERROR
    assert seen.content == "1\told"
    assert literal.content.startswith("nothing found")
    assert listed.content == "a.txt (4 bytes)"


def test_a_hostile_tree_is_searched_in_bounds(backend: StartedBackend, tmp_path: Path):
    tree = """
import os
os.symlink("/etc", "etc"); os.symlink(".", "loop"); os.mkfifo("fifo")
open("bin", "wb").write(b"\\0passwd"); open("re.py", "w").write("raise SystemExit")
open("long", "w").write("passwd" + "x" * 100_000)
open("slow", "w").write("a" * 40 + "!")
open("naïve\\n", "w").write("passwd")
deep = "/".join(["d"] * 50); os.makedirs(deep); open(deep + "/f", "w").write("passwd here")
for i in range(60): open("many%02d" % i, "w").write("many")
"""

    async def scenario() -> list[ToolResult]:
        async with trajectory(
            Direct(backend.backend), specs=hurried("search_files", tmp_path)
        ) as call:
            await call("python", code=f"n = 7\n{tree}")
            return [
                await call("search_files", pattern="passwd"),
                await call("search_files", pattern="many"),
                await call("search_files", pattern="(a+)+b", glob="slow"),
                await call("search_files", pattern="(", literal=True),
                await call("search_files", pattern="("),
                await call("python", code="n"),
            ]

    found, many, slow, literal, broken, python = backend.run(scenario())
    lines = found.content.split("\n")
    assert lines[0] == "/".join(["d"] * 50) + "/f:1: passwd here"
    assert lines[1].startswith("long:1: passwdxxx") and lines[1].endswith("more]")
    assert "etc/" not in found.content and "bin:" not in found.content
    assert many.content.count("\n") == 50 and "more than 50 results" in many.content
    assert slow.status is ToolStatus.ERROR and "took too long" in slow.content
    assert literal.content.startswith("nothing found")
    assert broken.status is ToolStatus.ERROR and "literal" in broken.content
    assert python.content == "7"


def test_a_trajectory_that_is_cancelled_closes_its_workspace(backend: StartedBackend):
    sandboxes = Direct(backend.backend)

    async def scenario() -> None:
        async def play() -> None:
            async with trajectory(sandboxes) as call:
                await call("bash", command="sleep 60")

        playing = asyncio.ensure_future(play())
        while not sandboxes.boxes:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        playing.cancel()
        await asyncio.wait([playing])
        with pytest.raises(Exception, match="closed|cannot be used"):
            await sandboxes.boxes[0].exec(["true"])

    backend.run(scenario())
