"""A turn that several engines may take part in: interrupted, lost, and gone on with elsewhere."""

from __future__ import annotations

from dataclasses import replace

from agentrl.errors import EngineError
from agentrl.types import GenerateRequest, Generation, StopReason


class Turn:
    """One request on its way, and the tokens that have come of it so far.

    What an engine gives is kept for good: the next engine is asked for what is missing, with the
    tokens so far at the end of the prompt and as ``first_index``, so that no token is sampled
    twice. Tokens carry the version of the weights that they were sampled from; it never falls.

    Args:
        request: as the agent loop made it.

    Attributes:
        interrupted: a weight update, not the caller, has ended the present leg.
        aborted: the caller wants the turn to end as it is.
        num_lost: engines that were lost under the turn.
    """

    __slots__ = (
        "_cached", "_ids", "_logprobs", "_reason", "_versions", "aborted", "interrupted",
        "num_lost", "request",
    )  # fmt: skip

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.interrupted = self.aborted = False
        self.num_lost = 0
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._cached: int | None = None
        self._reason: StopReason | None = None

    @property
    def ended(self) -> bool:
        """Whether the turn has a result."""
        return self._reason is not None

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    def next_request(self) -> GenerateRequest:
        """Return what is still to be generated."""
        if not self._ids:
            return self.request
        sampling = self.request.sampling
        return replace(
            self.request,
            prompt_ids=[*self.request.prompt_ids, *self._ids],
            sampling=replace(
                sampling,
                max_tokens=sampling.max_tokens - len(self._ids),
                first_index=sampling.first_index + len(self._ids),
            ),
        )

    def add(self, part: Generation) -> None:
        """Take what an engine returned for :meth:`next_request`, and end the turn where it ends.

        An abort ends it only where the caller asked for it, or nobody did.

        Raises:
            EngineError: the engine broke its contract.
        """
        self._append(part)
        if self._cached is None:
            self._cached = part.num_cached_tokens
        if part.stop_reason is not StopReason.ABORT:
            self._reason = part.stop_reason
        elif self._complete() is not None:  # the abort came when there was nothing left to do
            self._reason = self._complete()
        elif self.aborted or not self.interrupted:
            self._reason = StopReason.ABORT
        self.interrupted = False

    def lost(self, part: Generation | None) -> None:
        """Note that the engine is gone; ``part`` is what had arrived before, if anything."""
        self.num_lost += 1
        self.interrupted = False
        if part is not None:
            self._append(part)
        self._reason = self._complete()
        if self._reason is None and self.aborted:
            self._reason = StopReason.ABORT

    def give_up(self) -> None:
        """End the turn as it is: the caller aborted it while no engine was at it."""
        self._reason = StopReason.ABORT

    def generation(self) -> Generation:
        """Return the result of a turn that has ended."""
        assert self._reason is not None, "the turn goes on"
        return Generation(
            ids=self._ids,
            logprobs=self._logprobs,
            policy_version=self._versions,
            stop_reason=self._reason,
            num_cached_tokens=self._cached,
        )

    def _append(self, part: Generation) -> None:
        left = self.request.sampling.max_tokens - len(self._ids)
        if not len(part.ids) == len(part.logprobs) == len(part.policy_version):
            raise self._broken("ids, logprobs and versions of different lengths")
        if len(part.ids) > left:
            raise self._broken(f"{len(part.ids)} tokens where at most {left} were asked for")
        versions = [*self._versions[-1:], *part.policy_version]
        if any(later < earlier for earlier, later in zip(versions, versions[1:], strict=False)):
            raise self._broken(f"tokens of older weights after newer ones ({versions})")
        self._ids += part.ids
        self._logprobs += part.logprobs
        self._versions += part.policy_version

    def _complete(self) -> StopReason | None:
        """Return why nothing is missing; None where something is."""
        sampling = self.request.sampling
        if self._ids and self._ids[-1] in sampling.stop_token_ids:
            return StopReason.STOP
        return StopReason.LENGTH if len(self._ids) == sampling.max_tokens else None

    def _broken(self, what: str) -> EngineError:
        return EngineError(f"session {self.request.session_id!r}: an engine returned {what}")
