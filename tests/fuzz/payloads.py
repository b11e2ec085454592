# SPDX-License-Identifier: Apache-2.0
"""Mutated payloads, as the decoders of Spark read them."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, Final

import cbor2
import msgpack
import pyarrow as pa

import pyspark_mqtt_nats.decoders.columns
import pyspark_mqtt_nats.decoders.conversion
import pyspark_mqtt_nats.decoders.digits
import pyspark_mqtt_nats.decoders.formats
import pyspark_mqtt_nats.decoders.sparkplug
from pyspark_mqtt_nats.decoders.columns import Columns
from pyspark_mqtt_nats.decoders.option import columns, parse_decoders
from tests.fuzz.engine import Input, Target, Unexpected, expect

_AVRO: Final = json.dumps(
    {
        "type": "record",
        "name": "R",
        "fields": [{"name": "x", "type": "double"}, {"name": "s", "type": ["null", "string"]}],
    }
)
_DIGITS: Final = "x DECIMAL(20, 2), s STRING, at TIMESTAMP, tags STRING, m MAP<STRING, BIGINT>"
_FIELDS: Final = "x DOUBLE, s STRING, at TIMESTAMP, tags ARRAY<STRING>, m MAP<STRING, BIGINT>"
DECODERS: Final[tuple[Any, ...]] = (
    *("number", "text", "json", "cbor", "msgpack", "sparkplug", "csv", _FIELDS),
    {"format": "avro", "schema": _AVRO},
    {"format": "cbor", "columns": _FIELDS},
    {"format": "msgpack", "columns": _FIELDS},
    {"format": "json", "columns": _DIGITS},
    {"format": "cbor", "columns": _DIGITS},
    {"format": "sparkplug", "columns": "seq BIGINT, metrics ARRAY<STRUCT<name: STRING, value: STRING>>"},
)
"""A variant each."""


def _maker(decoder: Any) -> Columns:
    made = parse_decoders({"#": decoder})
    return Columns(made, columns(made).names)


_COLUMNS: Final = tuple(map(_maker, DECODERS))


def seeds() -> list[Input]:
    """Payloads of each format."""
    document = {"x": 2.5, "s": "t", "at": "2026-01-02", "tags": ["a"], "m": {"k": 1}}
    sparkplug = b"\x08\x80\x01\x12\x0b\x0a\x02i8\x20\x01\x50\xfe\x01"
    sparkplug += b"\x12\x0b\x0a\x02is\x20\x17\x82\x01\x02\xff\xff\x18\x03"
    long = {"x": Decimal("123456789012345678.99"), "s": 2**70, "tags": [2**70], "m": {"k": cbor2.CBORTag(5, [-1, 3])}}
    text = b'{"x": 123456789012345678.99, "s": 1e999, "tags": [0.1], "m": {"k": 9007199254740993.0}}'
    payloads = [b"20.5", b"1e999", json.dumps(document).encode(), cbor2.dumps(document), msgpack.packb(document)]
    payloads += [text, cbor2.dumps(long)]
    avro = b"\0\0\0\0\0\0\x04\x40\x02\x04hi"
    return [(variant, one) for variant in range(len(DECODERS)) for one in (*payloads, sparkplug, avro, b'a,"b"')]


def check(one: Input, number: int) -> tuple[int, bool]:
    """Any payload gives values that Arrow accepts, or null and one line with the reason; nothing is an error.

    A document is JSON. A number is finite. The line names the format, and has at most 200 characters.
    """
    variant, data = one
    try:
        found = _COLUMNS[variant].decode(pa.array(["t"]), pa.array([data], pa.binary()))
    except Exception as error:
        raise Unexpected(f"{type(error).__name__}: {error}") from error
    row = {name: column.to_pylist()[0] for name, column in found.items()}
    reason = row.pop("decode_error")
    expect(reason is not None or not {"json", "number", "text"} & {k for k, v in row.items() if v is None}, "no reason")
    if reason is not None:
        expect(len(reason) <= 200 and "\n" not in reason, f"the reason {reason!r}")
    if isinstance(row.get("json"), str):
        _read(row["json"])
    if row.get("number") is not None:
        expect(abs(row["number"]) != float("inf"), "an infinite number")
    return len(row), reason is not None


def _read(text: str) -> None:
    try:
        json.loads(text, parse_int=float, parse_constant=_no_number)  # int() refuses 4,301 digits
    except (ValueError, RecursionError) as error:
        raise Unexpected(f"{type(error).__name__} for the document {text[:100]!r}") from error


def _no_number(text: str) -> None:
    raise Unexpected(f"{text} is in the document")


TARGET: Final = Target(
    "spark-payloads",
    (
        pyspark_mqtt_nats.decoders.columns,
        pyspark_mqtt_nats.decoders.conversion,
        pyspark_mqtt_nats.decoders.digits,
        pyspark_mqtt_nats.decoders.formats,
        pyspark_mqtt_nats.decoders.sparkplug,
    ),
    seeds,
    check,
    variants=len(DECODERS),
    followed=10,
)
