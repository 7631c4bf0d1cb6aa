"""Reading YAML that somebody else wrote: safe types only, bounded, with line and column.

Plain values are read as YAML 1.2 reads them: ``true`` and ``false`` are the only booleans (``no``
and ``on`` are text), a leading zero makes no octal, ``1e-6`` is a number, a date is text.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import ToolSpecError

_MAX_BYTES = 256 * 1024
_MAX_NODES = 10_000
_MAX_DEPTH = 64
_MAX_DIGITS = 30
_MAX_PROBLEM = 1000
"""Characters of a message: what it quotes can be as long as the file."""

Key = str | int
Mark = tuple[int, int]
"""Line and column, from 1."""


@dataclass(slots=True, frozen=True)
class Document:
    """A YAML file and where everything stands in it."""

    file: Path
    value: dict[str, Any]
    values_at: dict[tuple[Key, ...], Mark]
    """Path of keys and indices to where the value begins; the empty path is the whole."""
    keys_at: dict[tuple[Key, ...], Mark]
    """Path to where the key itself stands."""

    def error(self, problem: str, *path: Key, at_key: bool = False) -> ToolSpecError:
        """Return an error that names the place of ``path``, or of what of it exists.

        Args:
            problem: what is wrong, and how to mend it.
            path: keys and indices from the top.
            at_key: point to the key, not to its value.
        """
        known = tuple(path)
        if at_key and known in self.keys_at:
            line, column = self.keys_at[known]
        else:
            while known not in self.values_at:
                known = known[:-1]
            line, column = self.values_at[known]
        return _problem(f"{self.file}:{line}:{column}", problem)


def load_document(path: Path) -> Document:
    """Read the mapping in a YAML file.

    Refused: tags, aliases, duplicate keys, several documents, more than 256 KiB, 10,000 nodes or
    64 levels.

    Raises:
        ToolSpecError: with the file, line and column.
    """
    text = _read(path)
    try:
        _check_events(text, path)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            value = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        if "'\\t'" in problem:
            problem += "; YAML does not take tabs, indent with blanks"
        raise _problem(_at(path, mark), problem) from error
    except yaml.reader.ReaderError as error:  # a character that YAML does not allow
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - (before.rfind("\n") + 1) + 1
        raise ToolSpecError(
            f"{path}:{line}:{column}: the character {chr(error.character)!r} is not allowed; "  # pyright: ignore[reportArgumentType]
            "remove it, or write it in double quotes with a backslash"
        ) from error
    if not isinstance(value, dict):
        got = "nothing" if value is None else type(value).__name__
        raise ToolSpecError(
            f"{path}:1:1: a tool spec is a mapping with name, description, parameters and what "
            f"runs it; got {got}"
        )
    document = Document(path, value, {}, {})
    _note_places(node, (), document)
    return document


def _problem(where: str, problem: str) -> ToolSpecError:
    if len(problem) > _MAX_PROBLEM:
        problem = f"{problem[: _MAX_PROBLEM // 2]} ... {problem[-_MAX_PROBLEM // 2 :]}"
    return ToolSpecError(f"{where}: {problem}")


def _read(path: Path) -> str:
    try:
        # Not blocking: opening a pipe that nobody writes to would wait for ever.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ToolSpecError(f"{path}: is no plain file; a tool spec is one")
            raw = file.read(_MAX_BYTES + 1)
    except IsADirectoryError:
        raise ToolSpecError(f"{path}: is a folder; a tool spec is a file in it") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        reason = getattr(error, "strerror", None) or error
        raise ToolSpecError(f"{str(path)[:300]}: cannot be read: {reason}") from error
    if len(raw) > _MAX_BYTES:
        raise ToolSpecError(f"{path}:1:1: more than {_MAX_BYTES} bytes, which a tool spec may have")
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise ToolSpecError(f"{path}:1:1: begins with a byte order mark; save it as plain UTF-8")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        begin = raw.rfind(b"\n", 0, error.start) + 1
        column = len(raw[begin : error.start].decode("utf-8")) + 1
        raise ToolSpecError(f"{path}:{line}:{column}: is not UTF-8: {error.reason}") from error


def _check_events(text: str, path: Path) -> None:
    """Refuse what could be dangerous to construct, before anything is constructed."""
    num_nodes = depth = num_documents = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        where = _at(path, event.start_mark)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ToolSpecError(
                f"{where}: anchors and aliases are refused (they can expand without bound); "
                "write the value out"
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise _problem(
                where, f"the tag {tag!r} is refused (a tag can run code); use plain YAML values"
            )
        num_documents += isinstance(event, yaml.DocumentStartEvent)
        num_nodes += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if num_nodes > _MAX_NODES or depth > _MAX_DEPTH or num_documents > 1:
            raise ToolSpecError(
                f"{where}: a tool spec is one document of at most {_MAX_NODES} nodes and "
                f"{_MAX_DEPTH} levels"
            )


class _Loader(yaml.SafeLoader):
    """Safe; a key given twice is an error, not a silent choice; plain values as in YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # in place of those of YAML 1.1

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping; keys must be text and unique."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = None
            if not isinstance(key, str):
                problem = f"the key {key!r} is no text; quote it"
            elif key in seen:
                problem = f"the key {key!r} is given twice"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _construct_int(loader: _Loader, node: Any) -> int:
    if len(node.value) > _MAX_DIGITS:
        raise yaml.constructor.ConstructorError(
            None, None, f"a number of more than {_MAX_DIGITS} digits; quote it", node.start_mark
        )
    return int(node.value, 0)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
for _tag, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", list("tf")),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})$"), _first
    )


def _note_places(node: Any, path: tuple[Key, ...], document: Document) -> None:
    document.values_at[path] = _place(node.start_mark)
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            inner = (*path, key_node.value)
            document.keys_at[inner] = _place(key_node.start_mark)
            _note_places(value_node, inner, document)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_places(item, (*path, index), document)


def _place(mark: Any) -> Mark:
    return mark.line + 1, mark.column + 1


def _at(path: Path, mark: Any) -> str:
    return f"{path}:1:1" if mark is None else f"{path}:{mark.line + 1}:{mark.column + 1}"
