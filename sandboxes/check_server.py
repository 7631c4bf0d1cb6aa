"""Imports what the servers import: what is missing is told when their image is built."""

from __future__ import annotations

import importlib

for _name in (
    "agentrl.cli.sandbox",
    "agentrl.cli.tools_serve",
    "agentrl.sandbox.opening",
    "agentrl.sandbox.serving.worker",
    "agentrl.tool.binding",
    "agentrl.tool.serving.app",
    "agentrl.tool.serving.run",
    "agentrl_sandboxes.http",
    "agentrl_sandboxes.local",
    "agentrl_tools.python",
):
    importlib.import_module(_name)
