"""The token record of a trajectory: append-only, every array grown together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentrl.types import Generation, Segment, TokenRole


@dataclass(slots=True, frozen=True)
class Span:
    """A run of tokens that came in one piece."""

    start: int
    end: int
    sampled: bool
    """Whether the model said it; the rest is what it read."""
    text: str
    """What the tokens decode to."""
    template_text: str
    """What the template says there: differs from ``text`` by Unicode normal form at most."""
    inherited: bool = False
    """Sampled in the trajectory that this one branched off from: context here."""


class TokenRecord:
    """Ids, loss mask, log-probabilities, policy versions and roles of one segment.

    The mask is not stored: it is 1 exactly where the role is ``SAMPLED``.
    """

    __slots__ = ("ids", "logprobs", "policy_version", "roles", "spans")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.roles: list[int] = []
        self.logprobs: list[float] = []
        self.policy_version: list[int] = []
        self.spans: list[Span] = []

    def __len__(self) -> int:
        """Return the number of tokens, T."""
        return len(self.ids)

    def append_context(
        self, ids: Sequence[int], roles: Sequence[int], text: str, template_text: str
    ) -> None:
        """Append tokens that the policy did not sample."""
        start = len(self.ids)
        self.ids.extend(ids)
        self.roles.extend(roles)
        self.logprobs.extend([0.0] * len(ids))
        self.policy_version.extend([-1] * len(ids))
        self.spans.append(Span(start, len(self.ids), False, text, template_text))
        self._check()

    def append_sampled(self, generation: Generation, text: str) -> tuple[int, int]:
        """Append a turn verbatim; return its span ``(start, end)``."""
        start = len(self.ids)
        self.ids.extend(generation.ids)
        self.roles.extend([int(TokenRole.SAMPLED)] * len(generation.ids))
        self.logprobs.extend(generation.logprobs)
        self.policy_version.extend(generation.policy_version)
        self.spans.append(Span(start, len(self.ids), True, text, text))
        self._check()
        return start, len(self.ids)

    def branch(self, num_tokens: int) -> TokenRecord:
        """Return a record that begins with the first ``num_tokens`` of this one, as context.

        What was sampled there keeps its ids and is the assistant's, with neither log-probability
        nor policy version: it is trained in the trajectory that sampled it.
        """
        spans = [span for span in self.spans if span.end <= num_tokens]
        assert (spans[-1].end if spans else 0) == num_tokens, "a branch begins where a span ends"
        other = TokenRecord()
        other.ids = self.ids[:num_tokens]
        sampled, assistant = int(TokenRole.SAMPLED), int(TokenRole.ASSISTANT)
        other.roles = [assistant if role == sampled else role for role in self.roles[:num_tokens]]
        other.logprobs = [0.0] * num_tokens
        other.policy_version = [-1] * num_tokens
        other.spans = [replace(span, inherited=span.sampled) for span in spans]
        return other

    def to_segment(self) -> Segment:
        """Return the record as arrays of shape [T], checked against the spans.

        Raises:
            AssertionError: an array does not agree with the others (our bug).
        """
        self._check()
        roles = np.asarray(self.roles, dtype=np.int8)
        mask = roles == int(TokenRole.SAMPLED)
        expected = np.zeros(len(self.ids), dtype=np.bool_)
        for span in self.spans:
            expected[span.start : span.end] = span.sampled and not span.inherited
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        versions = np.asarray(self.policy_version, dtype=np.int32)
        assert np.array_equal(mask, expected), "the mask is not 1 exactly on sampled tokens"
        assert not logprobs[~mask].any(), "a context token has a log-probability"
        assert (versions[~mask] == -1).all(), "a context token has a policy version"
        assert (versions[mask] >= 0).all(), "a sampled token has no policy version"
        return Segment(
            ids=np.asarray(self.ids, dtype=np.int64),
            loss_mask=mask,
            logprobs=logprobs,
            policy_version=versions,
            roles=roles,
        )

    def _check(self) -> None:
        length = len(self.ids)
        assert length == len(self.roles) == len(self.logprobs) == len(self.policy_version), (
            "the arrays of a record have different lengths"
        )
        end = self.spans[-1].end if self.spans else 0
        assert end == length, "the spans of a record do not cover it"
