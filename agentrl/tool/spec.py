"""Tool specifications: the YAML that says what a tool is called, takes, where it runs, what it may.

::

    name: calculator
    description: Evaluate an arithmetic expression.
    parameters:                       # JSON Schema of the arguments
      type: object
      properties: {expression: {type: string}}
      required: [expression]
    python: ./tool.py:calculate       # or http:, mcp:, server:; see agentrl.tool.runners
    kwargs: {}                        # of python: for the class or function
    idempotent: true                  # calling twice does no harm: may be retried
    limits: {timeout_s: 5, max_calls: 32, concurrency: 64, retries: 0, max_output_tokens: 512}

A file stands for one tool, or for all tools of a server (``mcp:``, ``server:`` without ``tool:``).
Name, description and parameters may be left out where the code or the server says them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import ToolSpecError
from agentrl.registry import Registry
from agentrl.tool.parameters import parameters_problem
from agentrl.tool.runners.base import Allow, Runner, ToolOffer, runner_registry
from agentrl.tool.section import MAX_SECONDS, MAX_WHOLE, Section
from agentrl.tool.yaml_io import Document, Key, load_document

tool_registry: Registry[Any] = Registry("tool", "agentrl.tools")
"""Tool name to the path of its YAML, or to a function marked with ``@tool``."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
LIMIT_RANGES: dict[str, tuple[float, int]] = {
    "timeout_s": (0.001, MAX_SECONDS),
    "max_calls": (1, MAX_WHOLE),
    "concurrency": (1, MAX_WHOLE),
    "retries": (0, 100),
    "max_output_tokens": (1, MAX_WHOLE),
}
"""Least and most of each limit."""
_SAID_BY_OFFER = ("name", "description", "parameters")


@dataclass(slots=True, frozen=True, kw_only=True)
class ToolLimits:
    """Limits of one tool, per call unless stated.

    Raises:
        ToolSpecError: one that is no such number, or outside of :data:`LIMIT_RANGES`.
    """

    timeout_s: float = 30.0
    max_calls: int = 64
    """Per trajectory."""
    concurrency: int = 64
    """Calls of this tool at once, over all trajectories of a process."""
    retries: int = 0
    """After an infrastructure failure; needs ``idempotent: true``."""
    max_output_tokens: int = 1024
    """Tokens of an answer that the model is shown; the note of what was cut comes on top."""

    def __post_init__(self) -> None:
        """Refuse what would be no limit, wherever it comes from: a file, code, a server."""
        for name, (least, most) in LIMIT_RANGES.items():
            value: Any = getattr(self, name)
            kinds = (int, float) if name == "timeout_s" else (int,)
            # Written so that NaN is refused.
            if type(value) not in kinds or not least <= value <= most:
                kind = "a number" if name == "timeout_s" else "a whole number"
                raise ToolSpecError(
                    f"limits.{name} must be {kind} from {least:g} to {most:,}, got {value!r:.80}"
                )


@dataclass(slots=True, frozen=True, kw_only=True)
class ToolSpec:
    """A checked tool specification."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    runner: str
    """The key of :data:`agentrl.tool.runners.base.runner_registry`."""
    target: Any
    """What the runner needs to know: a frozen dataclass of its own."""
    path: Path
    """The file that it stands in."""
    idempotent: bool = False
    limits: ToolLimits = field(default_factory=ToolLimits)
    document: Document | None = field(default=None, repr=False, compare=False)
    """The YAML; None where a function says it all."""

    def __post_init__(self) -> None:
        """Refuse text that no tokenizer takes: it would fail every episode."""
        try:
            json.dumps(self.schema, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise self.error(
                "name, description or parameters hold half of a surrogate pair, which no tokenizer "
                "can take; write the whole character"
            ) from None

    @property
    def schema(self) -> dict[str, Any]:
        """What chat templates take under ``tools``."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }

    def error(self, problem: str, *path: Key) -> ToolSpecError:
        """Return an error with the file, line and column of ``path`` in it."""
        if self.document is None:
            return ToolSpecError(f"{self.path}: tool {self.name!r}: {problem}")
        return self.document.error(problem, *path)


def make_runner(key: str) -> Runner:
    """Return the runner that a key of a spec names."""
    return runner_registry.get(key)()


def find_specs(
    tool: str | Path | Callable[..., Any], *, allow: Allow | None = None
) -> list[ToolSpec]:
    """Return the specs that one entry of ``Env.tools`` stands for; servers are asked.

    Args:
        tool: a registered name, the path of a YAML file, a function marked with ``@tool``, or
            ``module:name`` or ``./file.py:name`` of one.
        allow: what specs may import and start.

    Raises:
        RegistryError: no tool of that name.
        ToolSpecError: the YAML cannot be used, or a server says nothing.
    """
    found: Any = tool
    if isinstance(tool, str):
        is_file = tool.endswith((".yaml", ".yml"))
        found = Path(tool) if is_file else tool_registry.get(tool)
    if isinstance(found, Path):
        return load_specs(found, allow=allow)
    from agentrl.tool.decorator import spec_of

    return [spec_of(found, named=tool)]


def find_spec(tool: str | Path | Callable[..., Any], *, allow: Allow | None = None) -> ToolSpec:
    """Return the spec of an entry that stands for one tool; see :func:`find_specs`."""
    return _only(find_specs(tool, allow=allow), tool)


def load_spec(path: Path, *, allow: Allow | None = None) -> ToolSpec:
    """Return the spec in a file that stands for one tool; see :func:`load_specs`."""
    return _only(load_specs(path, allow=allow), path)


