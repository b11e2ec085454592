# SPDX-License-Identifier: Apache-2.0
"""Columns of stored messages: names, Spark types, Arrow types, and which of them a user's schema may ask for.

Every column is nullable, as in a schema that is written as DDL. Spark compares the Arrow schema of the batches with the
schema of the read, nullability included.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pyspark_mqtt_nats.errors import OptionError


class Column(NamedTuple):
    """Column of the source: `ddl` is its type as users write it in a schema, `doc` one line about its content."""

    name: str
    ddl: str
    spark_type: DataType
    arrow_type: pa.DataType
    doc: str


HEADERS: Final = "headers"
"""Column that only reads with `includeHeaders` have."""

MESSAGE_ID: Final = "message_id"
"""Column that differs in each message; it is decoded apart from the other columns of the headers."""

_STRING: Final = StringType()
_PAIR: Final = StructType([StructField("key", _STRING), StructField("value", _STRING)])
_HEADER: Final = StructType([StructField("key", _STRING), StructField("value", BinaryType())])


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind))


_ARROW_PAIR: Final = pa.struct([("key", pa.string()), ("value", pa.string())])
_ARROW_HEADER: Final = pa.struct([("key", pa.string()), ("value", pa.binary())])

COLUMNS: Final[dict[str, Column]] = {
    column.name: column
    for column in (
        Column("sequence", "BIGINT", LongType(), pa.int64(), "stream sequence: grows, is never given twice"),
        Column(
            "timestamp",
            "TIMESTAMP",
            TimestampType(),
            pa.timestamp("us", tz="UTC"),
            "when NATS stored it, in microseconds",
        ),
        Column("topic", "STRING", _STRING, pa.string(), "MQTT topic"),
        Column(
            "topic_levels",
            "ARRAY<STRING>",
            ArrayType(_STRING),
            _list(pa.string()),
            "the topic, split at `/`",
        ),
        Column("subject", "STRING", _STRING, pa.string(), "NATS subject, without the stream's prefix"),
        Column("payload", "BINARY", BinaryType(), pa.binary(), "the message itself"),
        Column("qos", "INT", IntegerType(), pa.int32(), "QoS of the publish; null when no MQTT client published it"),
        Column("retain", "BOOLEAN", BooleanType(), pa.bool_(), "whether RETAIN was set"),
        Column("publisher", "STRING", _STRING, pa.string(), "client id of the publisher, where the gateway names it"),
        Column(MESSAGE_ID, "STRING", _STRING, pa.string(), "the gateway's id of the message, as its log has it"),
        Column("content_type", "STRING", _STRING, pa.string(), "Content Type (MQTT 5.0)"),
        Column("payload_format", "INT", IntegerType(), pa.int32(), "Payload Format Indicator: 0 or 1 (MQTT 5.0)"),
        Column("response_topic", "STRING", _STRING, pa.string(), "Response Topic (MQTT 5.0)"),
        Column("correlation_data", "BINARY", BinaryType(), pa.binary(), "Correlation Data (MQTT 5.0)"),
        Column(
            "message_expiry", "BIGINT", LongType(), pa.int64(), "Message Expiry Interval as published, in s (MQTT 5.0)"
        ),
        Column(
            "user_properties",
            "ARRAY<STRUCT<key: STRING, value: STRING>>",
            ArrayType(_PAIR),
            _list(_ARROW_PAIR),
            "User Properties in order, names may repeat (MQTT 5.0)",
        ),
        Column(
            HEADERS,
            "ARRAY<STRUCT<key: STRING, value: BINARY>>",
            ArrayType(_HEADER),
            _list(_ARROW_HEADER),
            "all NATS headers as stored, in order; with `includeHeaders`",
        ),
    )
}


def spark_schema(include_headers: bool = False, own: Mapping[str, Column] = COLUMNS) -> StructType:
    """Return the schema of the source when the user gives none."""
    return StructType(
        [
            StructField(column.name, column.spark_type)
            for column in own.values()
            if include_headers or column.name != HEADERS
        ]
    )


def arrow_schema(columns: Sequence[str], own: Mapping[str, Column] = COLUMNS) -> pa.Schema:
    """Return the schema of record batches with these columns, in this order."""
    return pa.schema([pa.field(name, own[name].arrow_type) for name in columns])


def select(field: StructField, own: Mapping[str, Column] = COLUMNS) -> str:
    """Return the source's name of a column that a schema asks for, in capitals or small letters.

    Raises OptionError that names the column: unknown, of another type, or NOT NULL.
    """
    column = own.get(field.name.lower())
    if column is None:
        near = get_close_matches(field.name.lower(), own, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(own)}"
        raise OptionError(f"the schema has a column {field.name!r} that this source does not have; {hint}", "schema")
    if field.dataType != column.spark_type:
        kind = field.dataType.simpleString()
        raise OptionError(f"column {field.name!r} of the schema is {kind}; it must be {column.ddl}", "schema")
    if not field.nullable:
        raise OptionError(f"column {field.name!r} must not be NOT NULL in the schema", "schema")
    return column.name
