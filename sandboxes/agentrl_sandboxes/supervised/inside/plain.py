"""The supervisor without any isolation: an ordinary process, for `sandbox.id=none` only."""

from __future__ import annotations

import json
import os
import socket
import sys

from . import supervisor, wire


def main() -> None:
    """Entry point: the channel's descriptor, the limits as JSON, the two directories."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    limits, work, scratch = json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
    os.chdir(work)
    box = supervisor.Supervisor(
        channel,
        limits=limits,
        work=work,
        scratch=scratch,
        isolated=False,
        counts_user=False,
    )
    box.prepare()
    channel.sendall(wire.pack({"ready": True, "facts": {}}))
    box.serve()
