"""Changes to a file of the workspace: exact replacement, insertion, a new file."""

from __future__ import annotations

from pathlib import Path

SPEC = Path(__file__).with_name("tool.yaml")
