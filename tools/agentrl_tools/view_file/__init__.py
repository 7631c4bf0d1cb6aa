"""Lines of a file of the workspace."""

from __future__ import annotations

from pathlib import Path

SPEC = Path(__file__).with_name("tool.yaml")
