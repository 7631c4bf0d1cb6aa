"""A typed function says what a hand-written spec would say, or is refused where it cannot."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict

import pytest

from agentrl.env.validate import check_tools
from agentrl.errors import EnvError, ToolSpecError
from agentrl.tool import ToolLimits, tool
from agentrl.tool.binding import Toolbox, bind
from agentrl.tool.spec import find_spec, load_spec


class Unit(enum.Enum):
    KELVIN = "K"
    CELSIUS = "C"


@dataclass
class Place:
    name: Annotated[str, "as on a map"]
    height_m: float = 0.0
    tags: list[str] = field(default_factory=list)


class Range(TypedDict):
    low: int
    high: NotRequired[int]


@dataclass
class Endless:
    inner: Endless | None = None


@tool(idempotent=True, limits=ToolLimits(timeout_s=5, retries=2))
def weather(
    place: Place,
    days: int,
    unit: Unit = Unit.CELSIUS,
    style: Literal["short", "long"] = "short",
    near: Optional[int] = None,  # noqa: UP045  both spellings are in use
    only: Literal["rain", "snow"] | None = None,
    hours: Sequence[int] = (),
    limits: dict[str, float] | None = None,
    span: Range | None = None,
    what: str | int = "all",
    *,
    exact: Annotated[bool, "no rounding"] = False,
) -> str:
    """Tell the weather
    of a place.

    In plain words.

    Args:
        place: where.
        days (int): how many days
            from now.
        exact: not shown, since the annotation says it.

    Returns:
        Text.
    """
    return f"{place.name} {place.height_m} {days} {unit.name} {style} {hours} {span}"


BY_HAND = """
name: weather
description: "Tell the weather of a place.\\n\\nIn plain words."
parameters:
  type: object
  properties:
    place:
      type: object
      properties:
        name: {type: string, description: as on a map}
        height_m: {type: number, default: 0.0}
        tags: {type: array, items: {type: string}}
      required: [name]
      additionalProperties: false
      description: where.
    days: {type: integer, description: how many days from now.}
    unit: {type: string, enum: [K, C], default: C}
    style: {type: string, enum: [short, long], default: short}
    near: {type: [integer, 'null']}
    only: {type: [string, 'null'], enum: [rain, snow, null]}
    hours: {type: array, items: {type: integer}, default: []}
    limits:
      anyOf: [{type: object, additionalProperties: {type: number}}, {type: 'null'}]
    span:
      anyOf:
        - type: object
          properties: {low: {type: integer}, high: {type: integer}}
          required: [low]
          additionalProperties: false
        - {type: 'null'}
    what: {type: [string, integer], default: all}
    exact: {type: boolean, description: no rounding, default: false}
  required: [place, days]
