"""What a rollout engine is: tokens in, tokens out, with weights that carry a version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from agentrl.types import GenerateRequest, Generation

if TYPE_CHECKING:
    import torch


class RolloutEngine(Protocol):
    """Serves many sessions at once.

    Log-probabilities are those of the distribution sampled from. Requests may come in any order
    and number; in deterministic mode the result of a request depends on nothing but the request
    and the weights.
    """

    policy_version: int
    """Version of the weights that are being sampled."""

    async def start(self) -> None:
        """Load and warm up. Called once, before the first request."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate one turn.

        Cancelling the awaiting task frees the request's slot.

        Raises:
            EngineError: the prompt does not fit, or the engine is closed or asleep.
        """
        ...

    async def end_session(self, session_id: str) -> None:
        """Forget the KV cache of a session. Idempotent; unknown ids are fine."""
        ...

    async def update_weights(
        self, params: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        """Replace the weights; waits until no request is unfinished, drops every KV cache.

        Raises:
            EngineError: a tensor is missing, unknown, of another shape, or not finite.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that are being sampled, in the dtype served, tied ones once.

        Under the names and in the layout of :meth:`update_weights`, read from where the engine
        keeps them: a weight sync compares checksums with what was sent.
        """
        ...

    async def sleep(self) -> None:
        """Free what training needs. No request may be unfinished."""
        ...

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        ...

    async def close(self) -> None:
        """Fail unfinished requests and stop. Idempotent."""
        ...
