"""Synthetic trajectories: valid to the last field, cheap, and a pure function of their seed.

For tests and demonstrations of everything that consumes trajectories (metrics, storage, reports)
without an engine. The story they tell is a programming task with a ``python`` tool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.types import (
    Message,
    Score,
    Segment,
    StopReason,
    Task,
    TokenRole,
    ToolCall,
    ToolResult,
    ToolStatus,
    Trajectory,
    Turn,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OPERATIONS = {
    "doubles every element": "[2 * x for x in xs]",
    "keeps the even elements": "[x for x in xs if x % 2 == 0]",
    "reverses the list": "xs[::-1]",
    "returns the running sums": "[sum(xs[: i + 1]) for i in range(len(xs))]",
    "removes duplicates, first ones stay": "list(dict.fromkeys(xs))",
    "sorts by absolute value": "sorted(xs, key=abs)",
}
_SYSTEM = "You solve programming tasks. Try your code with the python tool, then submit."
_ROLES = {
    "system": TokenRole.SYSTEM,
    "user": TokenRole.USER,
    "tool": TokenRole.TOOL,
    "assistant": TokenRole.ASSISTANT,
}


def make_task(seed: int) -> Task:
    """Return one of the synthetic programming tasks, tagged by level."""
    names = list(OPERATIONS)
    operation = names[seed % len(names)]
    return Task(
        id=f"task-{seed:05d}",
        data={"operation": operation, "tests": 4},
        tags={"level": str(1 + seed % 3), "family": operation.split()[0]},
    )


def make_trajectory(
    *,
    seed: int,
    identity: str | None = None,
    success: bool | None = None,
    stop_reason: StopReason = StopReason.TERMINATED,
    num_turns: int | None = None,
    env_id: str = "code_sandbox",
    task: Task | None = None,
    group_id: str | None = None,
    sample_index: int = 0,
    attempt: int = 0,
    policy_version: int = 0,
    tool_status: ToolStatus | None = None,
    tool_output: str | None = None,
) -> Trajectory:
    """Build one trajectory.

    Args:
        seed: decides everything that is not given.
        identity: trajectory id.
        success: outcome; drawn where None, ignored where ``stop_reason`` is a failure.
        stop_reason: how it ends.
        num_turns: assistant turns, 1 to 4 where None.
        env_id: environment.
        task: :func:`make_task` of the seed where None.
        group_id: the task's id and the policy version where None.
        sample_index: place in the group.
        attempt: 0 for the first.
        policy_version: of every sampled token.
        tool_status: of every tool call; mostly ok where None.
        tool_output: text of every tool answer.
    """
    rng = np.random.default_rng(seed)
    task = task or make_task(seed)
    turns_wanted = num_turns or int(rng.integers(1, 5))
    succeeded = bool(rng.random() < 0.5) if success is None else success
    code = OPERATIONS.get(str(task.data.get("operation")), "xs")
    record = _Record(rng, policy_version)
    record.add("system", _SYSTEM)
    record.add("user", f"Write solve(xs) that {task.data.get('operation')}.")
    turns = []
    for index in range(turns_wanted):
        last = index == turns_wanted - 1
        tried = code if succeeded and index >= turns_wanted - 2 else f"{code}  # attempt {index}"
        calls = [] if last else [ToolCall(name="python", arguments={"code": f"print({tried})"})]
        text = f"I submit:\n```python\ndef solve(xs):\n    return {tried}\n```"
        start, end = record.add_turn(_call_text(calls[0]) if calls else text, calls)
        status = tool_status or (ToolStatus.ERROR if rng.random() < 0.1 else ToolStatus.OK)
        passed = 4 if succeeded else int(rng.integers(0, 4))
        output = tool_output or f"{passed} of 4 visible tests passed – ✓"
        results = [
            ToolResult(name=call.name, content=output, status=status, duration_s=rng.random() / 20)
            for call in calls
        ]
        for result in results:
            record.add("tool", result.content, name=result.name)
        turns.append(
            Turn(
                index=index,
                segment=0,
                start=start,
                end=end,
                stop_reason=StopReason.STOP,
                reward=0.0 if last else round(0.05 * passed / 4, 4),
                tool_calls=calls,
                tool_results=results,
                terminated=last and stop_reason is StopReason.TERMINATED,
                truncated=last and stop_reason.is_truncation,
                timings_s={
                    "generate": float(rng.random()) / 5,
                    "tools": float(rng.random()) / 20,
                    "env": float(rng.random()) / 100,
                },
            )
        )
    fraction = 1.0 if succeeded else float(rng.integers(0, 4)) / 4
    return Trajectory(
        id=identity or f"{task.id}/{sample_index}/{attempt}/{seed}",
        env_id=env_id,
        task=task,
        group_id=group_id or f"{task.id}@{policy_version}",
        sample_index=sample_index,
        attempt=attempt,
        seed=seed,
        segments=[record.segment()],
        turns=turns,
        messages=record.messages,
        stop_reason=stop_reason,
        error=f"{stop_reason}: synthetic failure" if stop_reason.is_failure else None,
        score=None
        if stop_reason.is_failure
        else Score(reward=fraction, success=succeeded, parts={"tests_passed": fraction}),
        drift=int(rng.random() < 0.05),
        wall_clock_limited=stop_reason is StopReason.TRAJECTORY_TIMEOUT,
        timings_s={"total": float(sum(sum(turn.timings_s.values()) for turn in turns))},
    )


@cache
def synthetic_tokenizer() -> Tokenizer:
    """A byte-level BPE of some hundred tokens, trained on the texts of :func:`make_trajectory`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    corpus = [
        _SYSTEM,
        _call_text(ToolCall(name="python", arguments={"code": "print(xs)"})),
        "I submit:\n```python\ndef solve(xs):\n    return xs\n```",
        "system user assistant tool 4 of 4 visible tests passed",
        *(f"Write solve(xs) that {name}. {code}" for name, code in OPERATIONS.items()),
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus * 3, trainer)
    return tokenizer


