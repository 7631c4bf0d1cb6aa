"""Where an episode can be branched from: everything that was true before one of its turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.agent.conversation import Conversation
from agentrl.types import Turn


@dataclass(slots=True, frozen=True, kw_only=True)
class BranchPoint:
    """The state in which the model was about to speak turn ``len(turns)`` of an episode.

    Another episode can go on from here (:attr:`agentrl.agent.request.EpisodeRequest.branch`). It
    holds the conversation of the episode it was taken in, so keep it no longer than branches are
    sampled.
    """

    sample_index: int
    """The episode it was taken in."""
    env_seed: int
    """With which the environment was reset, before it was restored to ``state``."""
    state: bytes
    """What the environment's ``snapshot`` gave."""
    info: Mapping[str, Any]
    """Of the last ``step`` (of ``reset`` if there was none)."""
    turns: Sequence[Turn]
    """Copies of the turns so far, marked as inherited; rewards as ``step`` paid them, before any
    grader added to them."""
    num_sampled: int
    """Tokens of these turns."""
    num_calls: Mapping[str, int]
    """Calls so far, by tool: limits hold for the whole episode."""
    conversation: Conversation
    """Of the episode it was taken in; it has grown since."""
    num_tokens: int
    """Its length here, in tokens of the record."""
    num_messages: int
    """Its length here, in messages."""

    def inherited_turns(self) -> list[Turn]:
        """Return turns that a branch may change."""
        return [dataclasses.replace(turn) for turn in self.turns]

    def begun_conversation(self) -> Conversation:
        """Return a conversation that goes on from here; what was sampled before is context."""
        return self.conversation.branch(num_tokens=self.num_tokens, num_messages=self.num_messages)


def as_inherited(turn: Turn) -> Turn:
    """Return a copy of a turn as a branch sees it: nothing of it was sampled or timed there."""
    return dataclasses.replace(turn, end=turn.start, inherited=True, timings_s={})
