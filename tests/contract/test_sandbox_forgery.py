"""Programs that speak in the place of their interpreter: their own loss, and nobody else's."""

from __future__ import annotations

import pytest
from abuse_arena import ATTACKED, LIMITS

from agentrl.sandbox.base import SandboxStatus

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.parametrize("backend", ATTACKED, indirect=True),
]

FORGERIES = [
    "send(b'\\xff' * 100_000)",
    "send(struct.pack('!II', 10, 0) + b'not json!!')",
    "send(struct.pack('!II', 0, 1 << 31))",
    'send(report(b\'{"kind": "ok", "result": 5, "exit_code": "x"}\'))',
    "send(report(b'[' * 100_000))",
    'send(report(b\'{"kind": "ok"}\'))',
    'send(report(b\'{"kind": "ok"}\')); send(report(b\'{"kind": "ok"}\', 2))',
    'send(report(b\'{"kind": "ok"}\'))\nwhile True: pass',
    'send(report(b\'{"kind": "ok"}\', 7))\nwhile True: pass',
    "os.closerange(0, 300)",
    "os.dup2(1, 255)",
]
_FORGE = """
import os, struct
def report(text, n=1): return struct.pack('!II', len(text), 4) + text + struct.pack('!I', n)
def send(data): os.write(255, data)
"""


@pytest.mark.parametrize("number", range(len(FORGERIES)))
def test_a_forged_report_is_the_programs_own_loss(arena, number):
    async def scenario():
        box = await arena.open()
        result = await box.run_code(_FORGE + FORGERIES[number], timeout_s=0.5)
        following = [await box.run_code(f"{n} + 1", timeout_s=0.5) for n in range(3)]
        await box.close()
        return result.status, [after.result for after in following]

    status, following = arena.arm.run(scenario())
    assert status is not SandboxStatus.INFRA_ERROR
    # Forged reports answer the calls they were sent for, and no honest answer is out of step.
    assert following[-1] == "3", "the box has a new interpreter"
    assert all(got in (None, str(n + 1)) for n, got in enumerate(following))


def test_an_immense_report_costs_the_host_nothing(arena):
    """A report is JSON that the host parses: one of 20 MB would take it a second and a gigabyte."""
    code = """
import os, struct
h = b'{"kind": "ok", "result": [' + b'[],' * 7_000_000 + b'0]}'
frame = struct.pack('!II', len(h), 0) + h
while frame: frame = frame[os.write(255, frame[:65536]):]
"""
    assert arena.attack(code).status is SandboxStatus.OUTPUT_LIMIT


def test_a_forged_result_is_no_longer_than_an_honest_one(arena):
    code = """
import json
send(report(json.dumps({"kind": "ok", "result": "x" * 400_000}).encode()))
while True: pass
"""

    async def scenario():
        box = await arena.open()
        result = await box.run_code(_FORGE + code)
        await box.close()
        return result.result or ""

    assert LIMITS.output_bytes < len(arena.arm.run(scenario())) < LIMITS.output_bytes + 20_000
