"""``@tool``: a typed function says itself what a spec would say of it.

::

    @tool(idempotent=True, limits=ToolLimits(timeout_s=5))
    def lookup(word: str, language: Literal["en", "de"] = "en") -> str:
        \"\"\"Look a word up in the glossary.

        Args:
            word: in its basic form.
        \"\"\"

Such a function stands in ``Env.tools`` itself, or in a spec under ``python:``, which may then leave
out name, description and parameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints, overload

from agentrl.errors import ToolSpecError
from agentrl.tool.annotations import Described, convert_values, describe, with_default
from agentrl.tool.docstring import read_docstring
from agentrl.tool.parameters import parameters_problem
from agentrl.tool.runners.base import ToolOffer
from agentrl.tool.spec import ToolLimits, ToolSpec, is_tool_name

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__agentrl_tool__"


@dataclass(slots=True, frozen=True, kw_only=True)
class _Declared:
    """What a function says of itself as a tool."""

    name: str
    description: str
    parameters: dict[str, Any]
    idempotent: bool
    limits: ToolLimits


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    idempotent: bool = False,
    limits: ToolLimits | None = None,
) -> Callable[[F], F]: ...
def tool(
    function: Any = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    idempotent: bool = False,
    limits: ToolLimits | None = None,
) -> Any:
    """Mark a function as a tool; its annotations and docstring are what a spec would say.

    The function can be called as before. Where the model's JSON stands for a dataclass, an Enum or
    a tuple, the function is given one.

    Args:
        function: sync or async; every parameter annotated.
        name: the function's, unless given.
        description: the docstring's up to its first section, unless given.
        idempotent: calling twice does no harm.
        limits: other than the defaults.

    Raises:
        ToolSpecError: something that a spec cannot express; names the parameter.
    """

    def mark(function: Any) -> Any:
        where = f"@tool {getattr(function, '__qualname__', function)!s}"
        if not inspect.isfunction(function):
            raise ToolSpecError(
                f"{where}: marks functions; for a class with open, call and close write a YAML "
                "spec with python:"
            )
        _check_options(
            where, name=name, description=description, limits=limits, idempotent=idempotent
        )
        text, notes = read_docstring(inspect.getdoc(function) or "")
        found = _parameters(function, notes, where)
        declared = _Declared(
            name=name or function.__name__,
            description=(description or text).strip(),
            parameters=_schema(found, function),
            idempotent=idempotent,
            limits=limits or ToolLimits(),
        )
        _check(declared, where)
        marked = _converting(function, found)
        setattr(marked, _MARK, declared)
        return marked

    return mark if function is None else mark(function)


def offer_of(found: Any) -> ToolOffer | None:
    """Return what a marked function says of itself; None for anything else."""
    declared: _Declared | None = getattr(found, _MARK, None)
    if declared is None:
        return None
    defaults = asdict(ToolLimits())
    return ToolOffer(
        name=declared.name,
        description=declared.description,
        parameters=declared.parameters,
        target=None,
        idempotent=declared.idempotent,
        limits={k: v for k, v in asdict(declared.limits).items() if v != defaults[k]},
    )


def spec_of(found: Any, *, named: Any) -> ToolSpec:
    """Return the spec of a marked function.

    Args:
        found: the function.
        named: how it was asked for, for messages.

    Raises:
        ToolSpecError: it is none.
    """
    declared: _Declared | None = getattr(found, _MARK, None)
    if declared is None:
        raise ToolSpecError(
            f"tool {named!r} is {found!r}, neither the pathlib.Path of a YAML spec nor a function "
            "marked with @agentrl.tool"
        )
    from agentrl.tool.runners.python import PythonTarget

    code = inspect.unwrap(found)
    location = f"{code.__module__}:{code.__qualname__}"
    return ToolSpec(
        name=declared.name,
        description=declared.description,
        parameters=declared.parameters,
        runner="python",
        target=PythonTarget(location=location, function=found),
        path=Path(code.__code__.co_filename),
        idempotent=declared.idempotent,
        limits=declared.limits,
    )


def entry_of(found: Callable[..., Any]) -> str:
    """Return the text by which any process finds a marked function.

    Raises:
        ToolSpecError: not marked, or not at the top of its module.
    """
    spec = spec_of(found, named=found)
    code = inspect.unwrap(found)
    if "<locals>" in code.__qualname__:
        raise ToolSpecError(
            f"{spec.path}: tool {spec.name!r} is defined inside a function, where other processes "
            "cannot find it; move it to the top of the module"
        )
    if code.__module__ == "__main__" or code.__module__.startswith("agentrl_file_"):
        return f"{spec.path}:{code.__qualname__}"
    return f"{code.__module__}:{code.__qualname__}"


def _parameters(function: Any, notes: dict[str, str], where: str) -> dict[str, Described]:
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:
        raise ToolSpecError(
            f"{where}: its annotations cannot be resolved ({type(error).__name__}: {error}); "
            "define the types at the top of the module, outside 'if TYPE_CHECKING'"
        ) from error
    found: dict[str, Described] = {}
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        at = f"{where}: parameter {parameter.name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolSpecError(f"{at}: a model gives every argument by name; name them one by one")
        if parameter.name not in hints:
            raise ToolSpecError(f"{at}: has no annotation; say what it takes, as in 'word: str'")
        described = describe(hints[parameter.name], where=at)
        if parameter.name in notes and "description" not in described.schema:
            schema = {**described.schema, "description": notes[parameter.name]}
            described = Described(schema, described.convert)
        if parameter.default is not parameter.empty:
            described = with_default(described, parameter.default)
        found[parameter.name] = described
    for name in notes:
        if name not in found:
            raise ToolSpecError(
                f"{where}: the docstring describes {name!r}, which is no parameter "
                f"({', '.join(found) or 'there are none'})"
            )
    return found


def _schema(found: dict[str, Described], function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {
        "type": "object",
        "properties": {name: described.schema for name, described in found.items()},
        "required": [p.name for p in parameters if p.default is p.empty],
    }


_OPTION_TYPES: dict[str, type] = {
    "name": str,
    "description": str,
    "limits": ToolLimits,
    "idempotent": bool,
}


def _check_options(where: str, **options: Any) -> None:
    for name, value in options.items():
        kind = _OPTION_TYPES[name]
        if value is not None and not isinstance(value, kind):
            raise ToolSpecError(f"{where}: {name} must be {kind.__name__}, got {value!r:.80}")


def _check(declared: _Declared, where: str) -> None:
    if not is_tool_name(declared.name):
        raise ToolSpecError(
            f"{where}: name {declared.name!r}: use at most 64 letters, digits, '_' and '-', a "
            "letter first"
        )
    if not declared.description:
        raise ToolSpecError(
            f"{where}: says not what it does; write a docstring or give description="
        )
    problem = parameters_problem(declared.parameters)
    if problem is not None:
        at = ".".join(str(part) for part in problem.path)
        raise ToolSpecError(f"{where}: {at}: {problem.problem}")
    if declared.limits.retries and not declared.idempotent:
        raise ToolSpecError(
            f"{where}: retries={declared.limits.retries} would repeat its effects; set "
            "idempotent=True if that does no harm, or retries=0"
        )


def _converting(function: Any, found: dict[str, Described]) -> Any:
    """Return the function, taking plain JSON values where it names richer types."""
    converters = {name: d.convert for name, d in found.items() if d.convert is not None}
    if not converters:
        return function
    signature = inspect.signature(function)

    def converted(args: Any, kwargs: Any) -> dict[str, Any]:
        return convert_values(dict(signature.bind(*args, **kwargs).arguments), converters)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            return await function(**converted(args, kwargs))

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(**converted(args, kwargs))

    return call
