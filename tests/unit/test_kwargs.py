from __future__ import annotations

from typing import Any, Literal

import pytest

from agentrl.errors import ConfigError
from agentrl.kwargs import check_kwargs


class Part:
    def __init__(
        self,
        size: int,
        rate: float = 1.0,
        mode: Literal["a", "b"] = "a",
        name: str | None = None,
        on: bool = False,
        anything: Any = None,
        items: list[int] | None = None,
    ) -> None:
        self.size = size


def test_arguments_that_fit_pass() -> None:
    check_kwargs(Part, {"size": 3}, key="k")
    check_kwargs(
        Part,
        {"size": 3, "rate": 2, "mode": "b", "name": None, "on": True, "anything": [], "items": [1]},
        key="k",
    )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"size": 3, "raet": 1.0}, "k.raet: Part takes no such argument; did you mean 'rate'"),
        ({"rate": 1.0}, "k: Part needs size; set k.size="),
        ({"size": "3"}, r"k.size: Part takes int, got '3' \(str\)"),
        ({"size": True}, "k.size: Part takes int, got True"),
        ({"size": 1.0}, "k.size: Part takes int, got 1.0"),
        ({"size": 3, "rate": "1e-6"}, "k.rate: Part takes float"),
        ({"size": 3, "rate": False}, "k.rate: Part takes float"),
        ({"size": 3, "mode": "c"}, "k.mode: Part takes one of 'a', 'b', got 'c'"),
        ({"size": 3, "name": 5}, "k.name: Part takes str | None, got 5"),
        ({"size": 3, "on": 1}, "k.on: Part takes bool, got 1"),
        ({"size": 3, "items": "abc"}, None),
    ],
)
def test_what_does_not_fit_is_refused_with_key_value_and_fix(
    kwargs: dict[str, Any], message: str | None
) -> None:
    if message is None:  # richer annotations are the target's own business
        check_kwargs(Part, kwargs, key="k")
        return
    with pytest.raises(ConfigError, match=message.replace("|", r"\|")):
        check_kwargs(Part, kwargs, key="k")


def test_a_class_without_constructor_takes_nothing() -> None:
    class Empty:
        pass

    check_kwargs(Empty, {}, key="k")
    with pytest.raises(ConfigError, match="it takes: none"):
        check_kwargs(Empty, {"x": 1}, key="k")


def test_var_keywords_take_anything() -> None:
    def build(first: int, **rest: Any) -> None: ...

    check_kwargs(build, {"first": 1, "other": 2}, key="k")
    with pytest.raises(ConfigError, match="needs first"):
        check_kwargs(build, {"other": 2}, key="k")


class PartlyKnown:
    def __init__(self, size: int = 1, other: OnlyForCheckers | None = None) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass


def test_an_annotation_that_cannot_be_resolved_hides_no_other() -> None:
    check_kwargs(PartlyKnown, {"size": 2, "other": "anything"}, key="k")
    with pytest.raises(ConfigError, match="k.size: PartlyKnown takes int"):
        check_kwargs(PartlyKnown, {"size": "2"}, key="k")
