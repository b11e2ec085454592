# SPDX-License-Identifier: Apache-2.0
"""The columns, as Spark and Arrow see them, and what a user's schema may ask for."""

import re

import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from pyspark_mqtt_nats.errors import OptionError
from pyspark_mqtt_nats.projection import Projection
from pyspark_mqtt_nats.schema import COLUMNS, HEADERS, arrow_schema, spark_schema
from tests.harness.nats import ROOT


def schema(*fields: tuple[str, DataType]) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields])


def test_both_schemas_are_the_same_for_spark() -> None:
    """Spark compares them with all of this: names, order, types, nullability, names of elements."""
    found = to_arrow_schema(spark_schema(include_headers=True), timezone="UTC")
    assert found.equals(arrow_schema(list(COLUMNS)))
    assert all(field.nullable for field in found)


def test_headers_are_there_when_asked_for() -> None:
    assert spark_schema().names == [name for name in COLUMNS if name != HEADERS]
    assert spark_schema(include_headers=True).names == list(COLUMNS)


def test_types_are_what_a_user_would_write() -> None:
    for column in COLUMNS.values():
        assert column.spark_type.simpleString() == re.sub(r"(?<=[:,]) ", "", column.ddl.lower())
        assert column.doc


def select(wanted: StructType) -> list[str]:
    """The stored columns that a schema asks for."""
    return list(Projection.of(wanted).stored)


def test_a_schema_selects_columns_in_its_order() -> None:
    assert select(spark_schema(include_headers=True)) == list(COLUMNS)
    wanted = schema(("topic", StringType()), ("sequence", LongType()))
    assert select(wanted) == ["topic", "sequence"]
    assert select(schema(("Topic", StringType()))) == ["topic"]
    assert arrow_schema(["topic", "sequence"]).names == ["topic", "sequence"]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (schema(("topik", StringType())), "'topik' .* did you mean 'topic'"),
        (schema(("Topik", StringType())), "'Topik' .* did you mean 'topic'"),
        (schema(("zzz", StringType())), "'zzz' .* there are sequence, timestamp"),
        (schema(("qos", LongType())), "'qos' of the schema is bigint; it must be INT"),
        (schema(("topic_levels", ArrayType(IntegerType()))), "must be ARRAY<STRING>"),
        (schema(("topic_levels", ArrayType(StringType(), False))), "must be ARRAY<STRING>"),
        (StructType([StructField("topic", StringType(), False)]), "'topic' must not be NOT NULL"),
        (schema(("topic", StringType()), ("topic", StringType())), "'topic' twice"),
        (StructType([]), "has no columns; give one of sequence"),
    ],
)
def test_what_a_schema_cannot_ask_for(wanted: StructType, text: str) -> None:
    with pytest.raises(OptionError, match=text) as caught:
        select(wanted)
    assert caught.value.option == "schema"
    assert "\n" not in str(caught.value)


def test_the_page_lists_the_columns() -> None:
    page = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    table = page.partition("## Columns\n")[2].partition("\n\n- ")[0]
    rows = [
        tuple(cell.strip(" `") for cell in line.strip("|").split("|")) for line in table.splitlines() if "`" in line
    ]
    docs = [(column.name, column.ddl, column.doc.strip(" `")) for column in COLUMNS.values()]
    assert rows == docs
