"""Programming tasks with a sandbox to try things in."""

from agentrl_envs.code_sandbox.env import CodeSandbox

__all__ = ["CodeSandbox"]
