# SPDX-License-Identifier: Apache-2.0
"""Decoders: each format with documents that other libraries have made, what is wrong with a payload, and the option."""

import base64
import importlib.util
import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import cbor2
import msgpack
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from hypothesis import given
from hypothesis import strategies as st

from pyspark_mqtt_nats.decoders.columns import Columns
from pyspark_mqtt_nats.decoders.formats import Format, reader
from pyspark_mqtt_nats.decoders.option import columns, parse_decoders
from pyspark_mqtt_nats.decoders.types import columns_of
from pyspark_mqtt_nats.errors import OptionError
from pyspark_mqtt_nats.options import Options

FIELD = descriptor_pb2.FieldDescriptorProto
AVRO = {
    "type": "record",
    "name": "Report",
    "fields": [{"name": "celsius", "type": "double"}, {"name": "tags", "type": {"type": "array", "items": "string"}}],
}


def decode(decoder: Any, *payloads: bytes | None, topic: str = "a") -> list[dict[str, Any]]:
    """The columns that a decoder makes of payloads."""
    made = parse_decoders({"a": decoder})
    names = columns(made).names
    found = Columns(made, names).decode(pa.array([topic] * len(payloads)), pa.array(payloads, pa.binary()))
    assert list(found) == names
    rows: list[dict[str, Any]] = pa.table(found).to_pylist()
    return rows


def one(decoder: Any, payload: bytes) -> dict[str, Any]:
    (row,) = decode(decoder, payload)
    return row


def right(value: Any) -> dict[str, Any]:
    return {"json": value, "decode_error": None}


# -- formats ----------------------------------------------------------------------------------


def test_cbor() -> None:
    document = {
        "celsius": 21.5,
        "raw": b"\x01",
        "at": datetime(2026, 1, 2, tzinfo=UTC),
        5: None,
        "list": [1, {"x": True}],
    }
    found = one("cbor", cbor2.dumps(document))
    assert found["decode_error"] is None
    assert json.loads(found["json"]) == {
        "celsius": 21.5,
        "raw": "AQ==",
        "at": "2026-01-02T00:00:00Z",
        "5": None,
        "list": [1, {"x": True}],
    }
    assert one("cbor", cbor2.dumps("text"))["json"] == '"text"'
    typed = {"format": "cbor", "columns": "celsius DOUBLE, raw BINARY, at TIMESTAMP, none INT"}
    assert one(typed, cbor2.dumps(document)) == {
        "celsius": 21.5,
        "raw": b"\x01",
        "at": datetime(2026, 1, 2, tzinfo=UTC),
        "none": None,
        "decode_error": None,
    }


def test_msgpack() -> None:
    packed = msgpack.packb({"n": 2**63, "text": "x", "raw": b"\xff"})
    assert one("msgpack", packed) == right('{"n":9223372036854775808,"text":"x","raw":"/w=="}')
    assert one({"format": "msgpack", "columns": "n BIGINT, text STRING"}, packed) == {
        "n": None,
        "text": "x",
        "decode_error": "msgpack: n: expected BIGINT",
    }


def test_csv() -> None:
    typed = {"format": "csv", "columns": "name STRING, n INT, x DOUBLE, on BOOLEAN, at TIMESTAMP, money DECIMAL(6, 2)"}
    assert one(typed, b'"a,b",7,2.5,TRUE,2026-01-02T03:04:05+01:00,12.345\r\n') == {
        "name": "a,b",
        "n": 7,
        "x": 2.5,
        "on": True,
        "at": datetime(2026, 1, 2, 2, 4, 5, tzinfo=UTC),
        "money": Decimal("12.35"),
        "decode_error": None,
    }
    empty = one(typed, b",,,,,")
    assert (empty.pop("name"), set(empty.values())) == ("", {None})
    assert one(typed, b"a,b")["decode_error"] == "csv: 2 fields, and 6 columns"
    assert one(typed, b"a,x,1e999,maybe,1,1")["decode_error"] == "csv: n: expected INT"
    assert one({"format": "csv", "delimiter": ";"}, b"1;x") == right('["1","x"]')
    assert one("csv", b"1\n2")["decode_error"] == "csv: expected one line, not 2"


