# SPDX-License-Identifier: Apache-2.0
"""The columns that can be written, and the rows of record batches."""

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple, NoReturn

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    CharType,
    DataType,
    IntegralType,
    StringType,
    StructType,
    VarcharType,
)

from pyspark_mqtt_nats.errors import OptionError
from pyspark_mqtt_nats.publishing.encoding import Refused


class Column(NamedTuple):
    """A column that can be written; `types` in words, `fits` tells whether a type is one of them."""

    name: str
    types: str
    fits: Callable[[DataType], bool]


def _text(kind: DataType) -> bool:
    return isinstance(kind, (StringType, CharType, VarcharType))


def _bytes(kind: DataType) -> bool:
    return isinstance(kind, BinaryType) or _text(kind)


def _whole(kind: DataType) -> bool:
    return isinstance(kind, IntegralType)


def _flag(kind: DataType) -> bool:
    return isinstance(kind, BooleanType)


def _pairs(kind: DataType) -> bool:
    if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StructType):
        return False
    fields = kind.elementType.fields
    return [field.name for field in fields] == ["key", "value"] and all(_text(field.dataType) for field in fields)


COLUMNS: Final[dict[str, Column]] = {
    column.name: column
    for column in (
        Column("topic", "STRING", _text),
        Column("payload", "BINARY or STRING", _bytes),
        Column("qos", "INT", _whole),
        Column("retain", "BOOLEAN", _flag),
        Column("content_type", "STRING", _text),
        Column("payload_format", "INT", _whole),
        Column("response_topic", "STRING", _text),
        Column("correlation_data", "BINARY or STRING", _bytes),
        Column("message_expiry", "BIGINT", _whole),
        Column("user_properties", "ARRAY<STRUCT<key: STRING, value: STRING>>", _pairs),
    )
}

SOURCE_ONLY: Final = ("sequence", "timestamp", "topic_levels", "subject", "publisher", "message_id", "headers")
"""Columns of the source that mean nothing here: whoever writes what was read has to drop them."""


def check(schema: StructType, has_topic: bool) -> tuple[str, ...]:
    """Our names of the columns of a DataFrame, in its order; `has_topic` when there is a topic for rows without one.

    Raises OptionError that names the column: unknown, twice, of another type, or missing.
    """
    names: list[str] = []
    for field in schema.fields:
        name = field.name.lower()
        column = COLUMNS.get(name)
        if column is None:
            if name in SOURCE_ONLY:
                hint = f'it is given by the store: .drop("{field.name}")'
            else:
                near = get_close_matches(name, COLUMNS, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"drop it; there are {', '.join(COLUMNS)}"
            raise OptionError(f"column {field.name!r} cannot be written: {hint}")
        if name in names:
            raise OptionError(f"column {field.name!r} is repeated")
        if not column.fits(field.dataType):
            has = field.dataType.simpleString().upper()
            raise OptionError(f"column {field.name!r} is {has}; it must be {column.types}: cast it")
        names.append(name)
    if "payload" not in names:
        raise OptionError("there is no column 'payload' (BINARY or STRING): name the column with the payload")
    if "topic" not in names and not has_topic:
        raise OptionError("there is neither a column 'topic' nor the option topic", "topic")
    return tuple(names)


def rows(batch: pa.RecordBatch, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """The rows of a batch whose columns are called `names`, as values in the order of COLUMNS; None for no value.

    Raises Refused in the place of the first row with text that is not UTF-8, as Spark's STRING need not be. Where bytes
    are allowed it is bytes.
    """
    found: dict[str, list[Any]] = {}
    count, bad = batch.num_rows, ""
    for index, name in enumerate(names):
        array = batch.column(index).slice(0, count)
        if COLUMNS[name].fits(BinaryType()):
            array = array.cast(pa.binary())
        try:
            found[name] = array.to_pylist()
        except UnicodeDecodeError:
            found[name] = _readable(array)
            count, bad = len(found[name]), name
    missing = [None] * count
    values = zip(*(found.get(name, missing) for name in COLUMNS), strict=not bad)
    return chain(values, iter(partial(_refuse, bad), None)) if bad else values


def _readable(array: pa.Array) -> list[Any]:
    """The values before the first that is not UTF-8."""
    values = []
    for value in array:
        try:
            values.append(value.as_py())
        except UnicodeDecodeError:
            break
    return values


def _refuse(column: str) -> NoReturn:
    raise Refused(column, "it is not UTF-8")
