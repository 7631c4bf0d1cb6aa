"""Conversations from an environment's scripted episodes.

A demonstration that brings its messages is taken as it is. Another one is played: its policy
against the real environment with the real tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from agentrl.agent.loop import AgentLoop, EpisodeRequest, LoopLimits
from agentrl.agent.renderer import Renderer
from agentrl.agent.template import ToolSchema
from agentrl.env.base import Demonstration
from agentrl.env.config import EnvConfig
from agentrl.env.host import EnvHosts
from agentrl.errors import AgentRLError, DataError, EngineError, EnvError
from agentrl.sandbox.base import SandboxProvider
from agentrl.seeding import derive_seed
from agentrl.tool.binding import Toolbox
from agentrl.train.sft_data import ChatExample, check_messages
from agentrl.types import GenerateRequest, Generation, Message

_AT_ONCE = 64
MAX_FAILED_FRACTION = 0.1
"""Episodes that may fail while demonstrations are played; more is an error."""

# Wide enough never to end a scripted episode that its environment would not.
_LIMITS = LoopLimits(
    max_turns=64,
    max_turn_tokens=65_536,
    max_response_tokens=262_144,
    max_context_tokens=1_048_576,
)


@dataclass(slots=True, frozen=True, kw_only=True)
class FailedEpisode:
    """What came of a demonstration that could not be played."""

    cause: str


class Play(Protocol):
    """Plays the policy of one demonstration."""

    async def __call__(
        self, demonstration: Demonstration, index: int
    ) -> Sequence[Message] | FailedEpisode:
        """Return the conversation, or why there is none."""
        ...


async def collect_demonstrations(
    env: Any,
    split: str,
    *,
    seed: int,
    count: int,
    tools: Sequence[ToolSchema],
    play: Play,
    on_progress: Callable[[int], None] | None = None,
) -> list[ChatExample]:
    """Return ``count`` conversations of the environment's demonstrations, in its order.

    Episodes that fail are left out, up to :data:`MAX_FAILED_FRACTION`.

    Args:
        env: an instance of the environment.
        tools: schemas of the tools that the model is told of.
        play: called for demonstrations without messages.
        on_progress: called with the number of conversations so far.

    Raises:
        EnvError: the environment has no demonstrations, too few, broken ones, or too many failed.
    """
    source = f"demonstrations({split!r}, seed={seed}) of {type(env).__name__}"
    demonstrations = _iterate(env, split, seed, source)
    examples: list[ChatExample] = []
    num_drawn = 0
    failed: list[FailedEpisode] = []
    while len(examples) < count:
        drawn = list(islice(demonstrations, min(_AT_ONCE, count - len(examples))))
        if not drawn:
            raise EnvError(f"{source} ended after {num_drawn}; it must go on without end")
        played = await asyncio.gather(
            *(_messages(item, num_drawn + i, source, play) for i, item in enumerate(drawn))
        )
        num_drawn += len(drawn)
        for found in played:
            if isinstance(found, FailedEpisode):
                failed.append(found)
            else:
                examples.append(ChatExample(messages=found, tools=tools, source=source))
        if len(failed) > MAX_FAILED_FRACTION * max(num_drawn, _AT_ONCE):
            raise EnvError(
                f"{source}: {len(failed)} of {num_drawn} episodes failed while they were played, "
                f"the first with {failed[0].cause}; where that is the environment's own fault, "
                "`agentrl envs check` shows more of it"
            )
        if on_progress is not None:
            on_progress(len(examples))
    return examples


@asynccontextmanager
async def open_player(
    env: EnvConfig,
    *,
    toolbox: Toolbox,
    sandboxes: SandboxProvider,
    renderer: Renderer,
    seed: int,
) -> AsyncIterator[Play]:
    """Open what scripted policies are played with; leaving closes every environment.

    Args:
        renderer: of any tokenizer; the conversations are text again afterwards.
        seed: the episodes' seeds derive from it.
    """
    hosts = EnvHosts(env)
    loop = AgentLoop(
        generate=_no_model,
        renderer=renderer,
        toolbox=toolbox,
        sandboxes=sandboxes,
        limits=_LIMITS,
    )

    async def play(demonstration: Demonstration, index: int) -> Sequence[Message] | FailedEpisode:
        request = EpisodeRequest(
            env_id=env.id,
            task=demonstration.task,
            seed=derive_seed(seed, "demonstration", index),
            group_id=f"demonstration-{index}",
        )
        hosted = await hosts.open()
        trajectory = await loop.run(hosted, request, policy=demonstration.policy)
        if trajectory.failed:
            return FailedEpisode(cause=trajectory.error or str(trajectory.stop_reason))
        return trajectory.messages

    try:
        yield play
    finally:
        await hosts.close()


async def _no_model(request: GenerateRequest) -> Generation:
    raise EngineError("a demonstration asked for a model; its policy must answer every turn")


async def _messages(
    demonstration: Any, index: int, source: str, play: Play
) -> Sequence[Message] | FailedEpisode:
    if not isinstance(demonstration, Demonstration):
        raise EnvError(
            f"{source} yielded {type(demonstration).__name__}, want a Demonstration (item {index})"
        )
    messages = demonstration.messages
    if messages is None:
        if demonstration.policy is None:
            raise EnvError(f"{source}: item {index} has neither messages nor a policy")
        messages = await play(demonstration, index)
        if isinstance(messages, FailedEpisode):
            return messages
    try:
        return check_messages(messages, f"{source}, item {index}")
    except DataError as error:
        raise EnvError(str(error)) from error


def _iterate(env: Any, split: str, seed: int, source: str) -> Iterator[Any]:
    """Call ``demonstrations``, with whatever it raises turned into an error with a name."""
    if not hasattr(env, "demonstrations"):
        raise EnvError(
            f"{type(env).__name__} has no demonstrations, which a model without any training "
            "needs: implement demonstrations(split, seed), or set model.path to a trained model"
        )
    try:
        yield from env.demonstrations(split, seed)
    except AgentRLError:
        raise
    except Exception as error:
        raise EnvError(f"{source} raised {type(error).__name__}: {error}") from error
