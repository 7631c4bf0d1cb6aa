"""Reading YAML that somebody else wrote: safe types only, bounded, with line and column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import ToolSpecError

_MAX_BYTES = 256 * 1024
_MAX_NODES = 10_000
_MAX_DEPTH = 64


def load_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Refused: tags, aliases, duplicate keys, several documents, more than 256 KiB, 10,000 nodes or
    64 levels.

    Raises:
        ToolSpecError: with the file, line and column.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ToolSpecError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > _MAX_BYTES:
        raise ToolSpecError(f"{path}: {len(raw)} bytes; a tool spec has at most {_MAX_BYTES}")
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise ToolSpecError(f"{path}:1:1: begins with a byte order mark; save it as plain UTF-8")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ToolSpecError(f"{path}:{line}: is not UTF-8: {error.reason}") from error
    try:
        _check_events(text, path)
        value = yaml.load(text, Loader=_UniqueKeyLoader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        if "'\\t'" in problem:
            problem += "; YAML does not take tabs, indent with blanks"
        raise ToolSpecError(f"{_at(path, mark)}: {problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ToolSpecError(f"{path}:1:1: {error}") from error
    if not isinstance(value, dict):
        got = "nothing" if value is None else type(value).__name__
        raise ToolSpecError(
            f"{path}:1:1: a tool spec is a mapping with name, description, parameters and python; "
            f"got {got}"
        )
    return value


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
            raise ToolSpecError(
                f"{where}: the tag {tag!r} is refused (a tag can run code); use plain YAML values"
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


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader for which a key given twice is an error, not a silent choice."""

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


def _at(path: Path, mark: Any) -> str:
    return f"{path}:1:1" if mark is None else f"{path}:{mark.line + 1}:{mark.column + 1}"
