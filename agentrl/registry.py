"""Names for things that users plug in.

A registry maps an id to an object, or to a lazy ``"module:attribute"`` string that any process
can resolve. Three ways lead in: the decorator :meth:`Registry.register`, an entry point of the
registry's group (``[project.entry-points."agentrl.envs"]``), and an import path given in place of
an id (``package.module:Class`` or ``./file.py:Class``).
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from agentrl.errors import RegistryError

T = TypeVar("T")


class Registry(Generic[T]):
    """Ids of one kind of thing.

    Args:
        kind: what is registered, for messages ("environment").
        group: entry-point group searched on the first miss, for example ``agentrl.envs``.
        builtin: lazy entries of agentrl itself.
    """

    def __init__(self, kind: str, group: str, builtin: dict[str, str] | None = None) -> None:
        self.kind = kind
        self.group = group
        self._entries: dict[str, T | str] = dict(builtin or {})
        self._discovered = False

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: register the decorated object under ``name``.

        Raises:
            RegistryError: the name is taken by something else.
        """

        def add(value: T) -> T:
            known = self._entries.get(name)
            if known is not None and known is not value:
                raise RegistryError(
                    f"{self.kind} {name!r} is already registered as {known!r}; choose another name"
                )
            self._entries[name] = value
            return value

        return add

    def names(self) -> list[str]:
        """Return every known id, sorted."""
        self._discover()
        return sorted(self._entries)

    def get(self, name: str) -> T:
        """Resolve an id, an import path or a file path.

        Raises:
            RegistryError: nothing of that name, or it cannot be imported; close matches are listed.
        """
        if name not in self._entries and ":" in name:
            return cast(T, load_object(name, kind=self.kind))
        if name not in self._entries:
            self._discover()
        if name not in self._entries:
            raise RegistryError(self._miss(name))
        entry = self._entries[name]
        if isinstance(entry, str):
            entry = cast(T, load_object(entry, kind=f"{self.kind} {name!r}"))
            self._entries[name] = entry
        return entry

    def _discover(self) -> None:
        if self._discovered:
            return
        self._discovered = True
        for point in entry_points(group=self.group):
            self._entries.setdefault(point.name, point.value)

    def _miss(self, name: str) -> str:
        close = difflib.get_close_matches(name, self._entries, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        if name.endswith(".py"):
            hint = f"did you mean '{name}:NAME', with what the file defines? "
        return (
            f"unknown {self.kind} {name!r}; {hint}known: {', '.join(self.names()) or 'none'}. "
            f"Register one with the decorator, an entry point of group {self.group!r}, "
            f"or give 'package.module:Name' or './file.py:Name'"
        )


def load_object(path: str, *, kind: str = "object") -> Any:
    """Import ``package.module:Name`` or ``./file.py:Name``.

    Raises:
        RegistryError: the module or the name does not exist, or importing it failed.
    """
    module_name, _, attribute = path.rpartition(":")
    if not module_name or not attribute:
        raise RegistryError(
            f"{kind}: {path!r} is no import path; write 'package.module:Name' or './file.py:Name'"
        )
    try:
        module = (
            _load_file(Path(module_name))
            if module_name.endswith(".py")
            else importlib.import_module(module_name)
        )
    except RegistryError:
        raise
    except (Exception, SystemExit) as error:
        raise RegistryError(
            f"{kind}: importing {module_name!r} failed with {type(error).__name__}: {error}"
            + _beside(module_name, error)
        ) from error
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = [name for name in vars(module) if not name.startswith("_")]
            close = difflib.get_close_matches(part, public, n=3)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise RegistryError(f"{kind}: {module_name!r} has no {part!r}{hint}")
        value = getattr(value, part)
    return value


def _beside(module_name: str, error: BaseException) -> str:
    """Return a hint where a file wanted another one of its folder, which is on no path."""
    wanted = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    folder = Path(module_name).expanduser().resolve().parent
    top = folder / wanted.partition(".")[0]
    if not module_name.endswith(".py") or not wanted:
        return ""
    if not (top.is_dir() or top.with_suffix(".py").is_file()):
        return ""
    return f"; modules beside the file are found with PYTHONPATH={folder}"


def _load_file(path: Path) -> Any:
    resolved = path.expanduser().resolve()
    if not resolved.is_file():
        raise RegistryError(f"no file {str(path)!r}; paths are relative to {Path.cwd()}")
    # One name per path: loading a file twice gives the same classes, also in child processes.
    digest = hashlib.blake2b(str(resolved).encode(), digest_size=4).hexdigest()
    name = f"agentrl_file_{resolved.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise RegistryError(f"{str(path)!r} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
