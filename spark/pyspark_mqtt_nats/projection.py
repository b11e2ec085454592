# SPDX-License-Identifier: Apache-2.0
"""The columns of a read: which ones a schema asks for, and which stored columns they are made from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StructType

from pyspark_mqtt_nats import schema
from pyspark_mqtt_nats.decoders.columns import Columns
from pyspark_mqtt_nats.decoders.option import Decoder, columns
from pyspark_mqtt_nats.errors import OptionError

_NEEDED: Final = ("topic", "payload")
_CASE_SENSITIVE: Final = "spark.sql.caseSensitive"


def spark_schema(
    decoders: tuple[Decoder, ...] = (), include_headers: bool = False, own: Mapping[str, schema.Column] = schema.COLUMNS
) -> StructType:
    """Return the schema of the source when the user gives none.

    Raises OptionError for a decoder whose column the source has already.
    """
    found = schema.spark_schema(include_headers, own)
    there = {name.lower() for name in own}
    for field in columns(decoders).fields:
        if field.name.lower() in there:
            text = f"decoders: {field.name!r} is a column of every message already: choose another name"
            raise OptionError(text, "decoders")
        found.add(field)
    return found


@dataclass(frozen=True)
class Projection:
    """Columns of a read.

    `names`: as the schema has them. `columns`: the same columns as the source calls them. `stored`: those that are read
    from the stream.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    stored: tuple[str, ...]
    decoders: tuple[Decoder, ...] = ()

    @classmethod
    def of(
        cls,
        wanted: StructType,
        decoders: tuple[Decoder, ...] = (),
        own: Mapping[str, schema.Column] = schema.COLUMNS,
    ) -> Self:
        """Return the projection for a schema; raises an OptionError that names the column."""
        spark_schema(decoders, own=own)  # a decoder's column must not be one of the source
        made = {field.name.lower(): field for field in columns(decoders).fields}
        stored: list[str] = []
        names: list[str] = []
        decoded = False
        for field in wanted.fields:
            column = made.get(field.name.lower())
            if column is None:
                name = schema.select(field, own)
                stored.append(name)
            else:
                if field.dataType != column.dataType or not field.nullable:
                    needed = column.dataType.simpleString().upper()
                    raise OptionError(f"column {field.name!r} of the schema must be {needed}, and nullable", "schema")
                name, decoded = column.name, True
            if name in names:
                raise OptionError(f"the schema has the column {field.name!r} twice", "schema")
            names.append(name)
        if not names:
            raise OptionError("the schema has no columns; give one of " + ", ".join(own), "schema")
        if decoded:
            stored += [name for name in _NEEDED if name not in stored]
        return cls(tuple(wanted.names), tuple(names), tuple(stored), decoders if decoded else ())

    def apply(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Convert batches of the stored columns to batches of the requested columns.

        Raises OptionError where Spark tells names of columns apart by capitals and small letters, and the schema has
        other ones than the source.
        """
        if self.names == self.columns == self.stored:
            yield from batches
            return
        self._check_case()
        made = [name for name in self.columns if name not in self.stored]
        decoding = Columns(self.decoders, made) if made else None
        for batch in batches:
            found = {} if decoding is None else decoding.decode(batch.column("topic"), batch.column("payload"))
            arrays = [found[name] if name in found else batch.column(name) for name in self.columns]
            yield pa.RecordBatch.from_arrays(arrays, names=list(self.names))

    def _check_case(self) -> None:
        context = TaskContext.get()
        if context is None or (context.getLocalProperty(_CASE_SENSITIVE) or "").lower() != "true":
            return
        for name, column in zip(self.names, self.columns, strict=True):
            if name != column:
                text = f"column {name!r} of the schema is {column!r} here, and {_CASE_SENSITIVE} is true"
                raise OptionError(text, "schema")
