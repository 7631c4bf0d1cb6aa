"""What a rollout engine is: tokens in, tokens out, with weights that carry a version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from agentrl.types import GenerateRequest, Generation

if TYPE_CHECKING:
    import torch

    from agentrl.weights.served import ServedWeights, WeightSpec


class RolloutEngine(Protocol):
    """Serves many sessions at once.

    Log-probabilities are those of the distribution sampled from. Requests may come in any order
    and number; in deterministic mode the result of a request depends on nothing but the request
    and the weights.
    """

    @property
    def policy_version(self) -> int:
        """Version of the weights that are being sampled."""
        ...

    async def start(self) -> None:
        """Load and warm up. Called once, before the first request."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate one turn.

        Cancelling the awaiting task frees the request's slot.

        Raises:
            EngineError: the prompt does not fit, or the engine is closed or asleep.
            EngineLost: the engine's process is gone, and what it had generated with it.
        """
        ...

    async def end_session(self, session_id: str) -> None:
        """Forget the KV cache of a session. Idempotent; unknown ids are fine."""
        ...

    async def abort(self, session_id: str | None = None) -> int:
        """End a session's request, or all; they return with ``ABORT`` and the tokens they have.

        Returns:
            how many requests were told so. That they have ended is known once each has returned.
        """
        ...

    def weight_specs(self) -> Sequence[WeightSpec]:
        """Return the tensors that are served, tied ones once; known once started.

        Names and shapes are those of :meth:`update_weights`, dtypes those that are sampled with.
        """
        ...

    async def update_weights(
        self, params: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> ServedWeights:
        """Replace the weights; waits until no request is unfinished, drops every KV cache.

        Returns:
            the version and checksums of what is served afterwards, computed where the engine keeps
            its weights: a weight sync compares them with what was sent.

        Raises:
            EngineError: a tensor is missing, unknown, of another shape, or not finite.
        """
        ...

    async def sleep(self, level: int = 1) -> None:
        """Free what training needs. No request may be unfinished.

        Args:
            level: 1 keeps the weights somewhere; with 2 they may be forgotten, and an update has
                to come after :meth:`wake` and before the next request.
        """
        ...

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        ...

    async def check_health(self) -> None:
        """Return if requests can be served.

        Raises:
            EngineLost: they cannot, and never will be: the engine's process or loop is gone.
        """
        ...

    async def close(self) -> None:
        """Fail unfinished requests and stop. Idempotent."""
        ...
