"""A local server that speaks E2B's API, so that its official SDK can be tested without a key.

Of the API it has what a client needs to create a sandbox, run processes in it with their streams,
extend its time and kill it. A "micro-VM" is a set of namespaces of this machine, made by
bubblewrap, in which the client is root: **it isolates nothing from a program that means harm**,
and needs root. What a client locks up inside is its own business, as it is at E2B.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from agentrl.errors import SandboxUnavailable
from agentrl.extras import missing_extra

if TYPE_CHECKING:
    from connectrpc.request import RequestContext
    from e2b.envd.process import process_pb as pb
    from e2b.envd.process.process_connect import Process
    from starlette.requests import Request
    from starlette.responses import Response

_ENVD_VERSION = "0.6.4"
_START_S = 20.0
_READ_BYTES = 1 << 16


@dataclass(slots=True)
class VirtualMachine:
    """One sandbox: its processes, and when its time is over."""

    sandbox_id: str
    access_token: str
    ends_at: float
    processes: dict[int, asyncio.subprocess.Process] = field(default_factory=dict)

    def kill(self) -> None:
        """End every process, and with each its namespace."""
        for process in self.processes.values():
            _kill_group(process)


class E2BServer:
    """The server; `api_key` is the only key it takes. `machines` are those alive."""

    def __init__(self, api_key: str) -> None:
        self.machines: dict[str, VirtualMachine] = {}
        self.created = 0
        """Sandboxes created so far."""
        self._api_key = api_key
        self._pids = itertools.count(100)

    async def create(self, request: Request) -> Response:
        """POST /v2/sandboxes."""
        from starlette.responses import JSONResponse

        if (refused := self._refuse_key(request)) is not None:
            return refused
        body = await request.json()
        machine = VirtualMachine(
            "i" + secrets.token_hex(10),
            secrets.token_hex(16),
            time.monotonic() + float(body.get("timeout") or 300),
        )
        self.machines[machine.sandbox_id] = machine
        self.created += 1
        told = {
            "templateID": body["templateID"],
            "sandboxID": machine.sandbox_id,
            "clientID": "local",
            "envdVersion": _ENVD_VERSION,
            "envdAccessToken": machine.access_token,
        }
        return JSONResponse(told, status_code=201)

    async def kill(self, request: Request) -> Response:
        """DELETE /sandboxes/{id}."""
        from starlette.responses import JSONResponse, Response

        if (refused := self._refuse_key(request)) is not None:
            return refused
        machine = self.machines.pop(request.path_params["sandbox_id"], None)
        if machine is None:
            return JSONResponse({"code": 404, "message": "sandbox not found"}, status_code=404)
        machine.kill()
        return Response(status_code=204)

    async def set_timeout(self, request: Request) -> Response:
        """POST /sandboxes/{id}/timeout."""
        from starlette.responses import JSONResponse, Response

        if (refused := self._refuse_key(request)) is not None:
            return refused
        machine = self.machines.get(request.path_params["sandbox_id"])
        if machine is None:
            return JSONResponse({"code": 404, "message": "sandbox not found"}, status_code=404)
        machine.ends_at = time.monotonic() + float((await request.json())["timeout"])
        return Response(status_code=204)

    async def health(self, request: Request) -> Response:
        """GET /health of a sandbox's daemon: 502 once the sandbox is gone, as at E2B."""
        from starlette.responses import Response

        found = request.headers.get("e2b-sandbox-id", "") in self.machines
        return Response(status_code=204 if found else 502)

    async def expire_forever(self) -> None:
        """Kill machines whose time is over, until cancelled."""
        while True:
            await asyncio.sleep(0.25)
            now = time.monotonic()
            for machine in list(self.machines.values()):
                if machine.ends_at <= now:
                    self.machines.pop(machine.sandbox_id).kill()

    def kill_all(self) -> None:
        """Kill every machine, as an outage does."""
        for machine in self.machines.values():
            machine.kill()
        self.machines.clear()

    def application(self) -> Any:
        """Return the ASGI application of both planes."""
        from e2b.envd.process.process_connect import ProcessASGIApplication
        from starlette.applications import Starlette
        from starlette.routing import Mount, Route

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            expiring = asyncio.create_task(self.expire_forever())
            try:
                yield
            finally:
                expiring.cancel()
                self.kill_all()

        routes = [
            Route("/v2/sandboxes", self.create, methods=["POST"]),
            Route("/sandboxes/{sandbox_id}", self.kill, methods=["DELETE"]),
            Route("/sandboxes/{sandbox_id}/timeout", self.set_timeout, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Mount("/", ProcessASGIApplication(cast("Process", _Processes(self)))),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    def machine_of(self, ctx: RequestContext[Any, Any]) -> VirtualMachine:
        """Return the machine that a call names, if its token is right."""
        from connectrpc.code import Code
        from connectrpc.errors import ConnectError

        machine = self.machines.get(ctx.request_headers.get("e2b-sandbox-id") or "")
        if machine is None:
            raise ConnectError(Code.UNAVAILABLE, "The sandbox was not found")
        if ctx.request_headers.get("x-access-token") != machine.access_token:
            raise ConnectError(Code.UNAUTHENTICATED, "invalid access token")
        return machine

    async def start_process(
        self, machine: VirtualMachine, config: pb.ProcessConfig, *, stdin: bool
    ) -> tuple[int, asyncio.subprocess.Process]:
        """Start a command in a machine; return the number by which clients name it."""
        process = await asyncio.create_subprocess_exec(
            *_enter_machine(dict(config.envs)),
            *(config.cmd, *config.args),
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
            start_new_session=True,
        )
        pid = next(self._pids)
        machine.processes[pid] = process
        return pid, process

    def _refuse_key(self, request: Request) -> Response | None:
        from starlette.responses import JSONResponse

        if request.headers.get("x-api-key") == self._api_key:
            return None
        return JSONResponse({"code": 401, "message": "invalid API key"}, status_code=401)


class _Processes:
    """The process service of a sandbox's daemon, as far as it is used."""

    def __init__(self, server: E2BServer) -> None:
        self._server = server
        self.list = self.connect = self.update = self.stream_input = self.close_stdin = _unserved

    async def start(
        self, request: pb.StartRequest, ctx: RequestContext[Any, Any]
    ) -> AsyncIterator[pb.StartResponse]:
        """Start a process and stream what it writes, then how it ended."""
        from e2b.envd.process import process_pb
        from protobuf import Oneof

        def event(kind: Any, value: Any) -> pb.StartResponse:
            inner = process_pb.ProcessEvent(event=Oneof(kind, value))
            return process_pb.StartResponse(event=inner)

        def output(stream: Any, chunk: bytes) -> pb.StartResponse:
            return event("data", process_pb.ProcessEvent.DataEvent(output=Oneof(stream, chunk)))

        assert request.process is not None  # the SDK always sends it
        machine = self._server.machine_of(ctx)
        pid, process = await self._server.start_process(
            machine, request.process, stdin=bool(request.stdin)
        )
        yield event("start", process_pb.ProcessEvent.StartEvent(pid=pid))
        try:
            async for name, chunk in _outputs(process):
                yield output(name, chunk)
            code = await process.wait()
            yield event(
                "end",
                process_pb.ProcessEvent.EndEvent(
                    exit_code=code, exited=code >= 0, status=f"exit status {code}"
                ),
            )
        finally:
            machine.processes.pop(pid, None)
            _kill_group(process)

    async def send_input(
        self, request: pb.SendInputRequest, ctx: RequestContext[Any, Any]
    ) -> pb.SendInputResponse:
        """Write to a process's standard input."""
        from connectrpc.code import Code
        from connectrpc.errors import ConnectError
        from e2b.envd.process import process_pb

        process = self._process(request, ctx)
        given = request.input.input if request.input is not None else None
        if process.stdin is None or given is None:
            raise ConnectError(Code.FAILED_PRECONDITION, "the process takes no input")
        try:
            process.stdin.write(given.value)
            await process.stdin.drain()
        except OSError as error:
            raise ConnectError(Code.FAILED_PRECONDITION, str(error)) from None
        return process_pb.SendInputResponse()

    async def send_signal(
        self, request: pb.SendSignalRequest, ctx: RequestContext[Any, Any]
    ) -> pb.SendSignalResponse:
        """Kill a process."""
        from e2b.envd.process import process_pb

        _kill_group(self._process(request, ctx))
        return process_pb.SendSignalResponse()

    def _process(self, request: Any, ctx: RequestContext[Any, Any]) -> asyncio.subprocess.Process:
        from connectrpc.code import Code
        from connectrpc.errors import ConnectError

        selector = request.process.selector if request.process is not None else None
        machine = self._server.machine_of(ctx)
        process = machine.processes.get(selector.value if selector is not None else -1)
        if process is None:
            raise ConnectError(Code.NOT_FOUND, "no such process")
        return process


def _kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill a command also where it has not yet entered its namespace, which would end it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def _unserved(*_: object) -> Any:
    from connectrpc.code import Code
    from connectrpc.errors import ConnectError

    raise ConnectError(Code.UNIMPLEMENTED, "not served by this stand-in")


async def _outputs(process: asyncio.subprocess.Process) -> AsyncIterator[tuple[str, bytes]]:
    """Yield what a process writes on both streams, as it comes."""
    arrived: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(64)

    async def pump(name: str, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(_READ_BYTES):
            await arrived.put((name, chunk))
        await arrived.put((name, b""))

    assert process.stdout is not None and process.stderr is not None  # both are pipes
    pumps = [
        asyncio.create_task(pump("stdout", process.stdout)),
        asyncio.create_task(pump("stderr", process.stderr)),
    ]
    try:
        open_streams = len(pumps)
        while open_streams:
            name, chunk = await arrived.get()
            if chunk:
                yield name, chunk
            else:
                open_streams -= 1
    finally:
        for task in pumps:
            task.cancel()


def _enter_machine(variables: dict[str, str]) -> list[str]:
    """What stands before a command: namespaces in which it is root, over this machine's files."""
    command = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--die-with-parent", "--cap-add", "ALL", "--hostname", "vm", "--clearenv"]
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/", **variables}
    for name, value in variables.items():
        command += ["--setenv", name, value]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        command += ["--ro-bind-try", name, name]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    return [*command, "--chdir", "/", "--"]


@contextlib.contextmanager
def e2b_server(api_key: str) -> Iterator[tuple[str, E2BServer]]:
    """Serve on 127.0.0.1 and a free port for the body; yields the address and the server.

    Raises:
        SandboxUnavailable: it cannot work here.
    """
    if os.geteuid() != 0 or shutil.which("bwrap") is None:
        raise SandboxUnavailable("the stand-in for E2B needs root and bubblewrap (bwrap)")
    try:
        import e2b  # noqa: F401
        import uvicorn
    except ImportError:
        raise SandboxUnavailable(missing_extra("e2b,server", "the stand-in for E2B")) from None
    stand_in = E2BServer(api_key)
    config = uvicorn.Config(
        stand_in.application(),
        port=0,
        log_level="error",
        lifespan="on",
        loop="asyncio",
        timeout_graceful_shutdown=1,  # streams of processes would keep it up for their life
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="e2b-stand-in", daemon=True)
    thread.start()
    deadline = time.monotonic() + _START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise SandboxUnavailable("the stand-in for E2B did not start")
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", stand_in
    finally:
        while stand_in.machines:  # streams of their processes would keep the server up
            stand_in.machines.popitem()[1].kill()
        server.should_exit = True
        thread.join(_START_S)
