"""Limits of an episode: every one has a value, so that nothing runs without an end."""

from __future__ import annotations

from dataclasses import dataclass, fields

from agentrl.errors import ConfigError


@dataclass(slots=True, kw_only=True)
class LoopLimits:
    """What ends an episode that its environment does not end.

    Raises:
        ConfigError: a limit is not positive.
    """

    max_turns: int = 8
    """Answers of the model in one episode."""
    max_turn_tokens: int = 256
    """Sampled in one turn. Where it is not set, at most ``max_response_tokens``."""
    max_response_tokens: int = 1024
    """Sampled over the whole trajectory. Where it is not set and would leave no room for a prompt:
    half of ``max_context_tokens``."""
    max_context_tokens: int = 2048
    """Prompt, answers of tools and sampled tokens together. Where it is not set, at most the
    positions of the model."""
    max_turn_calls: int = 16
    """Tool calls in one turn; those beyond are refused with one message."""
    trajectory_timeout_s: float = 120.0
    """Wall clock from reset to the last step; grading and closing come on top."""
    close_timeout_s: float = 5.0
    """For each thing that is closed when the episode is over."""

    def __post_init__(self) -> None:
        """Refuse limits that would end every episode at once."""
        for limit in fields(LoopLimits):
            value = getattr(self, limit.name)
            if not value > 0:
                raise ConfigError(f"rollout.{limit.name}={value}: must be above 0")
