from __future__ import annotations

from typing import Any

import pytest
from agentrl_envs.code_sandbox.check import check_source
from agentrl_envs.code_sandbox.problem import Example
from agentrl_envs.code_sandbox.submission import Workspace, block_source
from agentrl_envs.code_sandbox.values import equal, equal_source
from hypothesis import given
from hypothesis import strategies as st

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def replay(*cells: str, entry_point: str = "f") -> dict[str, Any]:
    """Run what is submitted, as the grader would."""
    workspace = Workspace(entry_point)
    for cell in cells:
        workspace.add(cell)
    source = workspace.source()
    space: dict[str, Any] = {}
    if source is not None:
        exec(source, space)
    return space


def test_the_last_definition_counts() -> None:
    space = replay("def f(x):\n    return 1\ncheck(f)", "def f(x):\n    return 2\ncheck(f)")
    assert space["f"](0) == 2


def test_helpers_imports_constants_and_blocks_come_along() -> None:
    space = replay(
        "import math\nfrom collections import Counter as C\nK = 3",
        "def helper(x):\n    return math.floor(x) + K",
        "table = {}\nfor i in range(3):\n    table[i] = i * i",
        "f = lambda x: helper(x) + table[2] + len(C('aab'))",
    )
    assert space["f"](1.5) == 1 + 3 + 4 + 2


def test_a_statement_that_raises_stops_nothing_else() -> None:
    space = replay(
        "def f(x):\n    return 1 / x",
        "y = f(0)",
        "z = check(f)\nscore = undefined",
        "def f(x):\n    return x + 1",
    )
    assert space["f"](1) == 2


def test_a_statement_that_leaves_the_interpreter_stops_nothing_else() -> None:
    space = replay("import sys\nif True:\n    sys.exit(1)", "def f(x):\n    return x + 1")
    assert space["f"](1) == 2


def test_of_a_cell_that_was_cut_short_nothing_is_kept_that_would_not_end() -> None:
    workspace = Workspace("f")
    workspace.add(
        "import math\ndef f(x):\n    return math.pi\nwhile True:\n    x = 1", cut_short=True
    )
    source = workspace.source()
    assert source is not None and "while" not in source
    space: dict[str, Any] = {}
    exec(source, space)
    assert space["f"](0) > 3
    hopeless = Workspace("f")
    hopeless.add("f = endless()", cut_short=True)
    assert hopeless.source() is None


def test_bare_expressions_are_not_replayed() -> None:
    space = replay("seen = []\ndef f(x):\n    return seen", "seen.append(1)\nprint('2/2 pass')")
    assert space["f"](0) == []


@pytest.mark.parametrize(
    "cell", ["def f(x:", "\x00", "(" * 5000, "x" * 200_000, "return 1", "break"]
)
def test_a_cell_that_does_not_parse_counts_for_nothing(cell: str) -> None:
    space = replay("def f(x):\n    return 7", cell)
    assert space["f"](0) == 7


@pytest.mark.parametrize(
    "cell",
    [
        "from __future__ import annotations\ndef f(x: Missing) -> Missing:\n    return 5",
        "def f(x):\n    return 5\ndef g(x=undefined):\n    pass",
        "def f(x):\n    return 5\n@undefined\ndef g(x):\n    pass",
        "def f(x):\n    return 5\nclass C(undefined):\n    pass",
    ],
)
def test_what_cannot_be_defined_again_does_no_harm(cell: str) -> None:
    assert replay(cell)["f"](0) == 5


def test_without_a_definition_there_is_no_submission() -> None:
    assert replay("def g(x):\n    return 1", "check(f)") == {}
    assert replay("", entry_point="f") == {}


@pytest.mark.parametrize(
    "cell",
    [
        "class f:\n    pass",
        "from math import floor as f",
        "import f",
        "if True:\n    def f(x):\n        return 1",
        "try:\n    f = 1\nfinally:\n    pass",
        "a, *f = 1, 2",
        "from __future__ import annotations\ndef f(x: Missing):\n    return x",
        "def f(x, y=[1,\n2]):\n    '''doc'''\n    return x",
        "@missing\ndef f(x):\n    return x\nf = f",
    ],
)
def test_every_way_to_bind_the_name_is_a_definition(cell: str) -> None:
    workspace = Workspace("f")
    workspace.add(cell)
    source = workspace.source()
    assert source is not None
    compile(source, "solution.py", "exec")


def test_one_block_in_the_final_message_is_an_answer_and_two_are_none() -> None:
    block = "```python\ndef f(x):\n    return 1\n```"
    assert block_source(f"Here:\n{block}\nDone.") == (True, "def f(x):\n    return 1\n")
    assert block_source(f"{block}\nor\n{block}") == (True, None)
    assert block_source("```\ndef f(x): pass\n```") == (False, None)
    assert block_source("done") == (False, None)
    assert block_source("```py\nx = 1\n```")[0]


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (1, 1, True), (1, 2, False), (True, 1, False), (1, True, False), (True, True, True),
        (1, 1.0, True), (0.1 + 0.2, 0.3, True), (0.31, 0.3, False), ("1", 1, False),
        ([1, 2], (1, 2), True), ([1], [1, 2], False), ([True], [1], False), (None, 0, False),
        ({"a": [1]}, {"a": (1,)}, True), ({"a": 1}, {"a": 1, "b": 2}, False), ({1}, {1}, True),
        ({1: 2}, [1], False), ("ab", ["a", "b"], False), (10**30, 10**30 + 1, False),
        (float("nan"), float("nan"), False), (float("inf"), float("inf"), True), ("", [], False),
        (7, float("inf"), False), (float("inf"), 7, False), (float("-inf"), float("inf"), False),
    ],
)  # fmt: skip
def test_values_are_compared_by_value_and_kind(got: Any, expected: Any, same: bool) -> None:
    assert equal(got, expected) is same


@given(JSON_VALUES)
def test_every_value_equals_itself(value: Any) -> None:
    assert equal(value, value)


@given(JSON_VALUES, JSON_VALUES)
def test_the_rule_is_the_same_in_the_sandbox(first: Any, second: Any) -> None:
    space: dict[str, Any] = {}
    exec(equal_source("equal"), space)
    assert space["equal"](first, second) == equal(first, second)
    assert equal(first, second) == equal(second, first)


def test_check_counts_visible_examples(capsys: pytest.CaptureFixture[str]) -> None:
    examples = [
        Example([[3, 1]], {}, [1, 3]),
        Example([[2]], {"reverse": True}, [2]),
        Example([[]], {}, []),
    ]
    space: dict[str, Any] = {}
    exec(check_source(examples), space)
    assert set(space) == {"check", "__builtins__"}
    space["check"](sorted)
    space["check"](lambda x, reverse=False: x.sort() or x)
    space["check"](lambda x: 1 / 0)
    assert capsys.readouterr().out.split("\n")[:3] == ["3/3 pass", "3/3 pass", "0/3 pass"]


def test_a_function_that_changes_its_input_does_not_change_the_examples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    space: dict[str, Any] = {}
    exec(check_source([Example([[1, 2]], {}, 2)]), space)
    for _ in range(2):
        space["check"](lambda x: x.pop())
    assert capsys.readouterr().out == "1/1 pass\n1/1 pass\n"
