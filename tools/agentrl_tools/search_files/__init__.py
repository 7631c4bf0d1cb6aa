"""Text and file names in the workspace."""

from __future__ import annotations

from pathlib import Path

SPEC = Path(__file__).with_name("tool.yaml")
