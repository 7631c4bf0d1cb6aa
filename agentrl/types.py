"""The contract types: what the parts of agentrl hand to each other.

Legend for shapes: ``T`` tokens of one segment, ``K`` turns of one trajectory, ``G`` samples per
prompt. Nothing here imports torch; arrays are numpy.

* :class:`GenerateRequest` -> :class:`Generation`: tokens in, tokens out.
* :class:`Action`: what the model said in one turn, parsed, with the tools' answers.
* :class:`Trajectory`: one episode, token-exact, with turns as first-class objects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NotRequired, Protocol, TypedDict

import numpy as np

# --------------------------------------------------------------------------- messages


class Message(TypedDict):
    """A chat message as templates see it."""

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]
    """``[{"type": "function", "function": {"name": str, "arguments": dict}}]``."""
    name: NotRequired[str]
    """The tool that answers, on ``tool`` messages."""


class StopReason(StrEnum):
    """Every way a turn or a trajectory can end."""

    # How the generation of one turn ended.
    STOP = "stop"
    """The model emitted a stop token."""
    LENGTH = "length"
    """``rollout.max_turn_tokens`` or a budget below it was used up inside a turn."""
    ABORT = "abort"
    """The engine was told to abort the request."""

    # How a trajectory ended by design.
    TERMINATED = "terminated"
    """The environment ended the episode: never bootstrapped."""
    TRUNCATED = "truncated"
    """The environment cut the episode short."""
    MAX_TURNS = "max_turns"
    MAX_RESPONSE_TOKENS = "max_response_tokens"
    MAX_CONTEXT_TOKENS = "max_context_tokens"
    TRAJECTORY_TIMEOUT = "trajectory_timeout"

    # How a trajectory failed: data with a type, kept out of the group's baseline.
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    TOOL_INFRA_ERROR = "tool_infra_error"
    SANDBOX_ERROR = "sandbox_error"
    ENGINE_ERROR = "engine_error"
    REWARD_ERROR = "reward_error"
    REWARD_INFRA_ERROR = "reward_infra_error"
    """A judge or reward model could not be reached."""
    CANCELLED = "cancelled"
    CUT = "cut"
    """Nobody waited for it any more: its group was a straggler (``rollout.stragglers=cut``)."""

    @property
    def is_failure(self) -> bool:
        """True where no reward may be drawn from the trajectory."""
        return self in _FAILURES

    @property
    def is_truncation(self) -> bool:
        """True where a limit, not the environment's verdict, ended the episode."""
        return self in _TRUNCATIONS


_FAILURES = frozenset(
    {
        StopReason.ENV_ERROR,
        StopReason.ENV_TIMEOUT,
        StopReason.TOOL_INFRA_ERROR,
        StopReason.SANDBOX_ERROR,
        StopReason.ENGINE_ERROR,
        StopReason.REWARD_ERROR,
        StopReason.REWARD_INFRA_ERROR,
        StopReason.CANCELLED,
        StopReason.CUT,
        StopReason.ABORT,
    }
)
_TRUNCATIONS = frozenset(
    {
        StopReason.TRUNCATED,
        StopReason.MAX_TURNS,
        StopReason.MAX_RESPONSE_TOKENS,
        StopReason.MAX_CONTEXT_TOKENS,
        StopReason.TRAJECTORY_TIMEOUT,
        StopReason.LENGTH,
    }
)


# --------------------------------------------------------------------------- generation


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one turn."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; log-probabilities are then those at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """63 bits. Token ``i`` is a pure function of (logits, seed, i): arrival order is irrelevant."""
    first_index: int = 0
    """Number ``i`` of the first token that is sampled: a turn that continues after ``n`` tokens,
    which then stand at the end of the prompt, says ``n``."""


@dataclass(slots=True, frozen=True, kw_only=True)
class GenerateRequest:
    """One turn to generate. ``prompt_ids`` is the whole record so far."""

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    session_id: str
    """One per trajectory segment: an engine may keep its KV cache from turn to turn."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Generation:
    """What the model produced, stop token included where it emitted one."""

    ids: list[int]
    logprobs: list[float]
    """Of each id under the distribution sampled from (after temperature)."""
    policy_version: list[int]
    stop_reason: StopReason
    """``STOP``, ``LENGTH`` or ``ABORT``."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt whose keys and values the engine still had; None where it does not
    say."""


