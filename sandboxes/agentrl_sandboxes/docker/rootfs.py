"""A root file system for boxes from what this machine has: its Python, bash and busybox.

Small (some 45 MB), built in a second, and without a registry. The archive is the same bytes for the
same inputs, and `fingerprint` names those inputs, so that an image needs to be built once.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from agentrl.errors import SandboxUnavailable

_LEFT_OUT = {
    *("__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip"),
    *("site-packages", "dist-packages", "lib2to3"),
}
_FOLDERS = ("box", "dev", "etc", "home", "proc", "root", "run", "sys", "usr", "usr/bin", "usr/lib")
_FOLDERS += ("usr/lib64", "var")
_LINKS = {"bin": "usr/bin", "sbin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64"}
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nuser:x:65534:65534:user:/box:/bin/sh\n"
_GROUP = "root:x:0:\nuser:x:65534:\n"
_TOOL_S = 60.0


@dataclass(slots=True, kw_only=True, frozen=True)
class Rootfs:
    """What goes into the archive: files by their path inside, and links."""

    files: dict[str, Path]
    links: dict[str, str]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over names, sizes and times of all files, and over this module."""
        digest = hashlib.sha256(Path(__file__).read_bytes())
        for target, source in sorted(self.files.items()):
            stat = source.stat()
            digest.update(f"{target}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        digest.update(repr(sorted(self.links.items())).encode())
        return digest.hexdigest()

    def _folders(self) -> set[str]:
        """Every folder, by name: one that is only implied gets its mode from the engine's umask."""
        parents = (PurePosixPath(name).parents for name in (*self.files, *self.links))
        return {str(folder) for some in parents for folder in some} - {"."}

    def write(self, path: Path) -> None:
        """Write the archive, complete or not at all."""
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with tarfile.open(partial, "w", format=tarfile.GNU_FORMAT) as archive:
                for name in sorted({*_FOLDERS, *self._folders()}):
                    _add(archive, name, tarfile.DIRTYPE)
                _add(archive, "tmp", tarfile.DIRTYPE, mode=0o1777)
                for name, target in sorted({**_LINKS, **self.links}.items()):
                    _add(archive, name, tarfile.SYMTYPE, link=target)
                for name, text in (("etc/passwd", _PASSWD), ("etc/group", _GROUP)):
                    _add(archive, name, tarfile.REGTYPE, data=text.encode(), mode=0o644)
                for name, source in sorted(self.files.items()):
                    mode = 0o755 if os.access(source, os.X_OK) else 0o644
                    _add(archive, name, tarfile.REGTYPE, data=source.read_bytes(), mode=mode)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def collect(python: str = "/usr/bin/python3") -> Rootfs:
    """List what an image with this interpreter needs.

    Raises:
        SandboxUnavailable: the interpreter or a static busybox is missing; says how to get it.
    """
    if not os.access(python, os.X_OK):
        raise SandboxUnavailable(
            f"no Python at {python}; install it (apt-get install -y python3) or name another one"
        )
    busybox = shutil.which("busybox", path="/usr/bin:/bin:/usr/local/bin")
    if busybox is None:
        raise SandboxUnavailable(
            "an image needs the commands of a static busybox, which is missing. Run: "
            "apt-get install -y busybox-static"
        )
    binary = Path(os.path.realpath(python))
    stdlib = Path(_ask(python, "-I", "-c", "import os; print(os.path.dirname(os.__file__))"))
    files = {inside(binary): binary, "usr/bin/busybox": Path(os.path.realpath(busybox))}
    for source in _stdlib_files(stdlib):
        files[inside(source)] = source
    links = {name: "busybox" for name in _applets(busybox)}
    programs = [binary, *(path for path in files.values() if path.suffix == ".so")]
    bash = shutil.which("bash", path="/usr/bin:/bin")
    if bash is not None:
        files["usr/bin/bash"] = Path(os.path.realpath(bash))
        programs.append(files["usr/bin/bash"])
    for library in libraries(programs):
        files[inside(library)] = Path(os.path.realpath(library))
    for name in ("usr/bin/python3", "usr/bin/python"):
        if name not in files:
            links[name] = "/" + inside(binary)
    for name in files:
        links.pop(name, None)
    return Rootfs(files=files, links=links)


def inside(path: Path) -> str:
    """The path in the image, whose /bin and /lib are links below /usr."""
    name = str(path).lstrip("/")
    return f"usr/{name}" if re.match(r"(lib|lib64|bin|sbin)/", name) else name


def _stdlib_files(stdlib: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(stdlib):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix not in (".a", ".pyc") and path.is_file():
                yield path


def _applets(busybox: str) -> list[str]:
    names = _ask(busybox, "--list").split()
    return [f"usr/bin/{name}" for name in names if "/" not in name and name != "busybox"]


def libraries(programs: list[Path]) -> list[Path]:
    """Shared libraries, and the loader, of these programs, by the paths they are asked for."""
    listed = subprocess.run(
        ["ldd", *map(str, programs)], capture_output=True, text=True, timeout=_TOOL_S, check=False
    ).stdout
    return [Path(name) for name in sorted(set(re.findall(r"(/\S+) \(0x", listed)))]


def _ask(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=False)
    if done.returncode != 0:
        raise SandboxUnavailable(f"{command[0]} cannot be used for an image: {done.stderr.strip()}")
    return done.stdout.strip()


def _add(
    archive: tarfile.TarFile,
    name: str,
    kind: bytes,
    *,
    mode: int = 0o755,
    data: bytes = b"",
    link: str = "",
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname, entry.size = kind, mode, link, len(data)
    archive.addfile(entry, io.BytesIO(data))
