# SPDX-License-Identifier: Apache-2.0
"""Sparkplug B: payloads that the package protobuf has made, and payloads made by hand from the specification."""

import json
import struct
from datetime import UTC, datetime
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from pyspark_mqtt_nats.decoders import sparkplug
from tests.spark.test_decoders import decode, one


def metric(payload: Any, name: str, kind: str, **value: Any) -> None:
    made = payload.metrics.add(name=name, datatype=sparkplug._TYPES.index(kind))
    for key, item in value.items():
        setattr(made, key, item)


def test_sparkplug() -> None:
    pool = descriptor_pool.DescriptorPool()
    for item in descriptor_pb2.FileDescriptorSet.FromString(sparkplug.descriptors()).file:
        pool.Add(item)
    payload = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{sparkplug.PACKAGE}.Payload"))()
    payload.timestamp, payload.seq = 1_767_312_000_000, 3
    metric(payload, "i8", "Int8", int_value=0xFE)
    metric(payload, "i64", "Int64", long_value=2**64 - 5)
    metric(payload, "u64", "UInt64", long_value=2**64 - 5)
    metric(payload, "x", "Double", double_value=2.5)
    metric(payload, "on", "Boolean", boolean_value=True)
    metric(payload, "none", "Int32", is_null=True)
    metric(payload, "i16s", "Int16Array", bytes_value=struct.pack("<2h", -1, 2))
    metric(payload, "flags", "BooleanArray", bytes_value=struct.pack("<I", 3) + b"\xa0")
    metric(payload, "texts", "StringArray", bytes_value=b"a\0b\0")
    rows = payload.metrics.add(name="rows", datatype=sparkplug._TYPES.index("DataSet")).dataset_value
    rows.columns.extend(["n"])
    rows.types.append(sparkplug._TYPES.index("Int8"))
    rows.rows.add().elements.add(int_value=0xFF)
    template = payload.metrics.add(name="pump", datatype=sparkplug._TYPES.index("Template")).template_value
    template.parameters.add(name="offset", type=sparkplug._TYPES.index("Int32"), int_value=2**32 - 7)
    payload.metrics.add(alias=9, int_value=2**32 - 1)  # as in DATA: its sign is not known
    with_unit = payload.metrics[3].properties
    with_unit.keys.append("unit")
    with_unit.values.add(type=sparkplug._TYPES.index("String"), string_value="C")
    data = payload.SerializeToString()
    found = json.loads(one("sparkplug", data)["json"])
    assert (found["timestamp"], found["seq"]) == (1_767_312_000_000, 3)
    assert found["metrics"].pop() == {"alias": 9, "type": "Unknown", "value": 2**32 - 1}
    assert found["metrics"].pop()["value"]["parameters"] == [{"name": "offset", "type": "Int32", "value": -7}]
    assert {item["name"]: item["value"] for item in found["metrics"]} == {
        "i8": -2,
        "i64": -5,
        "u64": 2**64 - 5,
        "x": 2.5,
        "on": True,
        "none": None,
        "i16s": [-1, 2],
        "flags": [True, False, True],
        "texts": ["a", "b"],
        "rows": [{"n": -1}],
    }
    assert found["metrics"][3]["properties"] == {"unit": "C"}
    typed = {
        "format": "sparkplug",
        "columns": "timestamp TIMESTAMP, metrics ARRAY<STRUCT<name: STRING, value: STRING>>",
    }
    (row,) = decode(typed, data)
    assert row["timestamp"] == datetime(2026, 1, 2, tzinfo=UTC)
    assert row["metrics"][:4] == [
        {"name": "i8", "value": "-2"},
        {"name": "i64", "value": "-5"},
        {"name": "u64", "value": str(2**64 - 5)},
        {"name": "x", "value": "2.5"},
    ]
    metric(payload, "broken", "Int16Array", bytes_value=b"\0")
    assert one("sparkplug", payload.SerializeToString()) == {
        "json": None,
        "decode_error": "sparkplug: 1 bytes are no Int16Array",
    }


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def field(number: int, value: int | bytes) -> bytes:
    """A field of Protobuf as its specification writes it: a varint, or bytes with their length before them."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def test_births_and_data_of_sparkplug_have_typed_columns() -> None:
    """Bytes made by hand, with the numbers of fields and data types of the specification: of no descriptor of ours."""
    time_ms = 1_767_312_000_000
    double, single = b"\x69" + struct.pack("<d", 21.5), b"\x65" + struct.pack("<f", 0.25)  # fields 13 and 12
    stamp = field(3, time_ms)
    birth = field(1, time_ms) + b"".join(
        field(2, body)
        for body in (
            field(1, b"bdSeq") + stamp + field(4, 8) + field(11, 7),
            field(1, b"Temperature") + field(2, 1) + stamp + field(4, 10) + double,
            field(1, b"Load") + field(2, 2) + stamp + field(4, 9) + single,
            field(1, b"Offset") + field(2, 3) + stamp + field(4, 3) + field(10, 2**32 - 40),
            field(1, b"Running") + field(2, 4) + stamp + field(4, 11) + field(14, 1),
            field(1, b"Serial") + stamp + field(4, 12) + field(15, "\u00e4-17".encode()),
            field(1, b"Since") + stamp + field(4, 13) + field(11, time_ms),
            field(1, b"Spare") + stamp + field(4, 10) + field(7, 1),
        )
    )
    birth += field(3, 0)
    data = field(1, time_ms + 500) + field(2, field(2, 1) + stamp + double) + field(2, field(2, 4) + field(14, 0))
    data += field(3, 1)
    text = "metrics ARRAY<STRUCT<name: STRING, alias: BIGINT, timestamp: TIMESTAMP, type: STRING, value: STRING>>"
    typed = {"format": "sparkplug", "columns": f"timestamp TIMESTAMP, seq INT, {text}"}
    born, changed = decode(typed, birth, data)
    at = datetime(2026, 1, 2, tzinfo=UTC)
    assert (born["timestamp"], born["seq"], born["decode_error"]) == (at, 0, None)
    assert [(one["name"], one["alias"], one["type"], one["value"]) for one in born["metrics"]] == [
        ("bdSeq", None, "UInt64", "7"),
        ("Temperature", 1, "Double", "21.5"),
        ("Load", 2, "Float", "0.25"),
        ("Offset", 3, "Int32", "-40"),
        ("Running", 4, "Boolean", "true"),
        ("Serial", None, "String", "\u00e4-17"),
        ("Since", None, "DateTime", str(time_ms)),
        ("Spare", None, "Double", None),
    ]
    assert {one["timestamp"] for one in born["metrics"]} == {at}
    assert (changed["timestamp"], changed["seq"]) == (at.replace(microsecond=500_000), 1)
    assert [(one["name"], one["alias"], one["type"], one["value"]) for one in changed["metrics"]] == [
        (None, 1, "Unknown", "21.5"),
        (None, 4, "Unknown", "false"),
    ]
    numbers = {"format": "sparkplug", "columns": "metrics ARRAY<STRUCT<alias: BIGINT, value: DOUBLE>>"}
    assert one(numbers, field(2, field(2, 1) + double))["metrics"] == [{"alias": 1, "value": 21.5}]
