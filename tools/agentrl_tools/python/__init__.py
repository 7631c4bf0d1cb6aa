"""Python cells with state, in the trajectory's workspace."""

from __future__ import annotations

from pathlib import Path

SPEC = Path(__file__).with_name("tool.yaml")
