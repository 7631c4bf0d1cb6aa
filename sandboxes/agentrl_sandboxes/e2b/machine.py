"""What is started inside an E2B sandbox: our supervisor, as process 1 of its own namespaces.

E2B's default user may become root, and its own services listen on the machine's loopback. So
programs run neither as that user nor in that network: root makes the namespaces and mounts,
becomes a user without rights, and starts the supervisor of :mod:`agentrl_sandboxes.supervised`.
"""

from __future__ import annotations

import shlex

from agentrl.sandbox.base import SandboxLimits
from agentrl_sandboxes.supervised.bootstrap import BOOTSTRAP

_USER = 65534
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/box",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
    "PYTHONHASHSEED": "0",  # sets print in the same order in every run
    "PYTHONDONTWRITEBYTECODE": "1",
}
_RELAY = """
import base64, os, sys
while True:
    data = os.read(0, 1 << 18)
    if not data: break
    line = memoryview(base64.b64encode(data) + b"\\n")
    while line: line = line[os.write(1, line):]
"""


def command(limits: SandboxLimits) -> str:
    """Return the shell command, for root, whose standard streams are the box's channel."""
    size = f"size={limits.disk_mb}m,nr_inodes=8192,uid={_USER},gid={_USER}"
    mounts = " && ".join(
        [
            f"mount -t tmpfs -o {size},mode=0700,nosuid,nodev tmpfs /box",
            f"mount -t tmpfs -o {size},mode=1777,nosuid,nodev tmpfs /tmp",
            f"mount -t tmpfs -o {size},mode=1777,nosuid,nodev tmpfs /dev/shm",
            "mount -o remount,bind,ro /",
            "cd /box",
        ]
    )
    variables = shlex.join(f"{name}={value}" for name, value in _ENVIRONMENT.items())
    python = shlex.join(["python3", "-I", "-S", "-c", BOOTSTRAP])
    identity = (
        f"setpriv --reuid {_USER} --regid {_USER} --clear-groups --no-new-privs"
        " --inh-caps=-all --bounding-set=-all"
    )
    inner = f"{mounts} && exec {identity} env -i {variables} {python}"
    namespaces = "unshare --mount --pid --net --ipc --uts --fork --kill-child --mount-proc"
    relay = shlex.join(["python3", "-I", "-S", "-c", _RELAY])
    return f"mkdir -p /box && {namespaces} sh -c {shlex.quote(inner)} | {relay}"
