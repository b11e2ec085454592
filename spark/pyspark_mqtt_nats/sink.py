# SPDX-License-Identifier: Apache-2.0
"""The sink: rows of a DataFrame become MQTT messages, those of a query that is run again only once.

A message is told by its query, its epoch, its partition and its row. The query is the option `queryId`; or what the
checkpoint of a streaming query calls it; or made up for each batch write, also for those of `foreachBatch`, which may
write equal rows more than once. The epoch is the number of the micro-batch, also for what `foreachBatch` writes.
"""

import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from pyspark_mqtt_nats.errors import ApiError, OptionError, SourceError
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import api, stream_info
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.publishing import columns
from pyspark_mqtt_nats.publishing.dead_letters import dead_letter
from pyspark_mqtt_nats.publishing.encoding import Encoder, Identities, Refused, check_topic
from pyspark_mqtt_nats.publishing.publisher import Publisher

QUERY: Final = "sql.streaming.queryId"
EPOCH: Final = "streaming.sql.batchId"
"""Names of the query's id and of the batch's number among the properties of a task."""

_NS: Final = 1_000_000_000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Published(WriterCommitMessage):
    """Count of a task: `messages` that it has published, `duplicates` of them that the stream had already."""

    partition: int
    messages: int
    duplicates: int


class Sink:
    """Writer of both kinds: the driver makes it, and Spark sends it to the executors.

    Raises OptionError and SourceError, each one line that names the option or the column.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        options.check_use("write")
        if options.topic is not None:
            try:
                check_topic(options.topic)
            except ValueError as error:
                raise OptionError(f"topic: {error}", "topic") from None
        self.names = columns.check(schema, options.topic is not None)
        self.options = options
        self.made_up = secrets.token_hex(8)
        stores = options.qos or options.retain or not {"qos", "retain"}.isdisjoint(self.names)
        stores = stores or options.dead_letter_topic is not None
        self.window = self._window() if stores else 0.0

    def _window(self) -> float:
        """Return the stream's duplicate window in seconds, after raising it where `duplicateWindow` says so."""
        options = self.options
        with Connection(options.access) as connection:
            config = stream_info(connection, options.stream)["config"]
            window = float(config.get("duplicate_window", 0)) / _NS
            wanted = options.duplicate_window
            if wanted is None or window >= wanted:
                return window
            config["duplicate_window"] = int(wanted * _NS)
            try:
                api(connection, f"STREAM.UPDATE.{options.stream}", config)
            except ApiError as error:
                text = f"duplicateWindow = {wanted:g}: stream {options.stream} keeps {window:g} s: {error.description}"
                raise OptionError(text, "duplicateWindow") from None
            return wanted

    def write(self, batches: Iterator[pa.RecordBatch]) -> Published:
        """Publish the rows of one partition, in their order; returns when NATS has acknowledged all of them."""
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        query = self.options.query_id or self.query(context)
        identities = Identities(query, _task_property(context, EPOCH), partition)
        where = f"partition {partition}, row"
        options = self.options.renewed()
        number = 0
        filled = (batch for batch in batches if batch.num_rows)
        first = next(filled, None)
        if first is None:
            return Published(partition, 0, 0)
        deadline = time.monotonic() + self.window if self.window else float("inf")
        with Publisher(options.access, options.max_in_flight, where) as publisher:
            encoder = Encoder(
                options.subject_prefix,
                publisher.inbox,
                publisher.max_payload,
                options.topic,
                options.qos,
                options.retain,
            )

            def publish(row: tuple[Any, ...]) -> None:
                message = encoder.message(row)
                identity = identities.next(message) if message.qos or message.retain else b""
                publisher.publish(encoder, message, identity, number)

            try:
                for batch in chain((first,), filled):
                    for row in columns.rows(batch, self.names):
                        try:
                            publish(row)
                        except Refused as error:
                            if options.dead_letter_topic is None:
                                raise
                            publish(dead_letter(options.dead_letter_topic, row, error))
                        number += 1
                    publisher.push()
                    if time.monotonic() > deadline:
                        self._warn(partition)
                        deadline = float("inf")
            except Refused as error:
                text = f"{where} {number}: {error}"
                if options.dead_letter_topic is None:
                    text += "; with a dead-letter topic the other rows are published"
                raise SourceError(text, error.column) from None
            publisher.finish()
            return Published(partition, number, publisher.duplicates)

    def query(self, context: TaskContext | None) -> str:
        """Return the name of this write where there is no option `queryId`."""
        return self.made_up

    def _warn(self, partition: int) -> None:
        log.warning(
            "partition %d takes longer than %g s, the duplicate window of stream %s: when the task is run "
            "again, its first messages are stored twice; set duplicateWindow",
            partition,
            self.window,
            self.options.stream,
        )


def _task_property(context: TaskContext | None, name: str) -> str:
    return "" if context is None else context.getLocalProperty(name) or ""


class BatchWriter(Sink, DataSourceArrowWriter):
    """Writer of `df.write.format("mqtt_nats").mode("append")`."""

    def __init__(self, options: Options, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError('messages cannot be overwritten: write with mode("append"), or INSERT INTO')
        super().__init__(options, schema)


class StreamWriter(Sink, DataSourceStreamArrowWriter):
    """Writer of `df.writeStream.format("mqtt_nats")`; in complete mode it publishes the whole result each time."""

    def query(self, context: TaskContext | None) -> str:
        """Return the query's id, which is in its checkpoint."""
        return _task_property(context, QUERY) or self.made_up