def make_advantages(trajectories: Sequence[Trajectory]) -> dict[str, list[np.ndarray]]:
    """Group-normalised outcome advantages, broadcast over sampled tokens, float32 [T] each."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        if not trajectory.failed:
            groups.setdefault(trajectory.group_id, []).append(trajectory)
    advantages: dict[str, list[np.ndarray]] = {}
    for members in groups.values():
        rewards = np.array([member.total_reward for member in members])
        scaled = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for member, value in zip(members, scaled, strict=True):
            advantages[member.id] = [
                (segment.loss_mask * value).astype(np.float32) for segment in member.segments
            ]
    return advantages


def make_trainer_logprobs(
    trajectories: Sequence[Trajectory], *, seed: int, noise: float = 1e-6
) -> dict[str, list[np.ndarray]]:
    """The engine's log-probabilities with rounding of size ``noise``; NaN where none was sampled.

    float32 [T] for each segment.
    """
    rng = np.random.default_rng(seed)
    return {
        trajectory.id: [
            np.where(
                part.loss_mask, part.logprobs + noise * rng.normal(size=len(part)), np.nan
            ).astype(np.float32)
            for part in trajectory.segments
        ]
        for trajectory in trajectories
    }


def _call_text(call: ToolCall) -> str:
    code = call.arguments["code"]
    return (
        "Let me try it.\n<tool_call>\n"
        f'{{"name": "{call.name}", "arguments": {{"code": "{code}"}}}}\n</tool_call>'
    )


class _Record:
    """Grows messages and tokens together, in the ChatML form."""

    def __init__(self, rng: np.random.Generator, policy_version: int) -> None:
        self.messages: list[Message] = []
        self._rng = rng
        self._version = policy_version
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("ids", "loss_mask", "logprobs", "policy_version", "roles")
        }

    def add(self, role: str, content: str, **extra: str) -> None:
        self.messages.append(_message(role, content, extra))
        self._extend(f"<|im_start|>{role}\n{content}<|im_end|>\n", _ROLES[role])

    def add_turn(self, content: str, calls: list[ToolCall]) -> tuple[int, int]:
        extra = {
            "tool_calls": [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        }
        self.messages.append(_message("assistant", content, extra if calls else {}))
        self._extend("<|im_start|>assistant\n", TokenRole.ASSISTANT)
        start = len(self._columns["ids"])
        self._extend(f"{content}<|im_end|>", TokenRole.SAMPLED)
        end = len(self._columns["ids"])
        self._extend("\n", TokenRole.ASSISTANT)
        return start, end

    def segment(self) -> Segment:
        return Segment(
            ids=np.array(self._columns["ids"], np.int64),
            loss_mask=np.array(self._columns["loss_mask"], np.bool_),
            logprobs=np.array(self._columns["logprobs"], np.float32),
            policy_version=np.array(self._columns["policy_version"], np.int32),
            roles=np.array(self._columns["roles"], np.int8),
        )

    def _extend(self, text: str, role: TokenRole) -> None:
        ids = synthetic_tokenizer().encode(text).ids
        sampled = role is TokenRole.SAMPLED
        self._columns["ids"] += ids
        self._columns["loss_mask"] += [sampled] * len(ids)
        logprobs = -self._rng.exponential(0.3, len(ids)) if sampled else np.zeros(len(ids))
        self._columns["logprobs"] += logprobs.tolist()
        self._columns["policy_version"] += [self._version if sampled else -1] * len(ids)
        self._columns["roles"] += [int(role)] * len(ids)


def _message(role: str, content: str, extra: Mapping[str, Any]) -> Message:
    return {"role": role, "content": content, **extra}  # type: ignore[typeddict-item]
