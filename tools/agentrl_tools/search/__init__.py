"""Search in a local corpus: titles, ids and snippets, then whole texts by id."""

from __future__ import annotations

from pathlib import Path

SPEC = Path(__file__).with_name("tool.yaml")
