# SPDX-License-Identifier: Apache-2.0
"""Tables of Iceberg, by PyIceberg. A batch's number is a property of the table, and of the batch's snapshot."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.io.pyarrow import parquet_files_to_data_files
from pyiceberg.table import Transaction
from pyiceberg.table.name_mapping import MappedField
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import (
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StructType,
)

from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.jobs.storage import Place
from pyspark_mqtt_nats.lakehouse.columns import compare
from pyspark_mqtt_nats.lakehouse.compaction import Group, parquet_names
from pyspark_mqtt_nats.lakehouse.tables import COPIES, DATA, PARTITIONS, DataFile, Target

LOCAL_CATALOG: Final = "catalog.db"
"""File with the catalog of a table that has no other one, in the table's directory."""

ATTEMPTS: Final = 10
"""Times that a commit is tried when others, such as a compaction, have committed meanwhile."""

BATCH: Final = "mqtt-nats.batch"
"""Property of a snapshot: number of its batch. With a dot and the writer's name also a property of the table."""


_WIDER: Final = ((IntegerType, LongType), (FloatType, DoubleType))
"""Types that a column may have one after the other by Iceberg's specification; besides a DECIMAL of more digits."""


@contextmanager
def _explained(target: Target) -> Iterator[None]:
    try:
        yield
    except JobError:
        raise
    except Exception as error:  # of PyIceberg, SQLAlchemy, or whatever the catalog is made of
        option = target.flag if target.catalog is None else "--catalog"
        raise JobError(f"{option} {target.catalog or target.output}: {' '.join(str(error).split())[:300]}") from None


def _catalog(target: Target) -> Catalog:
    if target.catalog is not None:
        return load_catalog(target.catalog)
    if "://" in target.output:
        raise JobError(f"{target.flag} {target.output}: give --catalog; without it the table has to be on this machine")
    Path(target.uri).mkdir(parents=True, exist_ok=True)
    return SqlCatalog("mqtt-nats", uri=f"sqlite:///{target.uri}/{LOCAL_CATALOG}", warehouse=target.uri)


def exists(target: Target) -> bool:
    """Whether there is a table of this name in the catalog; makes no catalog where there is none."""
    local = target.catalog is None and "://" not in target.output
    if local and not Path(target.uri, LOCAL_CATALOG).exists():
        return False
    with _explained(target):
        return bool(_catalog(target).table_exists(target.name))


