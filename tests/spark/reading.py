# SPDX-License-Identifier: Apache-2.0
"""Reads of ranges, as their tests have them."""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from pyspark_mqtt_nats.reading.ranges import snapshot, split
from pyspark_mqtt_nats.reading.read import ReadReport, read_range
from tests.spark.storing import Store, sequences

WAYS = pytest.mark.parametrize("way", ["pull", "direct"])
MANY = 3000


class Reading:
    """A read of the whole range in some parts; `reports` has one for each part."""

    def __init__(
        self, store: Store, parts: int = 1, columns: Sequence[str] = ("sequence", "payload"), **options: Any
    ) -> None:
        self.options = store.options(**options)
        self.snapshot = snapshot(self.options, store.connection)
        self.parts = split(self.snapshot, parts)
        self.columns = columns
        self.reports: list[ReadReport] = []

    def batches(self) -> Iterator[pa.RecordBatch]:
        for part in self.parts:
            self.reports.append(ReadReport())
            yield from read_range(self.options, self.snapshot, part, self.columns, self.reports[-1])

    def rows(self) -> list[dict[str, Any]]:
        return [row for batch in self.batches() for row in batch.to_pylist()]

    def sequences(self) -> list[int]:
        return sequences(self.batches())

    def total(self, name: str) -> int:
        return sum(getattr(report, name) for report in self.reports)


def consumers(store: Store) -> list[str]:
    found: list[str] = store.api("CONSUMER.NAMES")["consumers"] or []
    return found


def half(reading: Reading) -> tuple[Iterator[pa.RecordBatch], list[int]]:
    """A read that has handed over its first batch, which is not its last."""
    batches = reading.batches()
    got = sequences(iter([next(batches)]))
    assert got
    return batches, got