def descriptors() -> bytes:
    """`plant.Report` of proto3, with an import."""
    found = descriptor_pb2.FileDescriptorSet()
    found.file.add().ParseFromString(timestamp_pb2.DESCRIPTOR.serialized_pb)
    file = found.file.add(name="plant.proto", package="plant", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    kind = file.enum_type.add(name="State")
    kind.value.add(name="OFF", number=0)
    kind.value.add(name="ON", number=1)
    report = file.message_type.add(name="Report")
    entry = report.nested_type.add(name="LimitsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=FIELD.TYPE_STRING, label=FIELD.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=FIELD.TYPE_DOUBLE, label=FIELD.LABEL_OPTIONAL)
    fields = (
        ("rpm", FIELD.TYPE_INT64, FIELD.LABEL_OPTIONAL, ""),
        ("state", FIELD.TYPE_ENUM, FIELD.LABEL_OPTIONAL, ".plant.State"),
        ("at", FIELD.TYPE_MESSAGE, FIELD.LABEL_OPTIONAL, ".google.protobuf.Timestamp"),
        ("limits", FIELD.TYPE_MESSAGE, FIELD.LABEL_REPEATED, ".plant.Report.LimitsEntry"),
        ("raw", FIELD.TYPE_BYTES, FIELD.LABEL_REPEATED, ""),
        ("next", FIELD.TYPE_MESSAGE, FIELD.LABEL_OPTIONAL, ".plant.Report"),
    )
    for number, (name, kind_of, label, named) in enumerate(fields, 1):
        field = report.field.add(name=name, number=number, type=kind_of, label=label)
        if named:
            field.type_name = named
    data: bytes = found.SerializeToString()
    return data


def test_protobuf(tmp_path: Path) -> None:
    file = tmp_path / "plant.desc"
    file.write_bytes(descriptors())
    pool = descriptor_pool.DescriptorPool()
    for item in descriptor_pb2.FileDescriptorSet.FromString(descriptors()).file:
        pool.Add(item)
    report = message_factory.GetMessageClass(pool.FindMessageTypeByName("plant.Report"))()
    report.rpm, report.state = -5, 1
    report.at.FromDatetime(datetime(2026, 1, 2, tzinfo=UTC))
    report.limits["low"] = 1.5
    report.raw.append(b"\xff")
    report.next.rpm = 2**62
    chosen = {"format": "protobuf", "descriptors": str(file), "message": "plant.Report"}
    typed = chosen | {
        "columns": "rpm BIGINT, state STRING, at TIMESTAMP, limits MAP<STRING, DOUBLE>, raw ARRAY<BINARY>, "
        "next STRUCT<rpm: BIGINT, state: STRING, at: TIMESTAMP>"
    }
    assert one(typed, report.SerializeToString()) == {
        "rpm": -5,
        "state": "ON",
        "at": datetime(2026, 1, 2, tzinfo=UTC),
        "limits": [("low", 1.5)],
        "raw": [b"\xff"],
        "next": {"rpm": 2**62, "state": "OFF", "at": None},
        "decode_error": None,
    }
    assert one(typed, b"")["rpm"] == 0  # proto3: what is not there has its default
    assert json.loads(one(chosen, report.SerializeToString())["json"])["limits"] == {"low": 1.5}
    assert one(chosen, b"\xff\xff")["json"] is None


EVERY: dict[str, Any] = {
    "json": "json",
    "cbor": "cbor",
    "msgpack": "msgpack",
    "csv": "csv",
    "sparkplug": "sparkplug",
    "avro": {"format": "avro", "schema": json.dumps(AVRO)},
}


@given(st.sampled_from(sorted(EVERY)), st.binary(max_size=200))
def test_whatever_a_stranger_has_published_is_a_value_or_an_error(name: str, payload: bytes) -> None:
    (row,) = decode(EVERY[name], payload)
    assert (row["json"] is None) == (row["decode_error"] is not None)
    if row["json"] is not None:
        json.loads(row["json"])
    else:
        assert row["decode_error"].startswith(f"{name}: ")
        assert len(row["decode_error"]) < 200


def test_depth_is_an_error() -> None:
    for name, payload in (("json", b"[" * 100_000), ("cbor", b"\x81" * 100_000), ("msgpack", b"\x91" * 100_000)):
        assert one(name, payload)["decode_error"].startswith(f"{name}: ")


# -- columns ----------------------------------------------------------------------------------


def test_a_field_that_does_not_fit_is_null_and_the_others_are_not() -> None:
    typed = "n INT, x DOUBLE, s STRING, d DATE, b BOOLEAN, m MAP<STRING, INT>"
    good = b'{"n": 5.0, "x": 1, "s": {"a": 1}, "d": "2026-01-02", "b": true, "m": {"k": 1}, "more": 1}'
    assert one(typed, good) == {
        "n": 5,
        "x": 1.0,
        "s": '{"a":1}',
        "d": date(2026, 1, 2),
        "b": True,
        "m": [("k", 1)],
        "decode_error": None,
    }
    for payload, field in (
        (b'{"n": 5.5, "x": 1}', "n: expected INT"),
        (b'{"n": true, "x": 1}', "n: expected INT"),
        (b'{"n": 2147483648, "x": 1}', "n: expected INT"),
        (b'{"x": "1"}', "x: expected DOUBLE"),
        (b'{"x": 1, "d": "soon"}', "d: expected DATE"),
        (b'{"x": 1, "b": 1}', "b: expected BOOLEAN"),
        (b'{"x": 1, "m": {"k": "v"}}', "m: expected MAP<STRING,INT>"),
    ):
        row = one(typed, payload)
        assert row["decode_error"] == f"json: {field}"
        assert row[field[0]] is None
        assert field[0] == "x" or row["x"] == 1.0
    assert one(typed, b"[1]")["decode_error"] == "json: expected an object with fields"


def test_times() -> None:
    for value, moment in (
        ("1767312000", datetime(2026, 1, 2, tzinfo=UTC)),
        ("1767312000000", datetime(2026, 1, 2, tzinfo=UTC)),
        ('"2026-01-02"', datetime(2026, 1, 2, tzinfo=UTC)),
        ('"2026-01-02T01:00:00+01:00"', datetime(2026, 1, 2, tzinfo=UTC)),
        ("true", None),
        ("1e20", None),
    ):
        assert one("at TIMESTAMP", b'{"at": %b}' % value.encode())["at"] == moment


def test_no_payload_and_no_decoder() -> None:
    assert decode("json", None) == [right(None)]
    assert decode("number", b"x", topic="other") == [{"number": None, "decode_error": None}]
    assert decode("number") == []


@pytest.mark.parametrize(
    ("text", "simple"),
    [
        ("a INT", "struct<a:int>"),
        ("`a b` bigint, C string", "struct<a b:bigint,C:string>"),
        ("d DECIMAL(10, 2), e Decimal, f DECIMAL(5)", "struct<d:decimal(10,2),e:decimal(10,0),f:decimal(5,0)>"),
        ("s STRUCT<a: INT, b ARRAY<MAP<STRING, DATE>>>", "struct<s:struct<a:int,b:array<map<string,date>>>>"),
    ],
)
def test_types(text: str, simple: str) -> None:
    assert columns_of(text).simpleString() == simple


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the name of a column"),
        ("a", "there is no type"),
        ("a INT,", "expected the name of a column"),
        ("a INT b INT", "expected 'the end', not 'b'"),
        ("a INT, A INT", "'A' is there twice"),
        ("a ARRAY<INT", "expected '>'"),
        ("a MAP<INT, INT>", "keys of type STRING"),
        ("a DECIMAL(39)", "at most 38 digits"),
        ("a DECIMAL(x)", "such as DECIMAL"),
        ("a VARIANT", "there is no type 'VARIANT'"),
        ("a " + "ARRAY<" * 50, "too deeply"),
        ("a INT; DROP", "unexpected ';"),
    ],
)
def test_types_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        columns_of(text)


