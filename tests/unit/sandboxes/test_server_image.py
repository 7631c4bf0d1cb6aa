"""The list of packages in the servers' image follows that of the project."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_each_package_of_the_image_stands_in_the_project_with_the_same_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {*project["dependencies"], *extras["server"], *extras["mcp"]}
    lines = (ROOT / "sandboxes" / "requirements-server.txt").read_text().splitlines()
    listed = {line for line in lines if line and not line.startswith("#")}
    assert listed <= declared
    assert {*extras["server"], *extras["mcp"]} <= listed
