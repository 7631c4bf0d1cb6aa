"""Values travel as JSON: exactly, or not at all."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.sandbox.values import MAX_DEPTH, decode, encode

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
_KEYS = st.recursive(
    _SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner), max_leaves=4
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.sets(_KEYS, max_size=3)
        | st.dictionaries(_KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


def types_of(value: object) -> object:
    """The types of a value and all its parts, in order."""
    if isinstance(value, dict):
        return dict, [(types_of(k), types_of(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [types_of(item) for item in value]
    return type(value)


@given(_VALUES)
def test_a_value_comes_back_equal_and_of_the_same_types(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert types_of(back) == types_of(value)


def test_floats_that_json_lacks_survive():
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode([math.inf, -math.inf])) == [math.inf, -math.inf]


class _AlwaysEqual(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize("value", [object(), _AlwaysEqual(3), len, 1j, [object()], {1: range(3)}])
def test_what_could_redefine_equality_is_refused(value):
    with pytest.raises(ValueError, match="cannot be compared"):
        encode(value)


def test_depth_is_bounded_in_both_directions():
    value: list = []
    for _ in range(MAX_DEPTH + 5):
        value = [value]
    with pytest.raises(ValueError, match="deeper"):
        encode(value)
    with pytest.raises(ValueError):
        decode(json.loads('["l",' * 200 + "1" + "]" * 200))


@given(st.recursive(_SCALARS.filter(lambda x: type(x) is not bytes), st.lists, max_leaves=8))
def test_any_json_either_decodes_or_is_refused(form):
    with contextlib.suppress(ValueError):
        decode(form)


@pytest.mark.parametrize("form", [{}, [], ["z", 1], ["b", 5], ["b", "zz"], ["x", "1e9"], ["d", 1]])
def test_forms_that_encode_never_makes_are_refused(form):
    with pytest.raises(ValueError):
        decode(form)


def test_an_unhashable_key_is_refused_not_raised_as_a_type_error():
    with pytest.raises(ValueError):
        decode(["d", [["l", 1], 2]])
    with pytest.raises(ValueError):
        decode(["s", ["l", 1]])