# -- the option -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ("xml", "'a' has the format 'xml': expected number, text, json, cbor"),
        ({"format": "xml"}, "'a' has the format 'xml'"),
        (5, "'a': expected number"),
        ({"format": "number", "columns": "a INT"}, "the format number has no 'columns'; it has nothing to set"),
        ({"format": "cbor", "schema": "x"}, "the format cbor has no 'schema'; it has columns"),
        ({"format": "avro"}, "the format avro needs 'schema' or 'registry'"),
        ({"format": "avro", "schema": "{}"}, "'a': the schema is not one of Avro"),
        ({"format": "avro", "schema": "{"}, "the schema is not JSON"),
        ({"format": "avro", "registry": "ftp://x"}, "expected the URL of a schema registry"),
        ({"format": "avro", "schema": '"int"', "registry": "http://x"}, "exclude each other"),
        ({"format": "protobuf", "descriptors": "/nowhere"}, "the format protobuf needs 'message'"),
        ({"format": "protobuf", "descriptors": "/nowhere", "message": "x"}, "'/nowhere' cannot be read"),
        ({"format": "csv", "delimiter": "ab"}, "a delimiter of one character"),
        ("a SMALL", "'a': there is no type 'SMALL'"),
        ("decode_error STRING", "'decode_error' says what is wrong"),
        ({}, "'a': the object has no 'format': expected number"),
    ],
)
def test_decoders_that_are_none(decoder: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        Options.parse({"decoders": json.dumps({"a": decoder})})
    assert "\n" not in str(caught.value)


def test_a_filter_that_is_there_twice() -> None:
    """JSON would keep the last one, without a word."""
    with pytest.raises(OptionError, match="'a' is there twice"):
        Options.parse({"decoders": '{"a": "number", "b": "text", "a": "text"}'})


def test_a_message_that_the_descriptors_do_not_have(tmp_path: Path) -> None:
    file = tmp_path / "plant.desc"
    for data, message in ((descriptors(), "have no message 'plant.Other'"), (b"\xff", "not a FileDescriptorSet")):
        file.write_bytes(data)
        chosen = {"format": "protobuf", "descriptors": str(file), "message": "plant.Other"}
        with pytest.raises(OptionError, match=message):
            Options.parse({"decoders": json.dumps({"a": chosen})})


def test_a_password_of_a_registry_is_not_shown() -> None:
    given = json.dumps({"a": {"format": "avro", "registry": "http://u:secret@h", "schema": "x"}})
    with pytest.raises(OptionError) as caught:
        Options.parse({"decoders": given})
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(
        Options.parse({"decoders": '{"a": {"format": "avro", "registry": "http://u:secret@h"}}'})
    )


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("avro", "fastavro"),
        ("cbor", "cbor2"),
        ("msgpack", "msgpack"),
        ("protobuf", "protobuf"),
        ("sparkplug", "protobuf"),
    ],
)
def test_a_package_that_is_missing_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module: None if module in ("google.protobuf", package) else found(module)
    )
    decoder: dict[str, str] = {"format": name}
    if name == "avro":
        decoder["schema"] = '"int"'
    if name == "protobuf":
        decoder |= {"descriptors": "x", "message": "x"}
    extra = "protobuf" if name == "sparkplug" else name
    message = rf"needs the package {package}: pip install 'mqtt-nats\[{extra}\]'"
    with pytest.raises(OptionError, match=message):
        Options.parse({"decoders": json.dumps({"a": decoder})})
    with pytest.raises(ValueError, match=message):
        reader.__wrapped__(Format(name))  # on an executor


def test_base64_of_a_binary_column() -> None:
    text = base64.b64encode(b"\xff").decode()
    assert one("b BINARY", json.dumps({"b": text}).encode())["b"] == b"\xff"
    assert one("b BINARY", b'{"b": "?"}')["decode_error"] == "json: b: expected BINARY"
