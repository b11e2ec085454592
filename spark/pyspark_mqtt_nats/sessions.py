# SPDX-License-Identifier: Apache-2.0
"""Sessions and their positions as a table: one row per session record, as it is while it is being read.

A session's position is in its JetStream consumers, one or two for each subscription at QoS 1 and 2. A session that a
shared reader serves has a record of its position in `$MQTT_pos` too. The consumers are listed only when a column needs
them, because JetStream gives 256 of them in one answer.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import (
    ArrayType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from mqtt_streams import headers, positions, sessions, timers
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import PoisonedRecord, SessionRecord
from mqtt_streams.subjects import subject_to_filter
from pyspark_mqtt_nats import schema
from pyspark_mqtt_nats.errors import ApiError
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import api
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.projection import Projection
from pyspark_mqtt_nats.reading.ranges import Snapshot, snapshot
from pyspark_mqtt_nats.retained import Everything, last_messages
from pyspark_mqtt_nats.schema import Column

CONSUMERS: Final = "consumers"
"""Column that needs a list of all consumers."""

DEADLINE: Final = "deadline"
"""Column that needs `$MQTT_timers`."""

POSITION: Final = ("reached", "in_flight", "position_time")
"""Columns that need `$MQTT_pos`."""

_TIME: Final = pa.timestamp("us", tz="UTC")
_SUBSCRIPTION: Final = StructType([StructField("filter", StringType()), StructField("qos", IntegerType())])
_ARROW_SUBSCRIPTION: Final = pa.struct([("filter", pa.string()), ("qos", pa.int32())])
_CONSUMER: Final = StructType(
    [
        StructField("name", StringType()),
        StructField("acknowledged", LongType()),
        StructField("in_flight", LongType()),
        StructField("waiting", LongType()),
    ]
)
_ARROW_CONSUMER: Final = pa.struct(
    [("name", pa.string()), ("acknowledged", pa.int64()), ("in_flight", pa.int64()), ("waiting", pa.int64())]
)
_LISTED: Final = "ARRAY<STRUCT<filter: STRING, qos: INT>>"


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind))


COLUMNS: Final[dict[str, Column]] = {
    column.name: column
    for column in (
        Column("client_id", "STRING", StringType(), pa.string(), "client id"),
        Column("user", "STRING", StringType(), pa.string(), "authenticated user; null: anonymous, or not known"),
        Column("kind", "STRING", StringType(), pa.string(), "`durable` or `regular`; null: of nats-server's listener"),
        Column(DEADLINE, "TIMESTAMP", TimestampType(), _TIME, "when the session ends; null: connected, or never"),
        Column("expiry", "BIGINT", LongType(), pa.int64(), "Session Expiry Interval, in s; null: never"),
        Column("written", "TIMESTAMP", TimestampType(), _TIME, "when the record was written"),
        Column(
            "subscriptions",
            _LISTED,
            ArrayType(_SUBSCRIPTION),
            _list(_ARROW_SUBSCRIPTION),
            "topic filters, with the QoS that was granted",
        ),
        Column(
            "shared_subscriptions",
            _LISTED,
            ArrayType(_SUBSCRIPTION),
            _list(_ARROW_SUBSCRIPTION),
            "those that begin with `$share/`",
        ),
        Column("reached", "BIGINT", LongType(), pa.int64(), "in `$MQTT_pos`: sequence up to which it has everything"),
        Column("in_flight", "BIGINT", LongType(), pa.int64(), "in `$MQTT_pos`: messages sent and not complete"),
        Column("position_time", "TIMESTAMP", TimestampType(), _TIME, "when that position was written"),
        Column(
            CONSUMERS,
            "ARRAY<STRUCT<name: STRING, acknowledged: BIGINT, in_flight: BIGINT, waiting: BIGINT>>",
            ArrayType(_CONSUMER),
            _list(_ARROW_CONSUMER),
            "JetStream consumers: sequence up to which all is acknowledged, messages sent, messages that wait",
        ),
        Column(
            "error", "STRING", StringType(), pa.string(), "why the record cannot be read; other columns are null then"
        ),
    )
}


def spark_schema() -> StructType:
    """Return the schema of the table."""
    return schema.spark_schema(own=COLUMNS)


class Reader(DataSourceReader):
    """Spark reader of the session records."""

    def __init__(self, options: Options, snapshot: Snapshot, projection: Projection) -> None:
        self.options = options
        self.snapshot = snapshot
        self.projection = projection

    def partitions(self) -> Sequence[InputPartition]:
        """Return the only partition."""
        return [Everything()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the record batches of the table, which have each session once."""
        return self.projection.apply(self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        names = self.projection.stored
        places = _positions(self.options) if set(POSITION) & set(names) else {}
        ends = _deadlines(self.options) if DEADLINE in names else {}
        consumers = _consumers(self.options) if CONSUMERS in names else {}
        read = ("subject", "timestamp", "payload")
        for batch in last_messages(self.options, self.snapshot, read):
            rows = [
                _row(subject, written, payload, places, consumers) | {DEADLINE: ends.get(subject.rpartition(".")[2])}
                for subject, written, payload in zip(*(batch.column(name).to_pylist() for name in read), strict=True)
            ]
            arrays = [pa.array([row.get(name) for row in rows], COLUMNS[name].arrow_type) for name in names]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema.arrow_schema(names, COLUMNS))