python: ./impl.py:weather
idempotent: true
limits: {timeout_s: 5, retries: 2}
"""


def test_a_derived_spec_is_the_one_that_would_be_written_by_hand(tmp_path: Path):
    (tmp_path / "impl.py").write_text("def weather(**arguments): ...")
    (tmp_path / "weather.yaml").write_text(BY_HAND)
    by_hand, derived = load_spec(tmp_path / "weather.yaml"), find_spec(weather)
    assert derived.schema == by_hand.schema
    assert (derived.idempotent, derived.limits) == (by_hand.idempotent, by_hand.limits)


def test_the_function_gets_what_its_annotations_name_and_can_be_called_as_before():
    call = bind(find_spec(weather)).make().call
    asked = {"place": {"name": "Bern", "height_m": 540}, "days": 2, "unit": "K", "span": {"low": 1}}
    assert call(**asked) == "Bern 540 2 KELVIN short () {'low': 1}"
    assert weather(Place("Bern"), 1).startswith("Bern 0.0 1 CELSIUS")


def test_converters_reach_into_lists_dicts_tuples_and_async_functions():
    @tool(description="d")
    async def many(
        places: list[Place], by_name: Mapping[str, Place], pair: tuple[Unit, ...] = ()
    ) -> Any:
        return places, by_name, pair

    call = bind(find_spec(many)).make().call
    place = {"name": "Bern"}
    found = asyncio.run(call(places=[place], by_name={"x": place}, pair=["K"]))
    assert found == ([Place("Bern")], {"x": Place("Bern")}, (Unit.KELVIN,))


def test_what_json_lacks_is_refused_with_the_name_of_the_parameter():
    def annotated(hint: Any) -> Any:
        def function(odd: Any) -> None:
            """Do something."""

        function.__annotations__["odd"] = hint
        return function

    hints = [datetime, object, Any, bytes, set[int], dict[int, str], tuple[int, str], Endless]
    hints += [Literal[b"x"], Place | Unit, list[datetime], complex, type]
    for hint in hints:
        with pytest.raises(ToolSpecError, match="parameter 'odd'"):
            tool(annotated(hint))


def unannotated(word) -> None:
    """Do something."""


def variadic(*words: str) -> None:
    """Do something."""


def open_ended(**words: str) -> None:
    """Do something."""


def positional(word: str, /) -> None:
    """Do something."""


def misdescribed(word: str) -> None:
    """Do something.

    Args:
        wrod: misspelt.
    """


def undescribed(word: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (unannotated, "parameter 'word': has no annotation"),
        (variadic, "parameter 'words'"),
        (open_ended, "parameter 'words'"),
        (positional, "parameter 'word'"),
        (misdescribed, "'wrod', which is no parameter"),
        (undescribed, "says not what it does"),
        (Place, "marks functions"),
        (len, "marks functions"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_when_it_is_marked(function: Any, what: str):
    with pytest.raises(ToolSpecError, match=what):
        tool(function)


def test_names_and_limits_are_checked():
    with pytest.raises(ToolSpecError, match="letters, digits"):
        tool(name="no blanks", description="d")(lambda: None)
    with pytest.raises(ToolSpecError, match="would repeat its effects"):
        tool(limits=ToolLimits(retries=1))(weather)


def test_a_marked_function_under_python_needs_no_more_than_limits(tmp_path: Path):
    (tmp_path / "impl.py").write_text(
        "from agentrl.tool import tool, ToolLimits\n"
        "@tool(limits=ToolLimits(timeout_s=3, max_calls=2))\n"
        "def add(a: int, b: int = 1) -> int:\n    '''Add.'''\n    return a + b\n"
    )
    path = tmp_path / "add.yaml"
    path.write_text("python: ./impl.py:add\nname: plus\nlimits: {max_calls: 9}\n")
    box = Toolbox([str(path)])
    spec = box.bindings["plus"].spec
    assert (spec.description, spec.limits.timeout_s, spec.limits.max_calls) == ("Add.", 3, 9)
    assert box.bindings["plus"].make().call(a=2) == 3
    assert box.bindings["plus"].is_stateless


def test_an_environment_names_functions_and_any_process_finds_them(tmp_path: Path):
    (entry,) = check_tools([weather], env="e")
    assert Toolbox([entry]).schemas == Toolbox([weather]).schemas

    @tool(description="d")
    def inner() -> None: ...

    with pytest.raises(EnvError, match="move it to the top"):
        check_tools([inner], env="e")
    with pytest.raises(EnvError, match=r"@agentrl\.tool"):
        check_tools([len], env="e")


def test_only_marked_functions_are_tools_by_import_path():
    with pytest.raises(ToolSpecError, match="neither"):
        Toolbox(["os:system"])


@pytest.mark.parametrize(
    "options",
    [{"name": 5}, {"description": 5}, {"limits": {"timeout_s": 1}}, {"idempotent": "yes"}],
)
def test_an_option_of_another_type_is_refused_by_name(options: dict[str, Any]):
    def f(x: int) -> str:
        """Do it."""
        return str(x)

    with pytest.raises(ToolSpecError, match=f"{next(iter(options))} must be"):
        tool(**options)(f)


def test_a_generator_is_refused_when_it_is_bound_not_at_each_call():
    @tool
    def parts(x: int):
        """Count."""
        yield from range(x)

    with pytest.raises(ToolSpecError, match="return it as a whole"):
        Toolbox([parts])


def test_text_that_no_tokenizer_takes_is_refused():
    with pytest.raises(ToolSpecError, match="surrogate"):

        @tool(description="half \ud800")
        def f(x: int) -> str:
            return str(x)

        Toolbox([f])
