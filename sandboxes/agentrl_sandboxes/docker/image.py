"""An image for boxes, made of this machine's Python: no registry is asked for anything."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import SandboxUnavailable
from agentrl_sandboxes.docker import engine, rootfs

if TYPE_CHECKING:
    from docker import APIClient

REPOSITORY = "agentrl/sandbox"
DEFAULT_IMAGE = f"{REPOSITORY}:local"
_IMPORT_S = 300
BUILD_HINT = (
    "Build it from this machine's Python with `agentrl sandbox image`, or from a registry's with "
    "`docker build -t agentrl/sandbox:local -f sandboxes/box.Dockerfile sandboxes`"
)


def build_local_image(*, base_url: str | None = None, python: str = "/usr/bin/python3") -> str:
    """Import this machine's Python as an image, where the engine lacks it; return its name.

    It is named by what went into it, and gets the name :data:`DEFAULT_IMAGE` besides.

    Raises:
        SandboxUnavailable: no engine answers, or something to put into the image is missing.
    """
    client = engine.connect(base_url, timeout_s=_IMPORT_S)
    content = rootfs.collect(python)
    tag = f"local-{content.fingerprint[:16]}"
    name = f"{REPOSITORY}:{tag}"
    if not client.images(name=name, quiet=True):
        with tempfile.TemporaryDirectory(prefix="agentrl-image-") as folder:
            path = Path(folder, "root.tar")
            content.write(path)
            _import(client, path, tag)
    client.tag(name, REPOSITORY, "local", force=True)
    client.close()
    return name


def _import(client: APIClient, path: Path, tag: str) -> None:
    said: Any = client.import_image(
        src=str(path), repository=REPOSITORY, tag=tag, changes=['CMD ["/usr/bin/python3"]']
    )
    if "error" in str(said).lower():
        raise SandboxUnavailable(f"the engine did not import the image: {str(said)[-500:]}")
