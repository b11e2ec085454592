# SPDX-License-Identifier: Apache-2.0
"""Data source `mqtt_nats`: the class that Spark makes for a read or a write.

Spark makes one instance for each `load()`, in a process of its own, and sends it pickled to the processes that plan and
run a read of that DataFrame. The first pickling pins the range of a batch read, so the range holds for all actions of
the DataFrame. An instance for a write is never pickled.
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

    Raises OptionError for a wrong option, and SourceError for an error that shows at the server. Spark shows the text,
    one line, at the end of its own message.
    """

    _options: "Options"
    _pinned: "Snapshot | OptionError | SourceError | None" = None

    def __init__(self, options: dict[str, str]) -> None:
        from pyspark_mqtt_nats.options import Options

        self._options = Options.parse(options)
        self._options.require_servers()

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "mqtt_nats"

    def schema(self) -> StructType:
        """Return the columns of a read without a schema of the user's.

        Raises an error that would end every read, so that `load()` fails and not the first action.
        """
        from pyspark_mqtt_nats import projection
        from pyspark_mqtt_nats.errors import DataLossError, SourceError

        self._pinned = self._pin()
        if isinstance(self._pinned, SourceError) and not isinstance(self._pinned, DataLossError):
            raise self._pinned
        if self._options.mode == "sessions":
            from pyspark_mqtt_nats import sessions

            return sessions.spark_schema()
        return projection.spark_schema(self._options.decoders, self._options.include_headers)

    def __getstate__(self) -> dict[str, Any]:
        if self._pinned is None:
            self._pinned = self._pin()
        return self.__dict__

    def _pin(self) -> "Snapshot | OptionError | SourceError":
        """Return the range of a batch read of this DataFrame, or the error that such a read raises.

        The error need not concern a streaming read, which begins elsewhere.
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
        """Return the reader of a batch read."""
        from pyspark_mqtt_nats.errors import OptionError
        from pyspark_mqtt_nats.projection import Projection

        options = self._options
        options.check_use("batch")
        if options.starting_offsets == "latest":
            raise OptionError("startingOffsets = 'latest' is for streaming reads: set earliest", "startingOffsets")
        pinned = self._pinned
        if pinned is None:
            pinned = self._pin()
        if isinstance(pinned, Exception):
            raise pinned
        if options.mode == "sessions":
            from pyspark_mqtt_nats import sessions

            return sessions.Reader(options, pinned, Projection.of(schema, own=sessions.COLUMNS))
        projection = Projection.of(schema, options.decoders)
        kind: Callable[[Options, Snapshot, Projection], DataSourceReader]
        if options.mode == "retained":
            from pyspark_mqtt_nats import retained

            kind = retained.FilteringReader if options.pushdown else retained.Reader
        else:
            from pyspark_mqtt_nats import batch

            kind = batch.FilteringReader if options.pushdown else batch.Reader
        return kind(options, pinned, projection)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a streaming read."""
        from pyspark_mqtt_nats.projection import Projection
        from pyspark_mqtt_nats.stream_reader import StreamReader

        self._options.check_use("stream")
        return StreamReader(self._options, Projection.of(schema, self._options.decoders))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch write."""
        from pyspark_mqtt_nats.sink import BatchWriter

        return BatchWriter(self._options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer of a streaming write."""
        from pyspark_mqtt_nats.sink import StreamWriter

        return StreamWriter(self._options, schema)
