"""What an episode is asked to be."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.agent.branch import BranchPoint
from agentrl.agent.cut import Cut
from agentrl.types import GREEDY_INDEX, Task


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
    branch: BranchPoint | None = None
    """Where to go on from; None plays the episode from its start."""
    branch_points: list[BranchPoint] | None = None
    """Filled with the states before the turns of the episode, in order; None takes no snapshots.
    The first one of a branch is left out: it stands in the list of the episode it came from."""
    cut: Cut = field(default_factory=Cut)
    """Ends the episode early."""

    @property
    def trajectory_id(self) -> str:
        """Unique among the episodes of a run; also the engine's session."""
        name = "greedy" if self.sample_index == GREEDY_INDEX else str(self.sample_index)
        return f"{self.group_id}/{name}.{self.attempt}"
