"""Play given actions against a hosted environment, and compare what it answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.env.base import Demonstration, ScriptedTurn
from agentrl.env.deadline import answer_within
from agentrl.env.hosted import Hosted
from agentrl.env.table import converted
from agentrl.errors import EnvError, EnvTimeout
from agentrl.types import Action, Message, Task, ToolCall, ToolResult, ToolStatus

MAX_TURNS = 64


@dataclass(slots=True, kw_only=True)
class Record:
    """What an environment answered, in order."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    def difference(self, other: Record) -> str | None:
        """Return the first difference in words; None where there is none."""
        for turn, (mine, theirs) in enumerate(zip(self.answers, other.answers, strict=False)):
            for name, value in mine.items():
                if value != theirs[name]:
                    where = "reset" if turn == 0 else f"step {turn}"
                    return f"{name} of {where} is {value!r}, then {theirs[name]!r}"
        if len(self.answers) != len(other.answers):
            return f"{len(self.answers) - 1} steps, then {len(other.answers) - 1}"
        return None


async def play(env: Hosted, task: Task, actions: Sequence[Action], seed: int) -> Record:
    """Reset ``env`` and take ``actions`` until the episode ends.

    Raises:
        EnvError, RewardError, InfrastructureError: see :class:`~agentrl.env.hosted.Hosted`.
    """
    record = Record()
    await _reset(env, task, seed, record)
    for action in actions:
        if record.ended:
            break
        await _step(env, action, record)
    return record


async def play_with_states(
    env: Hosted, task: Task, actions: Sequence[Action], seed: int
) -> tuple[Record, list[bytes]]:
    """As :func:`play`; return the state before every step too."""
    record, states = Record(), list[bytes]()
    await _reset(env, task, seed, record)
    for action in actions:
        if record.ended:
            break
        states.append(await env.snapshot())
        await _step(env, action, record)
    return record, states


async def play_on(
    env: Hosted, task: Task, actions: Sequence[Action], seed: int, played: Record, state: bytes
) -> Record:
    """Restore the state before the first of ``actions``, take them, and return the whole record.

    Args:
        actions: those that are left; as many as the steps that ``played`` has after ``state``.
        played: of the environment that gave ``state``.
    """
    await env.reset(seed=seed, options={"task": task})
    await env.restore(state)
    answers = played.answers[: len(played.answers) - len(actions)]
    answers[-1] = {**answers[-1], "anchor": await env.anchor()}
    record = Record(answers=answers)
    for action in actions:
        if record.ended:
            break
        await _step(env, action, record)
    return record


async def play_policy(
    env: Hosted, demonstration: Demonstration, seed: int, *, turn_timeout_s: float
) -> Record:
    """Let the policy of ``demonstration`` play ``env``, which has no tools, to its end.

    Raises:
        EnvError, RewardError, InfrastructureError: see :class:`~agentrl.env.hosted.Hosted`; or the
            policy raised, was late, or returned no turn.
    """
    record = Record()
    messages = await _reset(env, demonstration.task, seed, record)
    for _ in range(MAX_TURNS):
        turn = await _turn_of(demonstration, messages, turn_timeout_s)
        messages.append({"role": "assistant", "content": turn.content})
        action = Action(text=turn.content, content=turn.content)
        messages += await _step(env, action, record)
        if record.ended:
            break
    return record


async def _turn_of(
    demonstration: Demonstration, messages: list[Message], timeout_s: float
) -> ScriptedTurn:
    policy = demonstration.policy
    assert policy is not None

    def said() -> Any:
        with converted(f"demonstration {demonstration.task.id!r}", "its policy"):
            return policy(messages)

    try:
        turn = await answer_within(said, timeout_s)
    except TimeoutError:
        raise EnvTimeout(f"its policy did not return within {timeout_s:g} s") from None
    if not isinstance(turn, ScriptedTurn) or not isinstance(turn.content, str):
        raise EnvError(f"its policy returned {turn!r:.80}; a policy returns a ScriptedTurn")
    return turn


