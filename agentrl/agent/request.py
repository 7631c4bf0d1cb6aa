"""What an episode is asked to be."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.types import Task


@dataclass(slots=True, frozen=True, kw_only=True)
class EpisodeRequest:
    """What to play. The seed decides everything that is sampled."""

    env_id: str
    task: Task
    seed: int
    group_id: str = "single"
    sample_index: int = 0
    attempt: int = 0
    temperature: float = 1.0

    @property
    def trajectory_id(self) -> str:
        """Unique among the episodes of a run; also the engine's session."""
        return f"{self.group_id}/{self.sample_index}.{self.attempt}"
