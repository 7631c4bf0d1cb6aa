"""Grading of what an agent made, out of its reach.

Three ways, from the strongest: :func:`call_function` compares answers on the host,
:func:`check_program` runs a test program in another sandbox than the one that holds the solution,
and :func:`grade_artifacts` runs a grader of one's own over files in a fresh sandbox.
:func:`find_tampering` names known patterns of reward hacking, for metrics.
"""

from __future__ import annotations

from agentrl.sandbox.grading.artifacts import (
    ArtifactLimits,
    Verdict,
    collect,
    grade_artifacts,
    why_nothing_matches,
)
from agentrl.sandbox.grading.calls import CallOutcome, call_function
from agentrl.sandbox.grading.program import ProgramVerdict, check_program
from agentrl.sandbox.grading.tampering import TAMPERING, find_tampering

__all__ = [
    "TAMPERING",
    "ArtifactLimits",
    "CallOutcome",
    "ProgramVerdict",
    "Verdict",
    "call_function",
    "check_program",
    "collect",
    "find_tampering",
    "grade_artifacts",
    "why_nothing_matches",
]
