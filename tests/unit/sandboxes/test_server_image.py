"""The packages in the servers' image follow those of the project, and are enough."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[3]

_IMPORT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r} in the image", name=name)

ABSENT = set(sys.argv[1:])
sys.meta_path.insert(0, Absent())
"""


def test_each_package_of_the_image_stands_in_the_project_with_the_same_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {*project["dependencies"], *extras["server"], *extras["mcp"]}
    lines = (ROOT / "sandboxes" / "requirements-server.txt").read_text().splitlines()
    listed = {line for line in lines if line and not line.startswith("#")}
    assert listed <= declared
    assert {*extras["server"], *extras["mcp"]} <= listed


def test_the_servers_import_nothing_else():
    spec = importlib.util.spec_from_file_location(
        "make_server_base", ROOT / "scripts" / "make_server_base.py"
    )
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    present = script.closure(ROOT / "sandboxes" / "requirements-server.txt")
    names = {package.name.lower().replace("_", "-") for package in present} | {"agentrl"}
    absent = [
        module
        for module, owners in packages_distributions().items()
        if not names & {owner.lower().replace("_", "-") for owner in owners}
        and module.isidentifier()
    ]
    assert "torch" in absent
    check = ROOT / "sandboxes" / "check_server.py"
    program = f"{_IMPORT}\nexec({check.read_text()!r})"
    done = subprocess.run(
        [sys.executable, "-c", program, *absent], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
