"""A run of exactly so many tokens: random weights, letters for prompts, answers that never end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.bench.random_policy import SHAPES, prompt_chars, write_policy
from agentrl.cli.options import quote
from agentrl.config.load import load
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.testing.clock_env import ClockEnv
from agentrl.testing.decode_time import ModelShape

ENV = f"{ClockEnv.__module__}:{ClockEnv.__name__}"
_MAX_LATENCY_S = 3600
_ROOM = 8
"""Tokens of context beyond what an episode takes."""


@dataclass(slots=True, frozen=True, kw_only=True)
class FixedWork:
    """What is sampled in a step, and trained on.

    Raises:
        ConfigError: no such shape, or counts that mean nothing.
    """

    shape: str = "tiny"
    prompts: int = 8
    samples: int = 4
    prompt_tokens: int = 64
    turns: int = 1
    turn_tokens: int = 32
    """Sampled in each turn; in benchmarks of rollouts the most."""
    answer_tokens: int = 0
    """That the environment adds after each turn but the last, besides what the template adds."""
    latency_median_s: float = 0.0
    latency_p99_s: float = 0.0
    """Of the environment; both 0 for none."""

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        if self.shape not in SHAPES:
            raise ConfigError(f"--shape {self.shape}: known are {', '.join(SHAPES)}")
        for name in ("prompts", "samples", "prompt_tokens", "turns", "turn_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.answer_tokens < 0:
            raise ConfigError(f"answer_tokens={self.answer_tokens}: must be at least 0")
        if not 0 <= self.latency_median_s <= self.latency_p99_s <= _MAX_LATENCY_S:
            raise ConfigError(
                f"latency_median_s={self.latency_median_s}, latency_p99_s={self.latency_p99_s}: "
                f"give 0 <= median <= p99 <= {_MAX_LATENCY_S}"
            )

    @property
    def num_trajectories(self) -> int:
        """Of a step."""
        return self.prompts * self.samples

    @property
    def context_tokens(self) -> int:
        """That an episode takes at most, with what templates add between turns."""
        between = self.answer_tokens + 64
        return self.prompt_tokens + self.turns * (self.turn_tokens + between) + _ROOM

    def env_kwargs(self) -> dict[str, Any]:
        """Return the arguments of the environment.

        Raises:
            ConfigError: the chat template alone takes more than ``prompt_tokens``.
        """
        letters = prompt_chars(self.prompt_tokens)
        if letters < 1:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens}: the chat template alone takes "
                f"{self.prompt_tokens - letters}; give more"
            )
        return {
            "num_turns": self.turns,
            "latency_median_s": self.latency_median_s,
            "latency_p99_s": self.latency_p99_s,
            "prompt_chars": letters,
            "answer_chars": max(self.answer_tokens, 1),
            "num_tasks": 64 * self.prompts,
        }

    def write(self, folder: Path) -> ModelShape:
        """Write the policy."""
        return write_policy(self.shape, folder)

    def config(self, policy: Path, run_dir: Path, settings: Sequence[str] = ()) -> Config:
        """Return the settings of a run of this work on a policy that was written.

        Args:
            settings: the user's, which win.

        Raises:
            ConfigError: they cannot work.
        """
        sampled = self.turns * self.turn_tokens
        own = {
            "env.id": ENV,
            "env.kwargs": self.env_kwargs(),
            "model.path": str(policy),
            "rollout.n": self.samples,
            "rollout.max_turns": self.turns,
            "rollout.max_turn_tokens": self.turn_tokens,
            "rollout.max_response_tokens": sampled,
            "rollout.max_context_tokens": self.context_tokens,
            "rollout.trajectory_timeout_s": 3600,
            "rollout.concurrency": self.num_trajectories,
            "trainer.prompts_per_step": self.prompts,
            "trainer.eval_every": 0,
            "trainer.save_every": 0,
            "trainer.trajectories": "none",
            "trainer.run_dir": str(run_dir),
            "actor.lr": 1e-6,
            "telemetry.trackers": [],
            "telemetry.report": False,
            "telemetry.quiet": True,
        }
        return load([*(f"{key}={_literal(value)}" for key, value in own.items()), *settings])


def _literal(value: Any) -> str:
    """Write a value as the grammar of settings reads it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_literal, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return quote(value) if isinstance(value, str) else str(value)
