"""Python cells with state, in a sandbox of the trajectory's own."""

from __future__ import annotations

from pathlib import Path

SPEC = Path(__file__).with_name("tool.yaml")