def _row(
    subject: str,
    written: datetime,
    payload: bytes,
    places: Mapping[str, tuple[datetime, bytes]],
    consumers: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """Return the values of a session record by column; a column without a value is left out."""
    key = subject.rpartition(".")[2]
    try:
        record = sessions.decode(payload, key=key)
    except PoisonedRecord as error:
        return {"written": written, "error": str(error)}
    found = {"written": written, "client_id": record.client_id} | _subscriptions(record)
    names = [consumer.durable_name for consumer in record.cons.values()]
    found[CONSUMERS] = [consumers[name] for name in names if name in consumers]
    v5 = record.v5
    if v5 is None:
        return found
    found |= {"kind": v5.kind, "expiry": v5.expiry, "user": v5.user or None}
    when, data = places.get(key, (None, b""))
    position = positions.decode(data) if data else None
    if position is not None and position.id == v5.pos:
        found |= {"reached": position.reached, "in_flight": len(position.pending), "position_time": when}
    return found


def _subscriptions(record: SessionRecord) -> dict[str, Any]:
    options = {} if record.v5 is None else record.v5.options
    shared = {} if record.v5 is None else record.v5.shared
    return {
        "subscriptions": [
            {"filter": options[subject].filter if subject in options else subject_to_filter(subject), "qos": qos}
            for subject, qos in record.subs.items()
        ],
        "shared_subscriptions": [{"filter": name, "qos": one.qos} for name, one in shared.items()],
    }


def _positions(options: Options) -> dict[str, tuple[datetime, bytes]]:
    """Return the stored positions by session key, with the times of their writes."""
    own = replace(options, stream=positions.STREAM, subject_prefix=positions.PREFIX)
    return {key: (written, payload) for key, written, payload in _last(own, ("subject", "timestamp", "payload"))}


def _deadlines(options: Options) -> dict[str, datetime]:
    """Return when the sessions of disconnected clients end, by session key."""
    found = {}
    own = replace(options, stream=timers.STREAM, subject_prefix=timers.PREFIX)
    for subject, pairs in _last(own, ("subject", "headers")):
        kind, _, key = subject.partition(".")
        text = next((pair["value"] for pair in pairs or () if pair["key"] == headers.SCHEDULE), b"")
        if kind == timers.EXPIRY:
            with contextlib.suppress(ValueError):
                found[key] = datetime.fromisoformat(text.decode().removeprefix("@at "))
    return found


def _last(options: Options, columns: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the last message of each subject as a tuple of these columns; nothing without the stream."""
    try:
        with Connection(options.access) as connection:
            found = snapshot(options, connection)
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return
        raise
    for batch in last_messages(options, found, columns):
        yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)


def _consumers(options: Options) -> dict[str, dict[str, Any]]:
    """Return the consumers of `$MQTT_msgs` by name."""
    found: dict[str, dict[str, Any]] = {}
    offset, total = 0, 1
    with Connection(options.access) as connection:
        while offset < total:
            answer = api(connection, f"CONSUMER.LIST.{MESSAGES}", {"offset": offset})
            page = answer.get("consumers") or []
            for one in page:
                found[one["name"]] = {
                    "name": one["name"],
                    "acknowledged": one["ack_floor"]["stream_seq"],
                    "in_flight": one["num_ack_pending"],
                    "waiting": one["num_pending"],
                }
            offset, total = offset + len(page), int(answer.get("total", 0)) if page else 0
    return found