class GenerateFn(Protocol):
    """All that an agent loop knows of an engine."""

    def __call__(self, request: GenerateRequest) -> Awaitable[Generation]:
        """Generate one turn.

        Raises:
            EngineError: the request was refused or lost.
        """
        ...


# --------------------------------------------------------------------------- actions, tools


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """One call as parsed from the model's text."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None
    """Why the call could not be parsed; the model is told so and nothing runs."""


class ToolStatus(StrEnum):
    """How a tool call ended."""

    OK = "ok"
    ERROR = "error"
    """The model's mistake (bad arguments, unknown tool, limit reached): shown to it as text."""
    TIMEOUT = "timeout"
    INFRA_ERROR = "infra_error"
    """Our failure: the trajectory is data with a failure status, never reward 0."""


@dataclass(slots=True, kw_only=True)
class ToolResult:
    """What the model is shown for one call."""

    name: str
    content: str
    status: ToolStatus
    duration_s: float = 0.0
    truncated_tokens: int = 0
    reward: float = 0.0
    """What the tool paid for the call."""
    retries: int = 0
    """Times that it was called again after an infrastructure failure."""
    breaker_open: bool = False
    """Not called, since too many calls before it had failed on our side."""
    cut_short: bool = False
    """Answered, but a limit of the tool's own ended its work before it was done: a cell that ran
    out of time, memory or output."""