class Iceberg:
    """A table of Iceberg."""

    of_directories: tuple[str, ...] = COPIES

    def __init__(self, target: Target, writer: str, schema: pa.Schema | None) -> None:
        self._target = target
        self._property = f"{BATCH}.{writer}"
        with _explained(target):
            catalog = _catalog(target)
            if schema is not None and not catalog.table_exists(target.name):
                catalog.create_namespace_if_not_exists(target.name.rpartition(".")[0])
                catalog.create_table_if_not_exists(target.name, schema=schema, location=target.uri)
            self.table = catalog.load_table(target.name)
            if schema is not None:
                self._arrange(schema)

    def _arrange(self, schema: pa.Schema) -> None:
        """Partition a new table, which a run that was killed may have left without; add columns, make some wider."""
        if not self.table.spec().fields and self.table.current_snapshot() is None:
            with self.table.update_spec() as spec:
                for name in PARTITIONS:
                    spec.add_identity(name)
        there = self.table.schema().as_arrow()
        target = self._target
        where, place = f"{target.flag} {target.output}", "--output and --checkpoint"
        if target.catalog is not None:
            where, place = f"--table {target.name}", f"--table, {place}"
        widened = compare(where, there, schema, stored=_stored, wider=_wider, place=place)
        if widened or not set(there.names).issuperset(schema.names):
            with self.table.update_schema() as update:
                update.union_by_name(schema)

    def last_batch(self) -> int:
        """Return the number of the last batch that this writer has committed, -1 for none."""
        with _explained(self._target):
            self.table.refresh()
            return int(self.table.properties.get(self._property, "-1"))

    def add(self, files: Sequence[DataFile], batch: int) -> None:
        """Commit a batch: its files and its number in one transaction."""
        paths = [f"{self._target.uri}/{file.path}" for file in files]

        def append(transaction: Transaction) -> None:
            transaction.set_properties({self._property: str(batch)})
            if paths:
                transaction.add_files(paths, {BATCH: str(batch)}, check_duplicate_files=False)

        self._commit(append)

    def files(self) -> list[str]:
        """Return the paths of all files that count."""
        with _explained(self._target):
            return [_hadoop(task.file.file_path) for task in self.table.scan().plan_files()]

    def columns(self) -> StructType:
        """Return the columns of the table: older files may have a column in a type that is not as wide.

        Raises JobError for a renamed one: files have its former name, by which Spark reads them.
        """
        with _explained(self._target):
            mapping = self.table.name_mapping()
            for former, *others in _names(mapping.root if mapping is not None else []):
                if others:
                    text = f"column {former!r} was renamed to {others[-1]!r}; rename it back"
                    raise JobError(f"{self._target.flag} {self._target.output}: {text}")
            return from_arrow_schema(self.table.schema().as_arrow())

    def groups(self, before: str) -> list[Group]:
        """Return the files of days before a date (ISO 8601)."""
        found: dict[str, list[Any]] = defaultdict(list)
        with _explained(self._target):
            for task in self.table.scan(row_filter=f"date < '{before}'").plan_files():
                found[repr(task.file.partition)].append(task.file)
        return [
            Group(tuple(_hadoop(one.file_path) for one in files), sum(one.file_size_in_bytes for one in files))
            for _, files in sorted(found.items())
        ]

    def replace(self, group: Group, place: Place, directory: str) -> int:
        """Have the files of a directory count in place of a group, at once; return how many there are."""
        gone = set(group.paths)
        own = f"{DATA}/{directory.removeprefix('_')}"
        place.rename(directory, own)
        paths = [f"{self._target.uri}/{own}/{name}" for name, _, _ in parquet_names(place, own)]

        def swap(transaction: Transaction) -> None:
            old = [task.file for task in self.table.scan().plan_files() if _hadoop(task.file.file_path) in gone]
            if len(old) != len(gone):  # their rows would be there twice
                raise JobError(f"--input {self._target.output}: another compaction has replaced files; run it again")
            with transaction.update_snapshot().overwrite() as overwrite:
                for one in old:
                    overwrite.delete_data_file(one)
                metadata = transaction.table_metadata
                for file in parquet_files_to_data_files(self.table.io, metadata, iter(paths)):
                    overwrite.append_data_file(file)

        self._commit(swap)
        return len(paths)

    def _commit(self, change: Callable[[Transaction], None]) -> None:
        with _explained(self._target):
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    with self.table.transaction() as transaction:
                        change(transaction)
                    return
                except (CommitFailedException, ValidationException):
                    # The latter comes of PyIceberg's own attempts, which leave a change as it is.
                    if attempt == ATTEMPTS:
                        raise
                    self.table.refresh()


def _names(fields: Iterable[MappedField]) -> Iterator[list[str]]:
    """Yield the names that each field has had in files, the present one last; also of fields within others."""
    for field in fields:
        yield field.names
        yield from _names(field.fields)


def _stored(kind: DataType) -> DataType:
    return IntegerType() if isinstance(kind, ByteType | ShortType) else kind


def _wider(old: DataType, new: DataType) -> bool:
    if isinstance(old, DecimalType) and isinstance(new, DecimalType):
        return old.scale == new.scale and old.precision < new.precision
    return (type(old), type(new)) in _WIDER


def _hadoop(uri: Any) -> str:
    return str(uri).replace("s3://", "s3a://", 1)
