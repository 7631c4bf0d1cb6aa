"""The untrusted side: runs cells, or one private program, and reports how they ended.

Everything here shares a process with the code it runs, so nothing here is believed: the
supervisor outside bounds time, memory and output, and the host treats a report as a claim.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import os
import random
import signal
import socket
import sys
import traceback
import types
from typing import Any

from . import kernel, wire

_MAX_ERROR_CHARS = 8192


class Interrupted(BaseException):
    """The time limit of this call was reached."""


class _Alarm:
    """Turns SIGALRM into :class:`Interrupted`, but only while a program runs."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self, *_: object) -> None:
        if self.armed:
            self.armed = False
            raise Interrupted("time limit reached")


def serve(channel: socket.socket, output_bytes: int) -> None:
    """Answer requests until the channel ends."""
    own_pid = os.getpid()
    alarm = _Alarm()
    signal.signal(signal.SIGALRM, alarm)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A fixed start, so that a run can be repeated; a program may seed it anew.
    random.seed(0)
    streams = _open_streams()
    namespace = _fresh_main()
    cell = 0
    while True:
        message = wire.receive(channel, 1 << 30)
        if message is None:
            return
        request, body = message
        cell += 1
        if request["op"] == "private":
            size = int(request["payload_bytes"])
            payload, source = body[:size], body[size:]
            namespace = {"__name__": "__private__", "PAYLOAD": payload}
            namespace["reply"] = lambda data: channel.sendall(
                wire.PREFIX.pack(0, len(data)) + bytes(data)
            )
            report = _run(source, "<private>", namespace, alarm, output_bytes)
        else:
            if cell == 1:
                kernel.set_dumpable(True)  # a program may look at itself: /proc/self/fd and more
            report = _run(body, f"<cell {cell}>", namespace, alarm, output_bytes)
        if os.getpid() != own_pid:
            _flush(streams)
            os._exit(0 if report["kind"] == "ok" else 1)  # the program forked and came back here
        _flush(streams)
        channel.sendall(wire.pack(report, wire.NUMBER.pack(request["number"])))


def warm_up() -> None:
    """Run the paths of a request a few times: what the interpreter caches is then shared."""
    for _ in range(16):
        report = _run(b"x = [1]\nx[0] + 1", "<cell 1>", {}, _Alarm(), 1024)
        wire.parse_header(wire.pack(report)[wire.PREFIX.size :])
        _run(b"1 / 0", "<cell 1>", {}, _Alarm(), 1024)


def _open_streams() -> tuple[io.TextIOWrapper, io.TextIOWrapper]:
    sys.stdin = io.TextIOWrapper(io.FileIO(0, "r"), encoding="utf-8")
    streams = []
    for fd in (1, 2):
        raw = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
        # Line by line, so that what was printed before a kill is not lost with the process.
        streams.append(
            io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        )
    sys.stdout, sys.stderr = streams
    sys.__stdout__, sys.__stderr__ = streams
    return streams[0], streams[1]


def _fresh_main() -> dict[str, Any]:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    sys.path.insert(0, "")  # modules in the work directory, as in an interactive interpreter
    return module.__dict__


def _run(
    source: bytes, name: str, namespace: dict[str, Any], alarm: _Alarm, output_bytes: int
) -> dict[str, Any]:
    """Run a program and describe its end; never raises."""
    try:
        try:
            alarm.armed = True
            result = _execute(source, name, namespace, output_bytes)
        finally:
            alarm.armed = False
    except SystemExit as stop:
        return _describe_exit(stop)
    except BaseException as error:
        return _describe_failure(error, name)
    return {"kind": "ok", "result": result}


def _execute(source: bytes, name: str, namespace: dict[str, Any], cap: int) -> str | None:
    text = source.decode("utf-8", "replace")
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    tree = ast.parse(text, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)
    if last is None:
        return None
    expression = ast.Expression(last.value)  # type: ignore[attr-defined]
    value = eval(compile(expression, name, "eval", dont_inherit=True), namespace)
    if value is None:
        return None
    namespace["_"] = value
    shown = str(repr(value))
    if len(shown) > cap:
        shown = shown[:cap] + f"... [{len(shown) - cap} characters cut]"
    return shown


def _describe_exit(stop: SystemExit) -> dict[str, Any]:
    code = stop.code
    if code is None:
        code = 0
    if type(code) is int:
        return {"kind": "exit", "exit_code": code & 0xFF}
    return {"kind": "exit", "exit_code": 1, "error": _safe_text(code)}


def _describe_failure(error: BaseException, name: str) -> dict[str, Any]:
    kind = "error"
    if isinstance(error, Interrupted):
        kind = "interrupted"
    elif isinstance(error, MemoryError):
        kind = "memory"
    elif isinstance(error, BlockingIOError) or "can't start new thread" in _safe_text(error):
        kind = "pids"
    return {"kind": kind, "error": _format(error, name)}


def _format(error: BaseException, name: str) -> str:
    """The traceback from the program's first frame on, cut in the middle if long."""
    try:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != name:
            trace = trace.tb_next
        lines = traceback.TracebackException(type(error), error, trace, compact=True).format()
        text = "".join(lines).rstrip("\n")
    except BaseException:  # a hostile __str__ may raise anything
        text = type(error).__name__
    if len(text) > _MAX_ERROR_CHARS:
        half = _MAX_ERROR_CHARS // 2
        text = f"{text[:half]}\n... [{len(text) - 2 * half} characters cut] ...\n{text[-half:]}"
    return text


def _safe_text(value: object) -> str:
    try:
        return str(value)[:_MAX_ERROR_CHARS]
    except BaseException:
        return type(value).__name__


def _flush(streams: tuple[io.TextIOWrapper, io.TextIOWrapper]) -> None:
    for stream in streams:
        with contextlib.suppress(BaseException):  # the program may have closed it
            stream.flush()
