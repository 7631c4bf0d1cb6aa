"""Which replica serves a request.

**The rule.** A turn goes to the replica that holds most of its prompt: the one that served the
session's last turn or, for a first turn, the one that was given the same prompt last (the samples
of a group). That is its home. The turn leaves home where home has no room, or where

    requests(home) - requests(idlest) > affinity_slack + prompt_tokens / affinity_tokens

that is, where home is further ahead than the prompt in its cache is worth. It then goes to the
idlest replica that has room, the lowest number among equals, which is the session's home from then
on. A replica that is lost is nobody's home any more.

So the idlest replica never starves while sessions queue elsewhere, a long prompt moves later than a
short one, and sessions that have moved do not come back on the next turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.types import GenerateRequest

MAX_PROMPTS = 4096
"""First prompts whose home is remembered; beyond it the oldest is forgotten."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Load:
    """How busy a replica is."""

    requests: int
    """That it works at."""
    room: int
    """That it can take besides."""


class Router:
    """Chooses replicas by the rule of this module.

    Args:
        affinity_slack, affinity_tokens: see the rule.

    Attributes:
        num_kept: turns that went home.
        num_moved: turns that had a home and left it.
    """

    def __init__(self, *, affinity_slack: int, affinity_tokens: int) -> None:
        self._slack = affinity_slack
        self._tokens = affinity_tokens
        self._sessions: dict[str, int] = {}
        self._prompts: OrderedDict[int, int] = OrderedDict()
        self.num_kept = self.num_moved = 0

    def choose(self, request: GenerateRequest, loads: Mapping[int, Load]) -> int | None:
        """Return the number of the replica that serves a request, and remember it.

        Args:
            loads: number -> load, of the replicas that serve.

        Returns:
            None where none has room.
        """
        free = {number: load for number, load in loads.items() if load.room > 0}
        if not free:
            return None
        idlest = min(free, key=lambda number: (free[number].requests, number))
        home = self.home(request)
        chosen = idlest
        if home in free:
            ahead = free[home].requests - free[idlest].requests
            if ahead <= self._slack + len(request.prompt_ids) / self._tokens:
                chosen = home
        if home is not None:
            self.num_kept += chosen == home
            self.num_moved += chosen != home
        self._remember(request, chosen)
        return chosen

    def home(self, request: GenerateRequest) -> int | None:
        """Return the replica that holds most of a request's prompt, as far as known."""
        home = self._sessions.get(request.session_id)
        return self._prompts.get(_key(request)) if home is None else home

    def home_of(self, session_id: str) -> int | None:
        """Return the replica that served a session last."""
        return self._sessions.get(session_id)

    def end_session(self, session_id: str) -> None:
        """Forget a session."""
        self._sessions.pop(session_id, None)

    def forget_replica(self, number: int) -> None:
        """Forget everything that was at a replica: its cache is gone."""
        self._sessions = {key: home for key, home in self._sessions.items() if home != number}
        for key in [key for key, home in self._prompts.items() if home == number]:
            del self._prompts[key]

    def _remember(self, request: GenerateRequest, chosen: int) -> None:
        if request.session_id not in self._sessions:
            key = _key(request)
            self._prompts[key] = chosen
            self._prompts.move_to_end(key)
            if len(self._prompts) > MAX_PROMPTS:
                self._prompts.popitem(last=False)
        self._sessions[request.session_id] = chosen


def _key(request: GenerateRequest) -> int:
    return hash(tuple(request.prompt_ids))