@dataclass(slots=True, kw_only=True)
class Action:
    """What the model said in one turn, and what the tools answered."""

    text: str
    """The decoded turn without its stop token."""
    content: str
    """The text outside tool calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    """One per call, in order."""
    truncated: bool = False
    """The turn hit a token limit before the model stopped."""


# --------------------------------------------------------------------------- tasks, scores


@dataclass(slots=True, frozen=True, kw_only=True)
class Task:
    """One thing to solve. Picklable and JSON-able, so that it can be stored and re-issued."""

    id: str
    """Unique within the environment; seeds derive from it."""
    data: Mapping[str, Any]
    tags: Mapping[str, str] = field(default_factory=dict)
    """Strata to report by, for example ``{"level": "1", "readings": "2"}``."""


BUILT_IN_REWARDS = ("outcome", "turn", "tool")
"""What every episode may earn, by the names that no part of a rubric may have."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Score:
    """The outcome of an episode."""

    reward: float
    success: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components, for metrics."""
    turn_rewards: Sequence[float] = ()
    """Added to the rewards of the turns, in order: what only the grader can tell of them."""
    tampering: Sequence[str] = ()
    """Patterns of reward hacking that were seen: counted in ``tampering/...``, not paid."""


# --------------------------------------------------------------------------- trajectories


class TokenRole(IntEnum):
    """Whose token it is; ``SAMPLED`` exactly where the loss mask is 1."""

    SYSTEM = 0
    USER = 1
    TOOL = 2
    ASSISTANT = 3
    """Assistant tokens that the policy did not sample here: headers, closing tokens, history."""
    SAMPLED = 4


@dataclass(slots=True, kw_only=True)
class Segment:
    """A flat run of tokens with one row of context.

    All arrays have shape [T]. ``loss_mask`` is 1 exactly on tokens that the policy sampled in
    this segment; ``logprobs`` is 0.0 and ``policy_version`` -1 elsewhere.
    """

    ids: np.ndarray
    """int64"""
    loss_mask: np.ndarray
    """bool"""
    logprobs: np.ndarray
    """float32"""
    policy_version: np.ndarray
    """int32"""
    roles: np.ndarray
    """int8, :class:`TokenRole`"""

    def __len__(self) -> int:
        """T."""
        return len(self.ids)


@dataclass(slots=True, kw_only=True)
class Turn:
    """One assistant turn."""

    index: int
    segment: int
    start: int
    """First sampled token, as an offset into the segment."""
    end: int
    """One past the last sampled token."""
    stop_reason: StopReason
    """How the generation ended."""
    reward: float = 0.0
    """What ``env.step`` paid for this turn."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_results: list[ToolResult] = field(default_factory=list)
    error: str | None = None
    anchor: str | None = None
    terminated: bool = False
    truncated: bool = False
    inherited: bool = False
    """Sampled in the trajectory that this one branched off from: no tokens of its own here
    (``start == end``), but its reward counts in the return."""
    timings_s: dict[str, float] = field(default_factory=dict)
    """``start``, from the beginning of the episode; ``generate``, ``tools``, ``env``, which follow
    on each other."""


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One episode: what was said, token for token, and what it was worth."""

    id: str
    env_id: str
    task: Task
    group_id: str
    """Shared by the samples of one prompt."""
    sample_index: int
    attempt: int
    seed: int
    segments: list[Segment]
    turns: list[Turn]
    messages: list[Message]
    stop_reason: StopReason
    error: str | None = None
    """Type and message of a failure."""
    score: Score | None = None
    """None where the trajectory failed."""
    drift: int = 0
    """Turns whose text the chat template would have rendered otherwise."""
    wall_clock_limited: bool = False
    """True where a wall-clock limit shaped the result: reproduction is then void."""
    parent: int | None = None
    """``sample_index`` of the member of the group that it branched off from, which sampled the last
    turn before the branch; None for an episode that was played from its start."""
    branch_turn: int = 0
    """Turns before the branch; those are inherited. 0 for a branch at the first prompt too."""
    timings_s: dict[str, float] = field(default_factory=dict)
    """``began``, on the monotonic clock of the machine that played it; ``total``, and sums of the
    turns' and of what came before and after them: ``env``, ``generate``, ``tools``, ``reward``."""

    @property
    def failed(self) -> bool:
        """True where the trajectory carries no reward and leaves its group's baseline."""
        return self.stop_reason.is_failure

    @property
    def total_reward(self) -> float:
        """Outcome reward, rewards of the turns and of the tools; 0.0 for a failed trajectory."""
        if self.score is None:
            return 0.0
        tools = sum(result.reward for turn in self.turns for result in turn.tool_results)
        return self.score.reward + sum(turn.reward for turn in self.turns) + tools

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy produced, over all segments."""
        return sum(int(segment.loss_mask.sum()) for segment in self.segments)


@dataclass(slots=True, kw_only=True)
class TrajectoryGroup:
    """The samples of one prompt, in order of ``sample_index``."""

    id: str
    task: Task
    env_id: str
    trajectories: list[Trajectory]
    policy_version: int
    """Version that was being sampled when the group was dispatched."""
    index: int = -1
    """Position of the prompt in the run's stream of prompts; -1 where it comes from none."""
    discarded: list[Trajectory] = field(default_factory=list)
    """Failed attempts that were run again: data for the record, never trained."""
    baseline: Trajectory | None = None
    """A greedy episode of the prompt, where the estimator compares with one. Never trained."""
    gave_up: bool = False
    """Too many members failed for the failure policy: data for the record, never trained."""
    cut: bool = False
    """The steps that could have trained it did not wait for it: data for the record, too."""

    @property
    def recorded(self) -> list[Trajectory]:
        """Everything that was played: members, the greedy baseline, discarded attempts."""
        baseline = [] if self.baseline is None else [self.baseline]
        return [*self.trajectories, *baseline, *self.discarded]


GREEDY_INDEX = -1
"""``sample_index`` of the greedy episode of a group."""
