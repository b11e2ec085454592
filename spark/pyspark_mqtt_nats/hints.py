# SPDX-License-Identifier: Apache-2.0
"""The option `decoders`: the source itself decodes payloads into columns, in Arrow.

`decoding.py` describes the columns, and makes the same columns with Spark's own functions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import DataType, DoubleType, StringType, StructField, StructType

from pyspark_mqtt_nats import schema
from pyspark_mqtt_nats.errors import OptionError
from pyspark_mqtt_nats.topics import matches

OPTION: Final = "decoders"

KINDS: Final[Mapping[str, DataType]] = {"number": DoubleType(), "text": StringType(), "json": StringType()}
"""Kind -> type of its column; the column has the name of the kind."""

NUMBER: Final = r"\A[ \t\r\n]*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?[ \t\r\n]*\z"
"""Regular expression of the texts that `number` accepts, in a syntax that both Java and RE2 understand."""

Hints = tuple[tuple[str, str], ...]
"""Pairs (topic filter, kind) in order: the first filter that matches a topic decides."""

_ARROW: Final = {"number": pa.float64(), "text": pa.string(), "json": pa.string()}
_TOPICS_MOST: Final = 1 << 16
_NEEDED: Final = ("topic", "payload")


def spark_schema(hints: Hints, include_headers: bool) -> StructType:
    """Return the schema of the source when the user gives none; raises OptionError for an unknown kind."""
    fields = schema.spark_schema(include_headers).fields
    return StructType(fields + [StructField(kind, KINDS[kind]) for kind in _kinds(hints)])


def _kinds(hints: Hints) -> list[str]:
    for item, kind in hints:
        if kind not in KINDS:
            expected = f"expected {', '.join(KINDS)}; pyspark_mqtt_nats.decoding.decode takes a schema"
            raise OptionError(f"{OPTION}: {item!r} has the kind {kind[:80]!r}: {expected}", OPTION)
    return list(dict.fromkeys(kind for _, kind in hints))


@dataclass(frozen=True)
class Projection:
    """Columns of a read: `names` in order, made from the columns `stored`, which are read from the stream."""

    names: tuple[str, ...]
    stored: tuple[str, ...]
    hints: Hints

    @classmethod
    def of(cls, wanted: StructType, hints: Hints) -> Self:
        """Return the projection for a schema; raises an OptionError that names the column."""
        kinds = _kinds(hints)
        own = StructType([field for field in wanted.fields if field.name not in kinds])
        made = [field for field in wanted.fields if field.name in kinds]
        for field in made:
            if field.dataType != KINDS[field.name] or not field.nullable:
                needed = KINDS[field.name].simpleString().upper()
                raise OptionError(f"column {field.name!r} of the schema must be {needed}, and nullable", "schema")
        names = tuple(field.name for field in wanted.fields)
        if len(set(names)) < len(names):
            raise OptionError("the schema has a column twice", "schema")
        stored = schema.select(own) if own.fields or not made else []
        if made:
            stored += [name for name in _NEEDED if name not in stored]
        return cls(names, tuple(stored), hints if made else ())

    def apply(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Convert batches of the stored columns to batches of the requested columns."""
        if not self.hints:
            return batches
        return self._decoded(batches)

    def _decoded(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        @lru_cache(_TOPICS_MOST)
        def kind_of(topic: str | None) -> str | None:
            return next((kind for item, kind in self.hints if topic is not None and matches(item, topic)), None)

        for batch in batches:
            topics = batch.column("topic").dictionary_encode()
            kinds = pa.array([kind_of(topic) for topic in topics.dictionary.to_pylist()], pa.string())
            made = _columns(kinds.take(topics.indices), batch.column("payload"))
            arrays = [made[name] if name in made else batch.column(name) for name in self.names]
            yield pa.RecordBatch.from_arrays(arrays, names=list(self.names))


def _columns(kinds: pa.Array, payloads: pa.Array) -> dict[str, pa.Array]:
    """Return the column of each kind; null where the row has another kind or its payload cannot be decoded."""
    found: dict[str, pa.Array] = {}
    for kind, arrow in _ARROW.items():
        chosen = pc.fill_null(pc.equal(kinds, kind), False)
        if not pc.any(chosen).as_py():
            found[kind] = pa.nulls(len(kinds), arrow)
            continue
        texts = _texts(payloads if pc.all(chosen).as_py() else pc.if_else(chosen, payloads, None))
        if kind == "number":
            found[kind] = _numbers(texts)
        elif kind == "json":
            found[kind] = pc.if_else(pa.array(map(_is_json, texts.to_pylist()), pa.bool_()), texts, None)
        else:
            found[kind] = texts
    return found


def _texts(payloads: pa.Array) -> pa.Array:
    try:
        return payloads.cast(pa.string())
    except pa.ArrowInvalid:  # some payloads are not UTF-8
        return pa.array(map(_text, payloads.to_pylist()), pa.string())


def _text(payload: bytes | None) -> str | None:
    try:
        return None if payload is None else payload.decode()
    except UnicodeDecodeError:
        return None


def _numbers(texts: pa.Array) -> pa.Array:
    numbers = pc.if_else(pc.match_substring_regex(texts, NUMBER), texts, None)
    try:
        return numbers.cast(pa.float64())
    except pa.ArrowInvalid:  # Arrow does not parse some forms, such as +5
        return pa.array([None if number is None else float(number) for number in numbers.to_pylist()], pa.float64())


def _is_json(text: str | None) -> bool:
    try:
        orjson.loads(text or "")
    except orjson.JSONDecodeError:
        return False
    return True