def _only(specs: list[ToolSpec], tool: Any) -> ToolSpec:
    if len(specs) != 1:
        raise ToolSpecError(
            f"{tool} stands for {len(specs)} tools ({', '.join(s.name for s in specs)}); one is "
            "needed here"
        )
    return specs[0]


def load_specs(path: Path, *, allow: Allow | None = None) -> list[ToolSpec]:
    """Read and check a tool's YAML.

    Nothing is imported or started, unless the file leaves it to code or to a server to say what
    the tools are called and take.

    Raises:
        ToolSpecError: with file, line and column.
    """
    allow = allow or Allow()
    try:
        file = path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no such user, a NUL
        raise ToolSpecError(f"{str(path)[:300]!r} is no path of a file: {error}") from error
    top = Section(load_document(file))
    key = _runner_key(top)
    runner = make_runner(key)
    top.refuse_unknown(
        [*_SAID_BY_OFFER, key, *runner.beside, "idempotent", "limits"],
    )
    target = runner.check(top)
    is_group = runner.is_group(target)
    for said in _SAID_BY_OFFER:
        if is_group and said in top:
            raise top.error(
                f"{said} belongs to one tool, and this spec stands for all tools of a server; name "
                f"one under {key}.tool, or leave {said} out",
                said,
                at_key=True,
            )
    _check_said(top)
    offers: list[ToolOffer] = []
    if is_group or any(said not in top for said in _SAID_BY_OFFER):
        offers = runner.offers(target, spec=top, allow=allow)
    if is_group:
        specs = [_complete(top, key, offer.target, offer) for offer in offers]
    else:
        specs = [_complete(top, key, target, offers[0] if offers else None)]
    return specs


def _runner_key(top: Section) -> str:
    """Return the one key that says where the tool runs."""
    names = runner_registry.names()
    given = [key for key in top.values if key in names]
    if len(given) == 1:
        return given[0]
    if given:
        raise top.error(
            f"{' and '.join(given)}: a tool runs in one place; keep one of them",
            given[1],
            at_key=True,
        )
    known = [*_SAID_BY_OFFER, *names, "kwargs", "idempotent", "limits"]
    top.refuse_unknown(known)  # a misspelt one is told as such
    raise top.error(f"says not where the tool runs; add one of: {', '.join(names)}")


def _check_said(top: Section) -> None:
    if "name" in top:
        _check_name(top.text("name"), top)
    if "description" in top:
        top.text("description")
    if "parameters" in top:
        problem = parameters_problem(top.values["parameters"])
        if problem is not None:
            where = ".".join(str(part) for part in ("parameters", *problem.path))
            raise top.error(f"{where}: {problem.problem}", "parameters", *problem.path)


def is_tool_name(name: str) -> bool:
    """Return whether every chat template and parser can carry this name."""
    return _NAME.fullmatch(name) is not None


def _check_name(name: str, top: Section) -> None:
    if not is_tool_name(name):
        raise top.error(
            f"name {name!r}: use at most 64 letters, digits, '_' and '-', a letter first", "name"
        )


def _complete(top: Section, key: str, target: Any, offer: ToolOffer | None) -> ToolSpec:
    """Return a spec of what the file says, and beyond it of what the offer says."""
    if offer is None:
        if "parameters" not in top and "name" in top and "description" in top:
            raise top.error("parameters is missing; for a tool without any write "
                            "'parameters: {type: object, properties: {}}'")  # fmt: skip
        name, description = top.text("name"), top.text("description")
        parameters = top.values["parameters"]
    else:
        name = top.text("name", offer.name)
        description = top.text("description", offer.description)
        parameters = top.values.get("parameters", offer.parameters)
        _check_offer(top, key, name, parameters)
    idempotent = top.flag("idempotent", bool(offer and offer.idempotent))
    limits = read_limits(top, offer.limits if offer else {})
    if limits.retries and not idempotent:
        raise top.error(
            f"limits.retries={limits.retries} on a tool that is not idempotent would repeat its "
            "effects; set idempotent: true if that does no harm, or retries: 0",
            "limits",
            "retries",
        )
    return ToolSpec(
        name=name,
        description=description,
        parameters=parameters,
        runner=key,
        target=target,
        path=top.document.file,
        idempotent=idempotent,
        limits=limits,
        document=top.document,
    )


def _check_offer(top: Section, key: str, name: str, parameters: Any) -> None:
    """Refuse what a server says of a tool where a model could not use it."""
    if not is_tool_name(name):
        raise top.error(
            f"{key} offers a tool {name[:80]!r}; a model can only call at most 64 letters, digits, "
            f"'_' and '-', a letter first: leave it out with {key}.tools, or rename it in a spec "
            f"of its own with {key}.tool and name",
            key,
        )
    problem = parameters_problem(parameters)
    if problem is not None:
        where = ".".join(str(part) for part in problem.path) or "the top"
        raise top.error(
            f"{key} offers the tool {name!r} with parameters that cannot be used, at {where}: "
            f"{problem.problem}; leave it out with {key}.tools, or write its parameters in a spec "
            f"of its own with {key}.tool",
            key,
        )


def read_limits(top: Section, defaults: Mapping[str, float]) -> ToolLimits:
    """Return ``limits``, each from the file, or else from ``defaults``, or else as it is."""
    given: dict[str, Any] = dict(defaults)
    if "limits" in top:
        section = top.section("limits")
        section.refuse_unknown(list(LIMIT_RANGES))
        for name in section.values:
            least, most = LIMIT_RANGES[name]
            if name == "timeout_s":
                given[name] = section.number(name, 0.0, minimum=least, maximum=most)
            else:
                given[name] = section.integer(name, 0, minimum=int(least), maximum=most)
    try:
        return ToolLimits(**given)
    except ToolSpecError as error:  # of what a server said
        raise top.error(str(error)) from None