def demonstration_fault(item: Any) -> str | None:
    """Return what is wrong with what ``demonstrations`` yields; None where it can be played."""
    if not isinstance(item, Demonstration):
        return f"{item!r:.80} is a {type(item).__name__}"
    if not isinstance(item.task, Task):
        return f"{item!r:.80} has a task that is a {type(item.task).__name__}"
    if item.messages is None and item.policy is None:
        return f"the demonstration of task {item.task.id!r} has neither messages nor policy"
    try:
        actions_of(item)
        _spoken(item.messages or ())
    except Exception as error:  # whatever a user's list may hold
        return (
            f"the messages of the demonstration of task {item.task.id!r} cannot be read: "
            f"{type(error).__name__}: {error}"
        )
    return None


def actions_of(demonstration: Demonstration) -> list[Action]:
    """Return the assistant turns of a written demonstration, with the tools' answers in it."""
    actions: list[Action] = []
    for message in demonstration.messages or ():
        if message["role"] == "assistant":
            actions.append(_action(message))
        elif message["role"] == "tool" and actions:
            result = ToolResult(
                name=message.get("name", ""), content=message["content"], status=ToolStatus.OK
            )
            actions[-1].tool_results = (*actions[-1].tool_results, result)
    return actions


def departure(messages: Sequence[Message], record: Record) -> str | None:
    """Return where a written demonstration says other than its environment did; None: nowhere.

    Args:
        messages: the demonstration; what stands after its last assistant turn is not compared.
        record: of its assistant turns, played.

    Answers of tools are the demonstration's own: they are counted and not compared.
    """
    said: list[list[Message]] = [[]]
    calls: list[int] = []
    for message in messages:
        if message["role"] == "assistant":
            calls.append(len(message.get("tool_calls", [])))
            said.append([])
        else:
            said[-1].append(message)
    for turn, answer in enumerate(record.answers[: len(calls)]):
        where = "reset" if turn == 0 else f"step {turn}"
        if turn and (num_answers := _num_tool_messages(said[turn])) < calls[turn - 1]:
            return f"answers {num_answers} of the {calls[turn - 1]} tool calls before {where}"
        expected, got = _spoken(_messages(answer["observation"])), _spoken(said[turn])
        if got != expected:
            does = "opens with" if turn == 0 else "has"
            return f"{does} {_short(got)} where {where} returns {_short(expected)}"
    if record.ended and len(calls) >= len(record.answers):
        return f"has {len(calls)} turns where the episode ends after {len(record.answers) - 1}"
    return None


def odd_actions() -> list[Action]:
    """Return turns that a model may well produce and an environment must survive."""
    texts = ("", " \n", "\x00\u202e<|im_end|>", "9" * 5000, "x" * 100_000)
    call = ToolCall(name="no_such_tool", arguments={"x": [1, None]})
    result = ToolResult(name="no_such_tool", content="unknown tool", status=ToolStatus.ERROR)
    return [
        *(Action(text=text, content=text) for text in texts),
        Action(text="<tool_call>", content="", tool_calls=(call,), tool_results=(result,)),
    ]


def _action(message: Message) -> Action:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return Action(
        text=message["content"],
        content=message["content"],
        tool_calls=tuple(
            ToolCall(name=call["name"], arguments=dict(call["arguments"])) for call in calls
        ),
    )


async def _reset(env: Hosted, task: Task, seed: int, record: Record) -> list[Message]:
    observation, _ = await env.reset(seed=seed, options={"task": task})
    record.answers.append({"observation": observation, "anchor": await env.anchor()})
    return _messages(observation)


async def _step(env: Hosted, action: Action, record: Record) -> list[Message]:
    observation, reward, terminated, truncated, _ = await env.step(action)
    record.answers.append(
        {
            "observation": observation,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "anchor": await env.anchor(),
        }
    )
    record.ended = terminated or truncated
    return _messages(observation)


def _num_tool_messages(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "tool" for message in messages)


def _spoken(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Role and text of what is not the answer of a tool."""
    return [(item["role"], item["content"]) for item in messages if item["role"] != "tool"]


def _short(spoken: list[tuple[str, str]]) -> str:
    if not spoken:
        return "nothing"
    shown = [f"{role} {text if len(text) <= 80 else text[:77] + '...'!r}" for role, text in spoken]
    return ", ".join(shown)


def _messages(observation: Any) -> list[Message]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}] if observation else []
    return list(observation)
