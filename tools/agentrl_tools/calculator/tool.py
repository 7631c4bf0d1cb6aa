"""Evaluates arithmetic by walking the syntax tree: numbers and seven operators, all bounded."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from agentrl.errors import ToolError

Number = int | float

_MAX_CHARS = 500
_MAX_BITS = 512
_MAX_DEPTH = 50
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


async def calculate(expression: str) -> str:
    """Return the value of ``expression``; whole floats are written as integers.

    Raises:
        ToolError: not arithmetic, a division by zero, or a number beyond 512 bits.
    """
    if len(expression) > _MAX_CHARS:
        raise ToolError(f"the expression has more than {_MAX_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _bounded(_evaluate(tree.body, 0))
    except ToolError:
        raise
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the number is too large") from None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError("not an arithmetic expression") from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)


def _evaluate(node: ast.expr, depth: int) -> Number:
    if depth > _MAX_DEPTH:
        raise ToolError(f"brackets nest more than {_MAX_DEPTH} deep")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand, depth + 1)
        case ast.BinOp(left=left, op=op, right=right):
            # 1+2+3 nests to the left, as deep as it is long, without a bracket.
            a, b = _evaluate(left, depth), _evaluate(right, depth + 1)
            return _power(a, b) if isinstance(op, ast.Pow) else _apply(op, a, b)
        case _:
            raise ToolError("only numbers, + - * / // % ** and brackets are allowed")


def _apply(op: ast.operator, a: Number, b: Number) -> Number:
    function = _BINARY.get(type(op))
    if function is None:
        raise ToolError("only the operators + - * / // % ** are allowed")
    return _bounded(function(a, b))


def _power(base: Number, exponent: Number) -> Number:
    """Refuse a power before it is computed where its size is already clear."""
    size = base.bit_length() * exponent if isinstance(base, int) and abs(base) > 1 else 0
    if size > 2 * _MAX_BITS:
        raise OverflowError
    value = base**exponent
    if isinstance(value, complex):
        raise ToolError("a root of a negative number is not a real number")
    return _bounded(value)


def _bounded(value: Number) -> Number:
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise OverflowError
    elif not math.isfinite(value):
        raise OverflowError
    return value
