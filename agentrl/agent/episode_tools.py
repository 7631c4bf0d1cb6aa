"""The tools of one episode, the workspace that they share, and what they leave to be graded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agentrl.agent.failures import classify, from_env
from agentrl.agent.request import EpisodeRequest
from agentrl.env.hosted import Hosted
from agentrl.errors import EnvError, RewardError, SandboxError
from agentrl.seeding import derive_seed
from agentrl.tool.base import ToolContext
from agentrl.tool.executor import ToolExecutor
from agentrl.tool.workspace import WORKSPACE, Workspace
from agentrl.types import StopReason, ToolCall, ToolResult

if TYPE_CHECKING:
    from agentrl.agent.loop import AgentLoop


class EpisodeTools:
    """Opened as the model calls them; closed once, the workspace last.

    Args:
        loop: whose toolbox and sandboxes are used.
        env: tells each tool what it needs to know of the task, and names the files to grade.
        request: of the episode.
    """

    def __init__(self, loop: AgentLoop, env: Hosted, request: EpisodeRequest) -> None:
        self._loop = loop
        self._env = env
        self._request = request
        self._executor = ToolExecutor(
            loop.toolbox,
            make_context=self._context,
            cut=loop.renderer.cut,
            seed=request.seed,
            num_calls=None if request.branch is None else request.branch.num_calls,
            close_timeout_s=loop.limits.close_timeout_s,
        )
        self._workspace = Workspace(
            loop.sandboxes,
            limits=loop.toolbox.workspace_limits,
            load_state=lambda: from_env(request.env_id, env.tool_state(WORKSPACE)),
        )
        self.artifacts: dict[str, bytes] = {}
        """The files of the workspace that the environment asks for; filled by :meth:`end`."""

    @property
    def num_calls(self) -> Mapping[str, int]:
        """Calls so far, by tool."""
        return self._executor.num_calls

    async def run(self, calls: Sequence[ToolCall], results: list[ToolResult]) -> None:
        """Run the calls of a turn; ``results`` is filled in their order."""
        await self._executor.run_turn(calls, results)

    @property
    def failure(self) -> StopReason:
        """How the episode ends where a result says that our side failed."""
        failure = self._executor.failure
        reason = None
        if isinstance(failure, EnvError | RewardError | SandboxError):
            reason = classify(failure)
        return reason or StopReason.TOOL_INFRA_ERROR

    async def end(self, *, keep_artifacts: bool) -> None:
        """Close everything; nothing that the agent left running lives on.

        Raises:
            SandboxError: the artifacts could not be taken.
        """
        await self._executor.close()
        if keep_artifacts and self._env.artifacts:
            self.artifacts = await self._workspace.take(self._env.artifacts)
        await self._workspace.close()

    async def _context(self, tool: str) -> ToolContext:
        key = self._loop.toolbox.state_keys[tool]
        return ToolContext(
            trajectory_id=self._request.trajectory_id,
            seed=derive_seed(self._request.seed, "tool", tool),
            sandboxes=self._loop.sandboxes,
            state=await from_env(self._request.env_id, self._env.tool_state(key)),
            workspace=self._workspace.open,
        )
