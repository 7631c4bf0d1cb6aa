from __future__ import annotations

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from agentrl.telemetry.charts import Chart, Series
from agentrl.telemetry.svg import HEIGHT, LEFT, WIDTH, number, plot

VALUES = st.lists(
    st.floats(-1e9, 1e9) | st.floats(-1e-9, 1e-9) | st.just(0.0), min_size=1, max_size=20
)


@given(VALUES, st.booleans(), st.booleans())
def test_everything_is_drawn_inside_the_picture(
    values: list[float], stacked: bool, fractions: bool
) -> None:
    values = [abs(value) for value in values] if stacked else values
    steps = [float(i) for i in range(len(values))]
    series = [Series(label=name, steps=steps, values=values) for name in ("a", "b")]
    limits = (0.0, 1.0) if fractions else None
    drawn = plot(Chart(title="t", series=series, stacked=stacked, limits=limits))
    for shape in drawn.shapes:
        pairs = re.findall(r"(-?[\d.e+-]+),(-?[\d.e+-]+)", shape.d)
        assert pairs
        for x, y in pairs:
            assert 0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT
    for x, _ in drawn.x_ticks:
        assert LEFT <= x <= WIDTH
    for y, _ in drawn.y_ticks:
        assert 0 <= y <= HEIGHT
    assert len(drawn.y_ticks) >= 1


def test_hover_data_hold_every_value_at_its_step() -> None:
    train = Series(label="train", steps=[1, 2, 3], values=[0.25, 0.5, 0.75])
    val = Series(label="val", steps=[0, 3], values=[0.1, 0.8], sparse=True)
    drawn = plot(Chart(title="t", series=[train, val], limits=(0, 1)))
    hover = json.loads(drawn.hover)
    assert hover["step"] == ["0", "1", "2", "3"]
    assert hover["series"] == [
        ["train", 0, [None, "0.25", "0.5", "0.75"]],
        ["val", 1, ["0.1", None, None, "0.8"]],
    ]
    assert hover["x"] == sorted(hover["x"])
    assert len(drawn.dots) == 2


def test_numbers_are_short() -> None:
    assert [number(v) for v in (0, 0.25, 12345.6, 2.1e-6, 40.0, -3e7)] == [
        "0",
        "0.25",
        "12,346",
        "2.1e-06",
        "40",
        "-3e+07",
    ]
