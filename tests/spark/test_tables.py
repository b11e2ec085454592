# SPDX-License-Identifier: Apache-2.0
"""Results of queries as text, without Spark."""

from datetime import UTC, datetime
from typing import Final

from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType, TimestampType

from pyspark_mqtt_nats.queries.tables import cell, table

SCHEMA: Final = StructType(
    [
        StructField("sequence", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("topic", StringType()),
        StructField("retain", BooleanType()),
    ]
)
NOON: Final = datetime(2026, 11, 20, 12, tzinfo=UTC)
ROWS: Final = [(1, NOON, "site/1/temp", False), (10, NOON, "a", None)]


def test_columns_are_as_wide_as_necessary() -> None:
    lines = table(SCHEMA, ROWS)
    assert lines == [
        "sequence  timestamp            topic        retain",
        "       1  2026-11-20 12:00:00  site/1/temp  false",
        "      10  2026-11-20 12:00:00  a            -",
    ]
    assert table(SCHEMA, ROWS, width=50) == lines
    assert table(SCHEMA, [], width=10) == ["sequence  timestamp  topic  retain"]


def test_rows_that_are_wider_than_the_terminal() -> None:
    """Each row becomes lines of its own: lines that go over the edge have no columns."""
    expected = [
        "sequence   1",
        "timestamp  2026-11-20 12:00:00",
        "topic      site/1/temp",
        "retain     false",
        "",
        "sequence   10",
        "timestamp  2026-11-20 12:00:00",
        "topic      a",
        "retain     -",
        "",
    ]
    assert table(SCHEMA, ROWS, width=49) == expected
    assert table(SCHEMA, ROWS, heading=False, width=40) == expected


def test_values_of_strangers_do_nothing_to_a_terminal() -> None:
    assert cell("a\x1b[2Jb\n") == "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}"
    assert cell(b"\xff\x00") == "0xff00"
    assert cell({"x": b"y", "z": [None]}) == '{"x":"y","z":[null]}'
    assert cell("x" * 61) == "x" * 59 + "…"
