"""One turn, from the engine or from a scripted policy."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from agentrl.agent.conversation import Conversation
from agentrl.agent.failures import check_generation, named
from agentrl.agent.messages import scripted_message
from agentrl.agent.renderer import Renderer
from agentrl.agent.request import EpisodeRequest
from agentrl.env.base import ScriptedPolicy
from agentrl.errors import AgentRLError, EngineError, EnvError
from agentrl.seeding import derive_seed
from agentrl.types import GenerateFn, GenerateRequest, Generation, SamplingParams, StopReason

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True, kw_only=True)
class Sampling:
    """How turns are sampled, whatever the episode."""

    top_p: float = 1.0
    top_k: int = 0


async def sample_turn(
    generate: GenerateFn,
    conversation: Conversation,
    request: EpisodeRequest,
    *,
    turn: int,
    max_tokens: int,
    sampling: Sampling,
    stop_token_ids: tuple[int, ...],
) -> Generation:
    """Ask the engine for turn ``turn``.

    Raises:
        EngineError: it lost the request, raised, or broke its contract.
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=stop_token_ids,
        seed=derive_seed(request.seed, turn),
    )
    asked = GenerateRequest(
        prompt_ids=conversation.prompt_ids(), sampling=params, session_id=request.trajectory_id
    )
    try:
        generation = await generate(asked)
    except (AgentRLError, asyncio.CancelledError):
        raise
    except Exception as error:
        logger.exception("the engine failed in %s", request.trajectory_id)
        raise EngineError(f"the engine raised {named(error)}") from error
    check_generation(generation, asked)
    return generation


def scripted_turn(
    policy: ScriptedPolicy, conversation: Conversation, renderer: Renderer, *, max_tokens: int
) -> Generation:
    """Let a scripted policy say a turn, in the ids with which a model would say it.

    Raises:
        EnvError: the policy raised, or said more than the limits allow (never cut: a
            demonstration that was cut would teach to stop in mid-sentence).
    """
    try:
        message = scripted_message(policy(conversation.messages))
    except AgentRLError:
        raise
    except Exception as error:
        raise EnvError(f"the scripted policy raised {named(error)}") from error
    ids, _ = renderer.encode_answer(message, conversation.tools)
    if len(ids) > max_tokens:
        raise EnvError(
            f"a scripted turn has {len(ids)} tokens where {max_tokens} are left; raise "
            "rollout.max_turn_tokens, max_response_tokens or max_context_tokens"
        )
    return Generation(
        ids=ids,
        logprobs=[0.0] * len(ids),
        policy_version=[0] * len(ids),
        stop_reason=StopReason.STOP,
    )
