"""One episode in play: its state, its turns, and every way it can end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.agent.branch import BranchPoint, as_inherited
from agentrl.agent.call_format import opens_thought
from agentrl.agent.conversation import Conversation, DriftSample
from agentrl.agent.episode_tools import EpisodeTools
from agentrl.agent.failures import classify, from_env, named
from agentrl.agent.grading import grade
from agentrl.agent.messages import answer_message, as_messages, tool_messages
from agentrl.agent.request import EpisodeRequest
from agentrl.agent.sampling import sample_turn, scripted_turn
from agentrl.agent.timing import Timed
from agentrl.env.base import Episode, Observation, ScriptedPolicy
from agentrl.env.hosted import Hosted
from agentrl.errors import AgentRLError, EnvError, RenderError
from agentrl.types import (
    Action,
    Generation,
    Message,
    Score,
    StopReason,
    ToolCall,
    ToolStatus,
    Trajectory,
    Turn,
)

if TYPE_CHECKING:
    from agentrl.agent.loop import AgentLoop

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EpisodeRun:
    """Plays one episode of an :class:`~agentrl.agent.loop.AgentLoop`."""

    def __init__(
        self,
        loop: AgentLoop,
        env: Hosted,
        request: EpisodeRequest,
        policy: ScriptedPolicy | None,
    ) -> None:
        self._loop = loop
        self._env = env
        self._request = request
        self._policy = policy
        self._branch = request.branch
        self._conversation = Conversation(loop.renderer, loop.schemas)
        self._tools = EpisodeTools(loop, env, request)
        self._turns: list[Turn] = []
        self._num_inherited = 0
        self._info: dict[str, Any] = {}
        self._anchor: str | None = None
        self._num_sampled = 0
        self._error: str | None = None
        self._wall_clock_limited = False
        self._timings_s: dict[str, float] = {}

    # ------------------------------------------------------------------ the whole episode

    async def play(self) -> Trajectory:
        """See :meth:`AgentLoop.run`."""
        start = self._timings_s["began"] = time.perf_counter()
        score: Score | None = None
        try:
            stop_reason = await self._guarded(self._converse_in_time())
            # Before grading: what the agent left running must not touch what is graded.
            keep = not stop_reason.is_failure
            ended = await self._guarded(self._tools.end(keep_artifacts=keep))
            stop_reason = ended or stop_reason
            drift = self._verify()
            if not stop_reason.is_failure:
                graded = await self._guarded(self._grade())
                if isinstance(graded, Score):
                    score = graded
                else:
                    stop_reason = graded
        finally:
            await self._close()
        self._timings_s["total"] = time.perf_counter() - start
        return self._trajectory(stop_reason, score, drift)

    async def _guarded(self, stage: Coroutine[Any, Any, T]) -> T | Any:
        """Await a stage; what fails in it becomes a stop reason with an error text."""
        try:
            return await stage
        except AgentRLError as error:
            stop_reason = classify(error)
            if stop_reason is None:
                raise
            self._fail(error)
            return stop_reason

    def _fail(self, error: BaseException) -> None:
        self._error = named(error)
        if self._has_spoken and self._turns[-1].error is None:
            self._turns[-1].error = self._error
        if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
            self._wall_clock_limited = True

    async def _converse_in_time(self) -> StopReason:
        scope = asyncio.timeout(self._loop.limits.trajectory_timeout_s)
        try:
            async with scope:
                with self._request.cut.ends(scope):
                    return await self._converse()
        except TimeoutError:
            if not scope.expired():
                raise
            self._wall_clock_limited = True
            if self._request.cut.is_set:
                self._error = "its group was cut"
                return StopReason.CUT
            if self._has_spoken:
                return StopReason.TRAJECTORY_TIMEOUT
            # The policy never came to speak, so there is nothing to reward.
            where = "the engine" if self._conversation.messages else "the environment's reset"
            self._error = f"{where} did not answer within rollout.trajectory_timeout_s"
            is_engine = bool(self._conversation.messages)
            return StopReason.ENGINE_ERROR if is_engine else StopReason.ENV_TIMEOUT

    async def _converse(self) -> StopReason:
        if self._branch is None:
            await self._reset()
        else:
            await self._restore(self._branch)
        stop_reason: StopReason | None = None
        while stop_reason is None:
            await self._keep_branch_point()
            stop_reason = await self._play_turn()
        return stop_reason

    @property
    def _has_spoken(self) -> bool:
        """Whether the policy has had a turn in this episode, beyond what it inherits."""
        return len(self._turns) > self._num_inherited

    async def _restore(self, branch: BranchPoint) -> None:
        """Go on from a state of another episode."""
        with self._timed("env"):
            task = self._request.task
            await self._from_env(self._env.reset(seed=branch.env_seed, options={"task": task}))
            await self._from_env(self._env.restore(branch.state))
            self._anchor = await self._from_env(self._env.anchor())
        self._info = dict(branch.info)
        self._conversation = branch.begun_conversation()
        self._turns = branch.inherited_turns()
        self._num_inherited = len(self._turns)
        self._num_sampled = branch.num_sampled

    async def _keep_branch_point(self) -> None:
        """Keep the state before the next turn, where somebody may branch from it."""
        points, branch = self._request.branch_points, self._branch
        if points is None or (branch is not None and not self._has_spoken):
            return
        with self._timed("env"):
            state = await self._from_env(self._env.snapshot())
        points.append(
            BranchPoint(
                sample_index=self._request.sample_index,
                env_seed=self._request.seed if branch is None else branch.env_seed,
                state=state,
                info=self._info,
                turns=[as_inherited(turn) for turn in self._turns],
                num_sampled=self._num_sampled,
                num_calls=dict(self._tools.num_calls),
                conversation=self._conversation,
                num_tokens=len(self._conversation.record),
                num_messages=len(self._conversation.messages),
            )
        )

    async def _reset(self) -> None:
        request = self._request
        with self._timed("env"):
            observation, self._info = await self._from_env(
                self._env.reset(seed=request.seed, options={"task": request.task})
            )
            self._anchor = await self._from_env(self._env.anchor())
        messages = as_messages(observation)
        if self._cannot_fit(messages):
            raise EnvError(
                f"environment {request.env_id!r}: the first prompt of task {request.task.id!r} has "
                f"{sum(len(m['content']) for m in messages):,} characters, more than "
                f"rollout.max_context_tokens={self._loop.limits.max_context_tokens} can hold"
            )
        try:
            self._conversation.begin(messages)
        except RenderError as error:
            raise EnvError(f"environment {request.env_id!r}: reset: {error}") from error
        length, limit = len(self._conversation.record), self._loop.limits.max_context_tokens
        if length >= limit:
            raise EnvError(
                f"environment {request.env_id!r}: the first prompt of task {request.task.id!r} has "
                f"{length} tokens, rollout.max_context_tokens is {limit}; shorten the prompt or "
                "raise the limit"
            )

    # ------------------------------------------------------------------ one turn

    async def _play_turn(self) -> StopReason | None:
        """Play one turn; return why the episode ends with it, or None."""
        begun = time.perf_counter()
        generation = await self._generate()
        generate_s = time.perf_counter() - begun
        in_thought = opens_thought(self._conversation.record.spans[-1].text)
        start, end, text = self._conversation.append_turn(generation)
        turn = Turn(
            index=len(self._turns),
            segment=0,
            start=start,
            end=end,
            stop_reason=generation.stop_reason,
            anchor=self._anchor,
            timings_s={"start": begun - self._timings_s["began"], "generate": generate_s},
        )
        self._turns.append(turn)
        self._num_sampled += end - start
        if generation.stop_reason is StopReason.ABORT:
            self._conversation.add_answer({"role": "assistant", "content": text})
            self._error = turn.error = "the engine was told to abort the request"
            return StopReason.ABORT
        truncated = generation.stop_reason is StopReason.LENGTH
        action = self._parse(text, truncated=truncated, in_thought=in_thought)
        self._conversation.add_answer(answer_message(action))
        failure = await self._run_tools(action, turn)
        if failure is not None:
            return failure
        action = dataclasses.replace(action, tool_results=tuple(turn.tool_results))
        observation = await self._step(action, turn)
        said = [*tool_messages(turn.tool_results), *as_messages(observation)]
        messages = self._conversation.add_messages(said)
        if self._loop.strict:
            self._verify()
        return self._end_of_turn(turn) or self._append_next(messages)

    async def _generate(self) -> Generation:
        loop, limits = self._loop, self._loop.limits
        max_tokens = min(
            limits.max_turn_tokens,
            limits.max_response_tokens - self._num_sampled,
            limits.max_context_tokens - len(self._conversation.record),
        )
        if self._policy is not None:
            return scripted_turn(
                self._policy, self._conversation, loop.renderer, max_tokens=max_tokens
            )
        return await sample_turn(
            loop.generate,
            self._conversation,
            self._request,
            turn=len(self._turns),
            max_tokens=max_tokens,
            sampling=loop.sampling,
            stop_token_ids=loop.stop_token_ids,
        )

    def _parse(self, text: str, *, truncated: bool, in_thought: bool) -> Action:
        if truncated:
            return Action(text=text, content=text, truncated=True)
        parsed = self._loop.parser.parse(text, self._loop.turn_contexts[in_thought])
        calls = parsed.tool_calls
        limit = self._loop.limits.max_turn_calls
        if len(calls) > limit:
            surplus = f"a turn may hold {limit} tool calls; {len(calls) - limit} were not run"
            calls = (*calls[:limit], ToolCall(name="", arguments={}, error=surplus))
        return Action(text=text, content=parsed.content, tool_calls=calls)

    async def _run_tools(self, action: Action, turn: Turn) -> StopReason | None:
        turn.tool_calls = list(action.tool_calls)
        if not action.tool_calls:
            return None
        start = time.perf_counter()
        await self._tools.run(action.tool_calls, turn.tool_results)
        statuses = [result.status for result in turn.tool_results]
        self._wall_clock_limited |= ToolStatus.TIMEOUT in statuses
        if ToolStatus.INFRA_ERROR in statuses:
            failed = turn.tool_results[statuses.index(ToolStatus.INFRA_ERROR)]
            self._error = turn.error = f"tool {failed.name}: {failed.content}"
            return self._tools.failure
        turn.timings_s["tools"] = time.perf_counter() - start
        return None

    async def _step(self, action: Action, turn: Turn) -> Observation:
        start = time.perf_counter()
        (
            observation,
            turn.reward,
            turn.terminated,
            turn.truncated,
            self._info,
        ) = await self._from_env(self._env.step(action))
        self._anchor = await self._from_env(self._env.anchor())
        turn.timings_s["env"] = time.perf_counter() - start
        return observation

    def _end_of_turn(self, turn: Turn) -> StopReason | None:
        limits = self._loop.limits
        if turn.terminated:
            return StopReason.TERMINATED
        if turn.truncated:
            return StopReason.TRUNCATED
        if len(self._turns) >= limits.max_turns:
            return StopReason.MAX_TURNS
        if self._num_sampled >= limits.max_response_tokens:
            return StopReason.MAX_RESPONSE_TOKENS
        return None

    def _append_next(self, messages: list[Message]) -> StopReason | None:
        """Append what the model will read next, unless nothing could follow it."""
        where = f"environment {self._request.env_id!r}: step"
        if not messages:
            raise EnvError(
                f"{where} returned an empty observation after a turn without tool calls and did "
                "not end the episode; say something, or return terminated=True"
            )
        if any(message["role"] == "assistant" for message in messages):
            raise EnvError(f"{where} returned an assistant message; only the model speaks as one")
        if self._cannot_fit(messages):
            return StopReason.MAX_CONTEXT_TOKENS
        try:
            filled = self._conversation.render_next(messages)
        except RenderError as error:
            raise EnvError(f"{where}: {error}") from error
        length = len(self._conversation.record) + len(filled.ids)
        if length >= self._loop.limits.max_context_tokens:
            return StopReason.MAX_CONTEXT_TOKENS
        self._conversation.append(filled)
        return None

    def _cannot_fit(self, messages: list[Message]) -> bool:
        """Whether text is too long for the context whatever its tokens, told without encoding it.

        Encoding megabytes would hold up every other episode.
        """
        most = self._loop.limits.max_context_tokens * self._loop.renderer.codec.longest_token
        return sum(len(message["content"]) for message in messages) > most

    # ------------------------------------------------------------------ the parts around it

    async def _from_env(self, call: Awaitable[T]) -> T:
        return await from_env(self._request.env_id, call)

    async def _grade(self) -> Score:
        episode = Episode(
            task=self._request.task,
            messages=list(self._conversation.messages),
            turns=list(self._turns),
            info=self._info,
            sandboxes=self._loop.sandboxes,
            turn_rewards=[turn.reward for turn in self._turns],
            artifacts=self._tools.artifacts,
            num_inherited_tokens=0 if self._branch is None else self._branch.num_sampled,
        )
        with self._timed("reward"):
            graded = grade(self._env.rubric, episode, env_id=self._request.env_id)
            return await self._from_env(graded)

    def _verify(self) -> int:
        """Check the record; return how many turns drifted."""
        if not self._conversation.record.spans:
            return 0
        found: list[DriftSample] = self._conversation.verify()
        samples = [sample for sample in found if sample.turn >= self._num_inherited]
        for sample in samples[:1]:
            self._loop.drift_samples.append((self._request.trajectory_id, sample))
        return len(samples)

    async def _close(self) -> None:
        """Close everything, also where the episode is being cancelled, and cancelled again."""
        closing = asyncio.ensure_future(self._close_parts())
        _closings.add(closing)
        closing.add_done_callback(_closings.discard)
        await asyncio.shield(closing)

    async def _close_parts(self) -> None:
        try:
            await self._tools.end(keep_artifacts=False)
        except Exception as error:
            logger.warning("closing the workspace failed: %s", named(error))
        if self._loop.end_session is not None:
            try:
                async with asyncio.timeout(self._loop.limits.close_timeout_s):
                    await self._loop.end_session(self._request.trajectory_id)
            except Exception as error:
                logger.warning("ending a session failed: %s", named(error))
        await self._env.close()

    def _timed(self, name: str) -> Timed:
        return Timed(self._timings_s, name)

    def _trajectory(self, stop_reason: StopReason, score: Score | None, drift: int) -> Trajectory:
        request, record = self._request, self._conversation.record
        for turn in self._turns:
            for name in turn.timings_s.keys() - {"start"}:
                seconds = turn.timings_s[name]
                self._timings_s[name] = self._timings_s.get(name, 0.0) + seconds
        return Trajectory(
            id=request.trajectory_id,
            env_id=request.env_id,
            task=request.task,
            group_id=request.group_id,
            sample_index=request.sample_index,
            attempt=request.attempt,
            seed=request.seed,
            segments=[record.to_segment()] if len(record) else [],
            turns=self._turns,
            messages=self._conversation.messages,
            stop_reason=stop_reason,
            error=self._error,
            score=score,
            drift=drift,
            wall_clock_limited=self._wall_clock_limited,
            parent=None if self._branch is None else self._branch.sample_index,
            branch_turn=0 if self._branch is None else len(self._branch.turns),
            timings_s=self._timings_s,
        )


_closings: set[asyncio.Future[None]] = set()
"""Keeps closings alive where the task that waits for them is cancelled a second time."""
