"""What an agent submits: the function as its cells left it, or a code block of its last message.

Cells are read, never run, here. Replayed in a fresh interpreter, the statements kept give the
workspace's names again: definitions, imports, assignments and blocks, in order. Bare expressions
(``check(f)``, ``print(...)``) are dropped, since they only show something; a cell that does not
parse counts for nothing. Of one that a limit cut short only functions and imports are kept: what
ran for ever there would do so again.
"""

from __future__ import annotations

import ast
import re
import warnings

MAX_CELL_CHARS = 100_000
# The model's odd literals ("1if x") are its own affair.
warnings.filterwarnings("ignore", category=SyntaxWarning, module="<cell>")

_BLOCK = re.compile(r"^```(?:python|py)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_QUICK = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom)
# With the future import, an annotation that names nothing does no harm.
_PRELUDE = "from __future__ import annotations\ndef check(f): pass"


class Workspace:
    """The names that the cells of an episode leave behind.

    A statement that raised in its cell did not stop the next cell, and does not here: all but
    definitions are guarded. Calls of ``check`` find one that does nothing.
    """

    def __init__(self, entry_point: str) -> None:
        self._entry_point = entry_point
        self._kept = [_PRELUDE]
        self._defined = False

    def add(self, cell: str, *, cut_short: bool = False) -> None:
        """Take note of a cell that ran.

        Args:
            cut_short: it did not come to its end.
        """
        for statement in _statements(cell):
            if cut_short and not isinstance(statement, _QUICK):
                continue
            self._defined |= self._entry_point in _names(statement)
            self._kept.append(_guarded(statement))

    def source(self) -> str | None:
        """Return source that defines the entry point; None where no cell did."""
        return "\n".join(self._kept) if self._defined else None


def block_source(message: str) -> tuple[bool, str | None]:
    """Find a ```` ```python ```` block in a message.

    Returns:
        Whether there is any, and its source: None where there are several, since a message with
        two answers has none.
    """
    blocks = _BLOCK.findall(message)
    return bool(blocks), blocks[0] if len(blocks) == 1 else None


def _statements(cell: str) -> list[ast.stmt]:
    if len(cell) > MAX_CELL_CHARS:
        return []
    try:
        tree = ast.parse(cell, filename="<cell>")
        compile(tree, "<cell>", "exec", dont_inherit=True)  # finds a stray `return`, for one
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [statement for statement in tree.body if not isinstance(statement, ast.Expr)]


def _names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement may bind at the top level."""
    if isinstance(statement, _DEFINITIONS):
        return {statement.name}
    names: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, _DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return names


def _guarded(statement: ast.stmt) -> str:
    try:
        source = ast.unparse(statement)
    except (RecursionError, ValueError):
        return "pass"
    if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
        return "pass"  # must come first in a file, and is there already
    if isinstance(statement, ast.FunctionDef) and not (
        statement.decorator_list or statement.args.defaults or statement.args.kw_defaults
    ):
        return source  # cannot raise: the common case stays readable
    body = source.replace("\n", "\n    ")
    return f"try:\n    {body}\nexcept (Exception, SystemExit):\n    pass"
