# SPDX-License-Identifier: Apache-2.0
"""Charts of results whose numbers no axis holds, or hardly."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.types import DataType, DoubleType, LongType, StringType, StructField, StructType, TimestampType

from pyspark_mqtt_nats.queries import plot

BEGIN = datetime(2026, 11, 20, tzinfo=UTC)


def drawn(kind: DataType, *rows: tuple[Any, Any]) -> list[list[tuple[float, float]]]:
    """The points of the lines of a chart, from the left and from the top, in its units."""
    schema = StructType([StructField("x", kind), StructField("y", DoubleType())])
    made = Row("x", "y")
    page = plot.render("q", schema, [made(*row) for row in rows], False)
    lines = re.findall(r'<polyline points="([^"]*)"', page)
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line.split())] for line in lines]


@pytest.mark.parametrize("value", [0.0, 1e16, -1e20, 1e300, 5e-324])
def test_one_value_is_in_the_middle(value: float) -> None:
    """A line of sequences, or of times in nanoseconds, that do not change."""
    (line,) = drawn(DoubleType(), (0.0, value), (1.0, value))
    assert {y for _, y in line} == {12 + 318 / 2}
    (line,) = drawn(LongType(), (10**18, 1.0), (10**18 + 1, 2.0))
    assert [x for x, _ in line] == [72 + 876 / 2] * 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1.7e308, None])
def test_what_is_no_number_of_an_axis_is_left_out(value: float | None) -> None:
    (line,) = drawn(DoubleType(), (0.0, 1.0), (1.0, value), (2.0, 3.0), (value, 2.0))
    assert line == [(72.0, 330.0), (948.0, 12.0)]
    assert drawn(DoubleType(), (0.0, value)) == []


def test_milliseconds_are_told_apart() -> None:
    rows = [(BEGIN + timedelta(milliseconds=10 * number), float(number)) for number in range(3)]
    (line,) = drawn(TimestampType(), *rows)
    assert [x for x, _ in line] == [72.0, 510.0, 948.0]


def test_bars_are_of_the_first_column_of_numbers() -> None:
    schema = StructType([StructField("x", StringType()), *(StructField(name, LongType()) for name in ("y", "z"))])
    made = Row("x", "y", "z")
    page = plot.render("q", schema, [made("a", 10, 1), made("b", 5, 3)], False)
    chart, *_ = re.findall("<table>.*?</table>", page, re.DOTALL)
    assert re.findall(r'<th class="number">(\w+)</th>', chart) == ["y"]
    assert re.findall(r'<td class="number">(\w+)</td>', chart) == ["10", "5"]
