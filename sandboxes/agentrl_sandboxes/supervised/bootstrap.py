"""Starting our supervisor where only a Python and a stream are: in a container or a remote VM.

The sources come over the channel, so that any image with Python will do and none can be stale.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import asdict
from functools import cache
from pathlib import Path

from agentrl.sandbox.base import SandboxLimits
from agentrl_sandboxes.supervised import inside
from agentrl_sandboxes.supervised.inside import wire

BOOTSTRAP = """
import os, sys
def take(size):
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part: os._exit(1)
        data += part
    return data
archive = take(int.from_bytes(take(4), "big"))
with open("/tmp/inside.zip", "xb") as file: file.write(archive)
sys.path.insert(0, "/tmp/inside.zip")
from inside.contained import main
del sys.path[0], archive
sys.path_importer_cache.clear()
os.unlink("/tmp/inside.zip")
main()
"""
"""The program for `python3 -c`; standard input and output are the box's channel."""


def first_words(limits: SandboxLimits, ttl_s: float) -> bytes:
    """What that program is told before anything else: its sources, then its limits."""
    archive = _archive()
    settings = wire.pack({"limits": asdict(limits), "ttl_s": ttl_s})
    return len(archive).to_bytes(4, "big") + archive + settings


@cache
def _archive() -> bytes:
    """The modules that run inside, as a zip file."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(Path(inside.__file__).parent.glob("*.py")):
            archive.writestr(f"inside/{path.name}", path.read_bytes())
    return target.getvalue()
