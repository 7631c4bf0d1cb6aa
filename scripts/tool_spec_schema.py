"""Writes docs/tool-spec.schema.json: what an editor needs to know of a tool's YAML.

python scripts/tool_spec_schema.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from agentrl.tool.file_schema import spec_file_schema

FILE = Path(__file__).parents[1] / "docs" / "tool-spec.schema.json"


def main() -> int:
    """Write the file, or with --check say whether it is as it should be."""
    text = json.dumps(spec_file_schema(), indent=2) + "\n"
    if "--check" not in sys.argv[1:]:
        FILE.write_text(text)
        return 0
    if FILE.is_file() and FILE.read_text() == text:
        return 0
    sys.stderr.write(f"{FILE.name} is not current; run python {sys.argv[0]}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
