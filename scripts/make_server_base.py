"""Imports a base image for sandboxes/Dockerfile from this machine, without a registry.

    python scripts/make_server_base.py

It holds the system's Python, bubblewrap, and from the running environment the packages of
sandboxes/requirements-server.txt with the entry points of agentrl; its source comes by the
Dockerfile. Prints the image's name, to be given as AGENTRL_BASE_IMAGE to docker compose.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import Distribution, distribution
from pathlib import Path

from agentrl_sandboxes.docker import rootfs
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
REPOSITORY = "agentrl/server-base"
_PACKAGES = "opt/packages"
_SOURCES = ("", "/envs", "/tools", "/sandboxes")
_IMPORT_S = 300


def collect(python: str = "/usr/bin/python3") -> rootfs.Rootfs:
    """List the files of the image.

    Raises:
        SandboxUnavailable: something that it needs is missing on this machine.
    """
    content = rootfs.collect(python)
    files = dict(content.files)
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SystemExit("bubblewrap is missing; run: sh scripts/install_bubblewrap.sh python3")
    programs = [Path(os.path.realpath(bwrap))]
    files["usr/bin/bwrap"] = programs[0]
    for package in closure(ROOT / "sandboxes" / "requirements-server.txt"):
        for file in package.files or []:
            source = Path(str(package.locate_file(file)))
            if ".." not in file.parts and "__pycache__" not in file.parts and source.is_file():
                files[f"{_PACKAGES}/{file}"] = source
                if source.suffix == ".so":
                    programs.append(source)
    for name in ("METADATA", "entry_points.txt"):
        found = next(f for f in distribution("agentrl").files or [] if f.name == name)
        source = Path(str(distribution("agentrl").locate_file(found)))
        files[f"{_PACKAGES}/{found}"] = source
    own = {Path(os.path.realpath(source)) for source in files.values()}
    for library in rootfs.libraries(programs):
        source = Path(os.path.realpath(library))
        if source not in own:  # packages find those that they bring along
            files.setdefault(rootfs.inside(library), source)
    return replace(content, files=files)


def closure(requirements: Path) -> list[Distribution]:
    """Return the installed distributions that requirements need, directly or not."""
    lines = [line for line in requirements.read_text().splitlines() if line and line[0] != "#"]
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    pending = [Requirement(line) for line in lines]
    while pending:
        requirement = pending.pop()
        name = requirement.name.lower().replace("_", "-")
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            found[name] = distribution(requirement.name)
            needed = [Requirement(text) for text in found[name].requires or []]
            pending += [
                r for r in needed if r.marker is None or r.marker.evaluate({"extra": extra})
            ]
    return list(found.values())


def main() -> None:
    """Import the image where the engine lacks it, and print its name."""
    content = collect()
    name = f"{REPOSITORY}:{content.fingerprint[:16]}"
    known = subprocess.run(
        ["docker", "image", "inspect", name], capture_output=True, check=False, timeout=_IMPORT_S
    )
    if known.returncode != 0:
        paths = ":".join(f"/opt/agentrl{source}" for source in _SOURCES)
        change = f"ENV PYTHONPATH={paths}:/{_PACKAGES} PATH=/usr/local/bin:/usr/bin:/bin"
        with tempfile.TemporaryDirectory(prefix="agentrl-base-") as folder:
            archive = Path(folder, "root.tar")
            content.write(archive)
            subprocess.run(
                ["docker", "import", "-c", change, str(archive), name],
                check=True,
                stdout=sys.stderr,
                timeout=_IMPORT_S,
            )
    print(name)  # noqa: T201


if __name__ == "__main__":
    main()
