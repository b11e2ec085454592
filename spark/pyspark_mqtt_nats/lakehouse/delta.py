# SPDX-License-Identifier: Apache-2.0
"""Tables of Delta Lake, by delta-rs. A batch's number is the version of the writer's `txn` action."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, create_table_with_add_actions

from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.lakehouse.columns import compare
from pyspark_mqtt_nats.lakehouse.tables import PARTITIONS, DataFile, Target

RETRIES: Final = 10
"""Times that a commit is tried again when others, such as a compaction, have committed meanwhile."""


@contextmanager
def _explained(target: Target) -> Iterator[None]:
    try:
        yield
    except (DeltaError, OSError, ValueError) as error:
        raise JobError(f"{target.flag} {target.output}: {' '.join(str(error).split())[:300]}") from None


def exists(target: Target) -> bool:
    """Whether there is a table at a place."""
    with _explained(target):
        return bool(DeltaTable.is_deltatable(target.uri))


class DeltaLake:
    """A table of Delta Lake."""

    def __init__(self, target: Target, writer: str, schema: pa.Schema | None) -> None:
        self._target = target
        self._writer = writer
        with _explained(target):
            if schema is not None and not exists(target):
                create_table_with_add_actions(
                    target.uri, Schema.from_arrow(schema), [], mode="ignore", partition_by=list(PARTITIONS)
                )
            self.table = DeltaTable(target.uri)
            if schema is not None:
                self._widen(schema)

    def _widen(self, wanted: pa.Schema) -> None:
        """Add new columns. No column becomes wider: delta-rs does not write tables that may have that."""
        there = pa.schema(self.table.schema().to_arrow())
        compare(f"{self._target.flag} {self._target.output}", there, wanted)
        known = set(there.names)
        if new := [field for field in Schema.from_arrow(wanted).fields if field.name not in known]:
            self.table.alter.add_columns(new)

    def last_batch(self) -> int:
        """Return the number of the last batch that this writer has committed, -1 for none."""
        with _explained(self._target):
            self.table.update_incremental()
            found = self.table.transaction_version(self._writer)
            return -1 if found is None else int(found)

    def add(self, files: Sequence[DataFile], batch: int) -> None:
        """Commit a batch: its files and its number in one transaction."""
        actions: list[Any] = [AddAction(file.path, file.size, file.partition, file.time, True, "{}") for file in files]
        with _explained(self._target):
            self.table.create_write_transaction(
                actions,
                "append",
                self.table.schema(),
                list(PARTITIONS),
                commit_properties=CommitProperties(
                    app_transactions=[Transaction(self._writer, batch)], max_commit_retries=RETRIES
                ),
            )

    def files(self) -> list[str]:
        """Return the paths of all files that count."""
        with _explained(self._target):
            return [_hadoop(uri) for uri in self.table.file_uris()]

    def columns(self) -> None:
        """Return None: all files have a column in one type."""

    def compact(self, before: str, size: int) -> tuple[int, int]:
        """Make files of about `size` bytes from those of days before a date; return how many went and came."""
        with _explained(self._target):
            done = self.table.optimize.compact(partition_filters=[("date", "<", before)], target_size=size)
            return int(done["numFilesRemoved"]), int(done["numFilesAdded"])


def _hadoop(uri: str) -> str:
    return uri.replace("s3://", "s3a://", 1)
