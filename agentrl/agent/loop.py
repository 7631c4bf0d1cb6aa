"""The agent loop: generate, parse, run tools, step the environment, append; until it ends.

::

    loop = AgentLoop(generate=engine.generate, renderer=Renderer(tokenizer), toolbox=Toolbox(tools),
                     sandboxes=pool, limits=LoopLimits(max_turns=4))
    trajectory = await loop.run(env, EpisodeRequest(env_id="calculator", task=task, seed=7))

A failed episode is data: its :class:`~agentrl.types.StopReason` says what failed. Exceptions are
for broken invariants of ours, for errors that must stop the run, and for cancellation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

from agentrl.agent.call_format import choose_parser, stop_token_ids
from agentrl.agent.conversation import DriftSample
from agentrl.agent.episode import EpisodeRun
from agentrl.agent.limits import LoopLimits
from agentrl.agent.renderer import Renderer
from agentrl.agent.request import EpisodeRequest
from agentrl.agent.sampling import Sampling
from agentrl.env.base import ScriptedPolicy
from agentrl.env.hosted import Hosted
from agentrl.sandbox.base import SandboxProvider
from agentrl.tool.binding import Toolbox
from agentrl.tool.parsers import ToolCallParser, TurnContext
from agentrl.types import GenerateFn, Trajectory

_KEPT_SAMPLES = 16


class AgentLoop:
    """Plays episodes; one instance serves every trajectory of a process, concurrently.

    Args:
        generate: samples one turn; raises ``EngineError`` for a request it lost.
        renderer: messages to token ids.
        toolbox: the tools that the model may call.
        sandboxes: where tools and graders get sandboxes from.
        limits: what ends an episode.
        parser: finds tool calls in a turn; unless given, the one that reads what the chat template
            writes.
        sampling: nucleus and top-k; the temperature is the episode's own.
        end_session: tells the engine that a session is over.
        strict: compare the record with the template after every turn, not only at the end.

    Raises:
        RenderError: the chat template does not show these tools, or cannot be followed.
        ConfigError: no parser given, and none reads what the template writes for a call.
    """

    def __init__(
        self,
        *,
        generate: GenerateFn,
        renderer: Renderer,
        toolbox: Toolbox,
        sandboxes: SandboxProvider,
        limits: LoopLimits,
        parser: ToolCallParser | None = None,
        sampling: Sampling | None = None,
        end_session: Callable[[str], Awaitable[None]] | None = None,
        strict: bool = False,
    ) -> None:
        self.generate = generate
        self.renderer = renderer
        self.toolbox = toolbox
        self.schemas = toolbox.schemas
        self.sandboxes = sandboxes
        self.limits = limits
        self.parser = parser or choose_parser(renderer, self.schemas)
        self.stop_token_ids = stop_token_ids(renderer, self.parser)
        self.turn_contexts = {
            in_thought: TurnContext.of(self.schemas, in_thought=in_thought)
            for in_thought in (False, True)
        }
        self.sampling = sampling or Sampling()
        self.end_session = end_session
        self.strict = strict
        self.drift_samples: deque[tuple[str, DriftSample]] = deque(maxlen=_KEPT_SAMPLES)
        """The latest turns that drifted, with the id of their trajectory."""
        renderer.check(self.schemas)

    async def run(
        self, env: Hosted, request: EpisodeRequest, *, policy: ScriptedPolicy | None = None
    ) -> Trajectory:
        """Play one episode and close ``env``.

        A turn that is cut by a token limit runs no tools, not even calls that are complete: the
        environment is stepped with ``Action.truncated`` and decides what to say. An episode that a
        limit ends is still graded.

        Args:
            env: a freshly opened environment.
            request: what to play, with which seed.
            policy: says the turns in place of the model, for demonstrations.

        Raises:
            RenderError: the record no longer says what the model read (our bug).
            TrainingError: something must stop the run, such as too many leaked threads.
            asyncio.CancelledError: after everything was closed.
        """
        run = EpisodeRun(self, env, request, policy)
        return await run.play()


__all__ = ["AgentLoop", "EpisodeRequest", "LoopLimits", "Sampling"]
