"""Fakes for tests of environments, tools and loops: no model, no network, no isolation."""

from __future__ import annotations

from agentrl.testing.engines import FakeEngine, ScriptedEngine, call_text
from agentrl.testing.envs import EchoEnv, MisbehavingEnv, hangs, pays, raises
from agentrl.testing.sandboxes import FakeSandbox, FakeSandboxes
from agentrl.testing.tokenizer import CHATML_TEMPLATE, make_tokenizer

__all__ = [
    "CHATML_TEMPLATE",
    "EchoEnv",
    "FakeEngine",
    "FakeSandbox",
    "FakeSandboxes",
    "MisbehavingEnv",
    "ScriptedEngine",
    "call_text",
    "hangs",
    "make_tokenizer",
    "pays",
    "raises",
]
