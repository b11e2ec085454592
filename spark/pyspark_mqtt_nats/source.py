# SPDX-License-Identifier: Apache-2.0
"""The data source `mqtt_nats`.

Spark makes one instance for each `load()`, in a process of its own, and sends it pickled to whoever plans or runs a
read of that DataFrame. So what is found out when it is pickled for the first time holds for all its actions: that is
where the range of a batch read is pinned. An instance for a write is never pickled.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from pyspark_mqtt_nats.errors import OptionError, SourceError
    from pyspark_mqtt_nats.options import Options
    from pyspark_mqtt_nats.reading.ranges import Snapshot


class MqttNatsSource(DataSource):
    """`spark.read`, `spark.readStream`, `df.write` and `df.writeStream` with `.format("mqtt_nats")`.

    Raises OptionError for what is wrong in the options, and SourceError for what the server says; Spark shows their
    texts, one line each, at the end of its own message.
    """

    _options: "Options"
    _pinned: "Snapshot | OptionError | SourceError | None" = None

    def __init__(self, options: dict[str, str]) -> None:
        from pyspark_mqtt_nats.options import Options

        self._options = Options.parse(options)

    @classmethod
    def name(cls) -> str:
        """What goes into `format()`."""
        return "mqtt_nats"

    def schema(self) -> StructType:
        """The columns when the user gives no schema.

        Raises what would end every read: then `load()` fails already, not the first action.
        """
        from pyspark_mqtt_nats import hints
        from pyspark_mqtt_nats.errors import DataLossError, SourceError

        self._pinned = self._pin()
        if isinstance(self._pinned, SourceError) and not isinstance(self._pinned, DataLossError):
            raise self._pinned
        return hints.spark_schema(self._options.decoders, self._options.include_headers)

    def __getstate__(self) -> dict[str, Any]:
        if self._pinned is None:
            self._pinned = self._pin()
        return self.__dict__

    def _pin(self) -> "Snapshot | OptionError | SourceError":
        """What a batch read of this DataFrame reads, or why there can be none.

        That reason may be none for a streaming read, which finds its start elsewhere.
        """
        from pyspark_mqtt_nats.errors import OptionError, SourceError
        from pyspark_mqtt_nats.nats.connection import Connection
        from pyspark_mqtt_nats.reading.ranges import snapshot

        try:
            with Connection(self._options.access) as connection:
                return snapshot(self._options, connection)
        except (OptionError, SourceError) as error:
            return error.with_traceback(None)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Batch read."""
        from pyspark_mqtt_nats import batch, retained
        from pyspark_mqtt_nats.errors import OptionError
        from pyspark_mqtt_nats.hints import Projection

        options = self._options
        options.check_use("batch")
        if options.starting_offsets == "latest":
            raise OptionError("startingOffsets = 'latest' is for streaming reads: set earliest", "startingOffsets")
        projection = Projection.of(schema, options.decoders)
        pinned = self._pinned
        if pinned is None:
            pinned = self._pin()
        if isinstance(pinned, Exception):
            raise pinned
        kind: Callable[[Options, Snapshot, Projection], DataSourceReader]
        if options.mode == "retained":
            kind = retained.FilteringReader if options.pushdown else retained.Reader
        else:
            kind = batch.FilteringReader if options.pushdown else batch.Reader
        return kind(options, pinned, projection)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Streaming read."""
        from pyspark_mqtt_nats.hints import Projection
        from pyspark_mqtt_nats.streaming import StreamReader

        self._options.check_use("stream")
        return StreamReader(self._options, Projection.of(schema, self._options.decoders))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Batch write."""
        from pyspark_mqtt_nats.sink import BatchWriter

        return BatchWriter(self._options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Streaming write."""
        from pyspark_mqtt_nats.sink import StreamWriter

        return StreamWriter(self._options, schema)
