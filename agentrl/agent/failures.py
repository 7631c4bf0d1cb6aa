"""From what went wrong to how an episode ended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import TypeVar

from agentrl.errors import (
    AgentRLError,
    EngineError,
    EnvError,
    EnvTimeout,
    InfrastructureError,
    RewardError,
    RewardServiceError,
    SandboxError,
    SandboxUnavailable,
)
from agentrl.types import GenerateRequest, Generation, StopReason

T = TypeVar("T")

_STOP_REASONS: tuple[tuple[type[AgentRLError], StopReason], ...] = (
    (EnvTimeout, StopReason.ENV_TIMEOUT),
    (EnvError, StopReason.ENV_ERROR),
    (RewardError, StopReason.REWARD_ERROR),
    (SandboxError, StopReason.SANDBOX_ERROR),
    (EngineError, StopReason.ENGINE_ERROR),
    (RewardServiceError, StopReason.REWARD_INFRA_ERROR),
    # Raised by environments whose thread or server was lost.
    (InfrastructureError, StopReason.ENV_ERROR),
)


def classify(error: AgentRLError) -> StopReason | None:
    """Return the stop reason of a failed episode; None for an error that must not become data.

    A machine on which no sandbox can work is such an error: every episode would fail alike.
    """
    if isinstance(error, SandboxUnavailable):
        return None
    return next((reason for kind, reason in _STOP_REASONS if isinstance(error, kind)), None)


def named(error: BaseException) -> str:
    """Return type and message of an error."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def from_env(env_id: str, call: Awaitable[T]) -> T:
    """Await a call of an environment; whatever it raises is an error with a type of ours."""
    try:
        return await call
    except (AgentRLError, asyncio.CancelledError):
        raise
    except Exception as error:
        raise EnvError(f"environment {env_id!r} raised {named(error)}") from error


def check_generation(generation: Generation, request: GenerateRequest) -> None:
    """Refuse a generation that breaks the engine's contract, before it enters a record.

    Raises:
        EngineError: says which rule was broken.
    """
    problem = _problem(generation, request)
    if problem is not None:
        raise EngineError(f"session {request.session_id}: the engine returned {problem}")


def _problem(generation: Generation, request: GenerateRequest) -> str | None:
    ids, logprobs, versions = generation.ids, generation.logprobs, generation.policy_version
    num_tokens = len(ids)
    if not num_tokens == len(logprobs) == len(versions):
        return f"{num_tokens} ids, {len(logprobs)} logprobs and {len(versions)} versions"
    if generation.stop_reason not in (StopReason.STOP, StopReason.LENGTH, StopReason.ABORT):
        return f"the stop reason {generation.stop_reason}"
    if num_tokens == 0:
        return None if generation.stop_reason is StopReason.ABORT else "no token"
    if num_tokens > request.sampling.max_tokens:
        return f"{num_tokens} tokens where at most {request.sampling.max_tokens} were asked for"
    stopped = generation.stop_reason is StopReason.STOP
    if stopped and ids[-1] not in request.sampling.stop_token_ids:
        return f"stop reason 'stop' with the last id {ids[-1]}, which is no stop token"
    if min(ids) < 0 or min(versions) < 0:
        return "a negative id or policy version"
    if not math.isfinite(sum(logprobs)):
        return "a log-probability that is not finite"
    return None
