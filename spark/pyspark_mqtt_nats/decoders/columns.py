# SPDX-License-Identifier: Apache-2.0
"""Payloads of one batch as Arrow columns, by the topic of each message.

The first decoder whose filter matches a topic decides. Columns of other decoders are null, and so is a value that the
payload does not have. `decode_error` says why a payload, or one of its fields, could not be decoded.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from pyspark_mqtt_nats.decoders.conversion import converter, json_of
from pyspark_mqtt_nats.decoders.digits import DigitsLost
from pyspark_mqtt_nats.decoders.formats import exact_json, reader
from pyspark_mqtt_nats.decoders.option import DOCUMENT, ERROR, Decoder, columns
from pyspark_mqtt_nats.topics import matches

NUMBER: Final = r"\A[ \t\r\n]*[+-]?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?[ \t\r\n]*\z"
"""Regular expression of the texts that `number` accepts, in a syntax that both Java and RE2 understand."""

_NONE: Final = -1
"""Place of the decoder for a topic without one."""

_TOPICS_MOST: Final = 1 << 16
_NAMES: Final = {"number": "no finite number", "text": "not UTF-8"}
"""Formats of a single value -> what `decode_error` says."""


class Columns:
    """Makes the columns of decoders, those named in `wanted`."""

    def __init__(self, decoders: tuple[Decoder, ...], wanted: Sequence[str]) -> None:
        self._decoders = decoders
        self._schema = to_arrow_schema(columns(decoders), timezone="UTC")
        self._wanted = tuple(wanted)
        self._place = lru_cache(_TOPICS_MOST)(self._place_of)
        self._documents: dict[int, Callable[[bytes], tuple[list[Any] | None, str | None]]] = {}

    def _place_of(self, topic: str | None) -> int | None:
        if topic is None:
            return None
        return next((place for place, one in enumerate(self._decoders) if matches(one.filter, topic)), None)

    def decode(self, topics: pa.Array, payloads: pa.Array) -> dict[str, pa.Array]:
        """Return the wanted columns of a batch, by name."""
        encoded = topics.dictionary_encode()
        places = pa.array([self._place(topic) for topic in encoded.dictionary.to_pylist()], pa.int32())
        places = pc.fill_null(places.take(encoded.indices), _NONE)
        rows, groups = [], []
        for place in pc.unique(places).to_pylist():
            chosen = pc.equal(places, place)
            rows.append(pc.indices_nonzero(chosen))
            groups.append({} if place == _NONE else self._made(place, payloads.filter(chosen)))
        order = pc.sort_indices(pa.concat_arrays(rows)) if rows else pa.array([], pa.uint64())
        found = {}
        for name in self._wanted:
            kind = self._schema.field(name).type
            parts = [
                group[name] if name in group else pa.nulls(len(numbers), kind)
                for numbers, group in zip(rows, groups, strict=True)
            ]
            found[name] = pa.concat_arrays(parts).take(order) if parts else pa.nulls(0, kind)
        return found

    def _made(self, place: int, payloads: pa.Array) -> dict[str, pa.Array]:
        """Return the columns of one decoder for its payloads."""
        decoder = self._decoders[place]
        if isinstance(decoder.format, str):
            texts = _texts(payloads)
            column = _numbers(texts) if decoder.format == "number" else texts
            wrong = pc.and_(pc.is_null(column), pc.is_valid(payloads))
            return {decoder.format: column, ERROR: pc.if_else(wrong, pa.scalar(_NAMES[decoder.format]), None)}
        if place not in self._documents:
            self._documents[place] = _document(decoder)
        rows, errors = [], []
        for payload in payloads.to_pylist():
            row, error = (None, None) if payload is None else self._documents[place](payload)
            rows.append(row)
            errors.append(error)
        found = {ERROR: pa.array(errors, pa.string())}
        for index, name in enumerate(decoder.fields.names):
            if name in self._wanted:
                values = [None if row is None else row[index] for row in rows]
                found[name] = pa.array(values, self._schema.field(name).type)
        return found


def _document(decoder: Decoder) -> Callable[[bytes], tuple[list[Any] | None, str | None]]:
    """Return a function from a payload to the values of the decoder's columns, None for none, and what is wrong."""
    assert not isinstance(decoder.format, str)
    read, name = reader(decoder.format), decoder.name
    if decoder.columns is None:
        # The text of a JSON document stays as it came.
        to_text = (lambda payload, _: payload.decode()) if name == DOCUMENT else (lambda _, value: json_of(value))

        def whole(payload: bytes) -> tuple[list[Any] | None, str | None]:
            try:
                return [to_text(payload, read(payload))], None
            except ValueError as error:
                return None, f"{name}: {error}"

        return whole
    take, take_exact = _taker(decoder.columns, name, name == "json"), _taker(decoder.columns, name)

    def fields(payload: bytes) -> tuple[list[Any] | None, str | None]:
        try:
            try:
                return take(read(payload))
            except DigitsLost:
                return take_exact(exact_json(payload))
        except ValueError as error:
            return None, f"{name}: {error}"

    return fields


def _taker(wanted: StructType, name: str, doubles: bool = False) -> Callable[[Any], tuple[list[Any], str | None]]:
    """Return a function from a document to the values of its fields, and the names of those that do not fit.

    `doubles`: numbers of the document may have lost digits; the function raises DigitsLost where a column needs them.
    """
    convert = [(field.name, converter(field.dataType, name == "csv", doubles)) for field in wanted.fields]

    def take(document: Any) -> tuple[list[Any], str | None]:
        if name == "csv":
            if len(document) != len(convert):
                raise ValueError(f"{len(document)} fields, and {len(convert)} columns")
            document = dict(zip(wanted.names, document, strict=True))
        if not isinstance(document, dict):
            raise ValueError("expected an object with fields")
        row: list[Any] = []
        error = None
        for field, to_type in convert:
            try:
                row.append(to_type(document.get(field)))
            except ValueError as wrong:
                row.append(None)
                error = error or f"{name}: {field}: {wrong}"
        return row, error

    return take


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
    """Return texts as DOUBLE; null for what is no decimal number, or too large for DOUBLE."""
    numbers = pc.if_else(pc.match_substring_regex(texts, NUMBER), texts, None)
    try:
        found = numbers.cast(pa.float64())
    except pa.ArrowInvalid:  # Arrow does not parse some forms, such as +5
        found = pa.array([None if number is None else float(number) for number in numbers.to_pylist()], pa.float64())
    return pc.if_else(pc.is_finite(found), found, None)
