# SPDX-License-Identifier: Apache-2.0
"""Micro-batches as Spark has them planned and read, without a Spark session."""

import json
import pickle
from typing import Any

from pyspark.sql.types import StructType

from pyspark_mqtt_nats.source import MqttNatsSource
from pyspark_mqtt_nats.stream_reader import StreamReader
from tests.spark.storing import Store, sequences

SCHEMA = StructType().add("sequence", "long")


class Query:
    """What Spark does with a reader: one batch after the other, with offsets that have been JSON."""

    def __init__(self, store: Store, **options: Any) -> None:
        self.store = store
        self.source = MqttNatsSource(store.given(**options))
        self.checkpoint: dict[str, Any] | None = None
        self.start()

    def start(self, *, available_now: bool = False) -> None:
        """A new run of the query, which has only its checkpoint."""
        reader = self.source.streamReader(SCHEMA)
        assert isinstance(reader, StreamReader)
        self.reader = reader
        self.store.closing.callback(reader.stop)
        if available_now:
            reader.prepareForTriggerAvailableNow()

    def plan(self, limit: Any = None) -> dict[str, Any]:
        """The end of the next batch."""
        limit = self.reader.getDefaultReadLimit() if limit is None else limit
        return _json(self.reader.latestOffset(self.begin, limit))

    @property
    def begin(self) -> dict[str, Any]:
        """Where the next batch begins."""
        return _json(self.reader.initialOffset()) if self.checkpoint is None else self.checkpoint

    def read(self, end: dict[str, Any]) -> list[int]:
        """Read a planned batch, in tasks elsewhere."""
        tasks = pickle.dumps(self.source.streamReader(SCHEMA))
        found: list[int] = []
        for partition in pickle.loads(pickle.dumps(self.reader.partitions(self.begin, end))):
            found += sequences(pickle.loads(tasks).read(partition))
        return found

    def batch(self, limit: Any = None) -> list[int]:
        """Plan, read and complete a batch."""
        end = self.plan(limit)
        found = self.read(end) if end != self.begin else []
        self.checkpoint = end
        return found

    def batches(self, most: int = 100) -> list[list[int]]:
        """All batches until there is nothing new."""
        found: list[list[int]] = []
        while len(found) < most and (self.checkpoint is None or self.plan() != self.checkpoint):
            found.append(self.batch())
        return found


def _json(offset: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(offset))
    return found
