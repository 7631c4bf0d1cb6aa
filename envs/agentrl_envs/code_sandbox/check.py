"""``check(f)``: what the sandbox preloads so that the agent can try its function."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl_envs.code_sandbox.problem import Example
from agentrl_envs.code_sandbox.values import equal_source

NO_OUTPUT = "(no output)"
"""What the ``python`` tool answers where a cell printed nothing."""

_SOURCE = """\
def check(f):
    import copy
{equal}
    examples = {examples!r}
    passed = 0
    for args, kwargs, expected in examples:
        try:
            passed += equal(f(*copy.deepcopy(args), **copy.deepcopy(kwargs)), expected)
        except Exception:
            pass
    print(f"{{passed}}/{{len(examples)}} pass")
"""


def check_source(visible: Sequence[Example]) -> str:
    """Return Python source that defines ``check`` for the examples ``visible``."""
    equal = "".join(f"    {line}\n" for line in equal_source("equal").splitlines())
    examples = [(list(e.args), dict(e.kwargs), e.expected) for e in visible]
    return _SOURCE.format(equal=equal.rstrip("\n"), examples=examples)


def check_report(num_passed: int, num_examples: int) -> str:
    """Return what ``check`` prints."""
    return f"{num_passed}/{num_examples} pass"
