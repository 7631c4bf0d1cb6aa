"""Questions with one answer each."""

from agentrl_envs.qa.env import QA

__all__ = ["QA"]
