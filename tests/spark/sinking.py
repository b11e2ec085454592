# SPDX-License-Identifier: Apache-2.0
"""Rows for the sink, and writers of it that need no Spark session."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from nats.js.client import JetStreamContext
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
)

from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.sink import BatchWriter

Row = Mapping[str, Any]

PAIRS: Final = ArrayType(StructType([StructField("key", StringType()), StructField("value", StringType())]))
_PAIR: Final = pa.struct([("key", pa.string()), ("value", pa.string())])

TYPES: Final[dict[str, tuple[DataType, pa.DataType]]] = {
    "topic": (StringType(), pa.string()),
    "payload": (BinaryType(), pa.binary()),
    "qos": (IntegerType(), pa.int32()),
    "retain": (BooleanType(), pa.bool_()),
    "content_type": (StringType(), pa.string()),
    "payload_format": (IntegerType(), pa.int32()),
    "response_topic": (StringType(), pa.string()),
    "correlation_data": (BinaryType(), pa.binary()),
    "message_expiry": (LongType(), pa.int64()),
    "user_properties": (PAIRS, pa.list_(_PAIR)),
}
"""Spark's type and Arrow's of each column, as Spark gives them to a writer."""


def users(*pairs: tuple[str | None, str | None]) -> list[dict[str, str | None]]:
    """User properties as a value of their column."""
    return [{"key": key, "value": value} for key, value in pairs]


def names_of(rows: Iterable[Row]) -> list[str]:
    """The columns of rows, in the order of TYPES."""
    found = {name for row in rows for name in row}
    return [name for name in TYPES if name in found]


def schema_of(names: Sequence[str]) -> StructType:
    """The schema of a DataFrame with these columns."""
    return StructType([StructField(name, TYPES[name][0]) for name in names])


def batch_of(rows: Sequence[Row], names: Sequence[str]) -> pa.RecordBatch:
    """Rows as Spark gives them to a writer."""
    columns = [pa.array([row.get(name) for row in rows], TYPES[name][1]) for name in names]
    return pa.record_batch(columns, names=list(names))


class Sinker:
    """A writer as Spark makes it for a DataFrame with the columns of `rows`, to run its task as often as one likes."""

    def __init__(self, url: str, rows: Sequence[Row], **options: Any) -> None:
        self.rows = rows
        self.names = names_of(rows)
        parsed = Options.parse({"servers": url, **options})
        self.writer = BatchWriter(parsed, schema_of(self.names), False)

    def write(self, rows: Sequence[Row] | None = None) -> tuple[int, int]:
        """Run the task on these rows, all of them by default; messages and duplicates."""
        found = self.writer.write(iter([batch_of(self.rows if rows is None else rows, self.names)]))
        return found.messages, found.duplicates


async def run(sinker: Sinker, rows: Sequence[Row] | None = None) -> tuple[int, int]:
    """Run a task beside the event loop."""
    return await asyncio.to_thread(sinker.write, rows)


async def stored(js: JetStreamContext, first: str, stream: str = "$MQTT_msgs", prefix: str = "$MQTT.msgs.") -> int:
    """How many messages of topics below `first` a stream has."""
    info = await js.stream_info(stream, subjects_filter=f"{prefix}{first}.>")
    return sum((info.state.subjects or {}).values())
