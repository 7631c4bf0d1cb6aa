"""Commands in the workspace, with a working directory and variables that last."""

from __future__ import annotations

from pathlib import Path

SPEC = Path(__file__).with_name("tool.yaml")
