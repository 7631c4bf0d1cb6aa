"""One worker process of a sandbox server; started by ``fleet``, never by hand."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from contextlib import suppress

import uvicorn

from agentrl.errors import AgentRLError
from agentrl.sandbox.serving.app import create_app
from agentrl.sandbox.serving.listening import http_protocol
from agentrl.sandbox.serving.peers import Peers, peer_socket
from agentrl.sandbox.serving.service import SandboxService
from agentrl.sandbox.serving.settings import ServingSettings

_DRAIN_S = 5
_KEEP_CONNECTION_S = 75
"""Longer than clients keep an idle connection, so that none is closed under a request."""


async def serve(task: dict) -> None:
    """Serve until told to stop or until the parent is gone, then close every box."""
    settings = ServingSettings.load(task["settings"])
    worker, folder = task["worker"], task["folder"]
    life = task["life_fd"]
    try:
        service = SandboxService(
            settings, node=task["node"], worker=worker, restarts=task["restarts"]
        )
        await service.start()
    except AgentRLError as error:
        _tell(task["ready_fd"], {"error": str(error)})
        return
    peers = Peers(folder, worker, settings.workers)
    config = uvicorn.Config(
        create_app(service, peers),
        http=http_protocol(),
        loop="asyncio",
        lifespan="on",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_KEEP_CONNECTION_S,
        timeout_graceful_shutdown=_DRAIN_S,
        server_header=False,
    )
    server = uvicorn.Server(config)
    own = peer_socket(folder, worker)
    with suppress(FileNotFoundError):
        os.unlink(own)  # of a worker that died
    private = socket.socket(socket.AF_UNIX)
    private.bind(own)
    public = socket.socket(fileno=task["listen_fd"])

    orphaned = False

    def parent_gone() -> None:
        nonlocal orphaned
        orphaned = True
        asyncio.get_running_loop().remove_reader(life)
        config.timeout_graceful_shutdown = 0  # it was killed: nothing is to go on
        server.should_exit = True

    asyncio.get_running_loop().add_reader(life, parent_gone)
    private.listen(1024)  # a request that comes before the server runs waits in the queue
    _tell(task["ready_fd"], {"ready": True})
    await server.serve([public, private])
    if orphaned:  # nobody else will clean up; the last worker finds the folder empty
        with suppress(OSError):
            os.unlink(own)
            os.rmdir(folder)


def _tell(fd: int, message: dict) -> None:
    with suppress(BrokenPipeError):
        os.write(fd, json.dumps(message).encode())
    os.close(fd)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
