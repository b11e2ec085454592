# SPDX-License-Identifier: Apache-2.0
"""The decoder for Avro: records, schemas of a registry, and bytes that are to take a process down."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import fastavro
import pytest

from pyspark_mqtt_nats.decoders.avro import reader_of
from pyspark_mqtt_nats.decoders.formats import RegistryError
from tests.spark.test_decoders import AVRO, decode, one, right

NODE = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}
"""A type that contains itself: each level takes one byte."""


def test_avro(tmp_path: Path) -> None:
    file = tmp_path / "report.avsc"
    file.write_text(json.dumps(AVRO), encoding="utf-8")
    data = io.BytesIO()
    fastavro.schemaless_writer(data, fastavro.parse_schema(AVRO), {"celsius": 21.5, "tags": ["a"]})
    typed = {"format": "avro", "schema": str(file), "columns": "celsius FLOAT, tags ARRAY<STRING>"}
    assert one(typed, data.getvalue()) == {"celsius": 21.5, "tags": ["a"], "decode_error": None}
    whole = {"format": "avro", "schema": json.dumps(AVRO)}
    assert one(whole, data.getvalue()) == right('{"celsius":21.5,"tags":["a"]}')
    assert one(whole, data.getvalue() + b"x") == {"json": None, "decode_error": "avro: bytes follow the record"}
    assert one(whole, b"")["json"] is None


class Registry(BaseHTTPRequestHandler):
    """A schema registry that has schema 7, and fails for 500."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        code = {"/schemas/ids/7": 200, "/schemas/ids/500": 500}.get(self.path, 404)
        body = json.dumps({"schema": json.dumps(AVRO)}).encode() if code == 200 else b"{}"
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def registry() -> Iterator[str]:
    """The URL of a schema registry."""
    Registry.asked = []
    server = HTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_avro_with_a_registry(registry: str) -> None:
    data = io.BytesIO()
    fastavro.schemaless_writer(data, fastavro.parse_schema(AVRO), {"celsius": 1.0, "tags": []})
    framed = b"\0" + (7).to_bytes(4, "big") + data.getvalue()
    chosen = {"format": "avro", "registry": registry}
    assert decode(chosen, framed, framed) == [right('{"celsius":1.0,"tags":[]}')] * 2
    assert Registry.asked == ["/schemas/ids/7"]
    assert one(chosen, b"\0\0\0\0\x08x")["decode_error"] == "avro: the registry has no schema 8"
    assert "does not begin with a zero" in one(chosen, b"\x01abcdef")["decode_error"]
    with pytest.raises(RegistryError, match="answers 500 for schema 500; change decoders"):
        decode(chosen, b"\0" + (500).to_bytes(4, "big"))
    with pytest.raises(RegistryError, match="gives no schema 1: "):
        decode({"format": "avro", "registry": "http://127.0.0.1:1"}, b"\0\0\0\0\x01")


def encoded(schema: Any, value: Any) -> bytes:
    data = io.BytesIO()
    fastavro.schemaless_writer(data, fastavro.parse_schema(schema), value)
    return data.getvalue()


@pytest.mark.parametrize(
    "schema",
    [
        NODE,
        {"type": "array", "items": NODE},
        {"type": "map", "values": NODE},
        ["int", {"type": "record", "name": "Outer", "fields": [{"name": "node", "type": NODE}]}],
    ],
)
def test_depth_is_an_error(schema: Any) -> None:
    """fastavro's compiled reader ends the process here."""
    read = reader_of(json.dumps(schema))
    with pytest.raises(RecursionError):
        read(b"\x02" * 100_000)


def test_a_type_that_contains_itself() -> None:
    chosen = {"format": "avro", "schema": json.dumps(NODE)}
    assert one(chosen, encoded(NODE, {"next": {"next": None}})) == right('{"next":{"next":null}}')
    assert one(chosen, b"\x02" * 5000)["decode_error"].startswith("avro: maximum recursion depth exceeded")
    endless = {"type": "record", "name": "R", "fields": [{"name": "r", "type": "R"}]}
    assert one({"format": "avro", "schema": json.dumps(endless)}, b"")["decode_error"].startswith("avro: maximum")


@pytest.mark.parametrize(
    "items",
    [
        "null",
        {"type": "null"},
        {"type": "fixed", "name": "F", "size": 0},
        {"type": "record", "name": "E", "fields": []},
        {"type": "record", "name": "E", "fields": [{"name": "n", "type": "null"}]},
    ],
)
def test_items_that_take_no_bytes_are_refused(items: Any) -> None:
    """A few bytes could say that there are a billion of them."""
    inner = {"type": "array", "items": items}
    record = {"type": "record", "name": "R", "fields": [{"name": "n", "type": "int"}, {"name": "list", "type": inner}]}
    for schema in (inner, ["null", inner], {"type": "map", "values": inner}, record):
        with pytest.raises(ValueError, match="an array whose items take no bytes"):
            reader_of(json.dumps(schema))


def test_items_that_take_bytes() -> None:
    """Types that are used again, and one that contains itself in an array, are no arrays of any length."""
    pair = {"type": "record", "name": "P", "fields": [{"name": "n", "type": "null"}, {"name": "i", "type": "int"}]}
    tree = {"type": "record", "name": "T", "fields": [{"name": "below", "type": {"type": "array", "items": "T"}}]}
    fixed = {"type": "fixed", "name": "F", "size": 1}
    both = {
        "type": "record",
        "name": "B",
        "fields": [{"name": "one", "type": fixed}, {"name": "more", "type": {"type": "array", "items": "F"}}],
    }
    for schema, value in (
        ({"type": "array", "items": pair}, [{"n": None, "i": 1}]),
        (tree, {"below": [{"below": []}]}),
        (both, {"one": b"a", "more": [b"b"]}),
        ({"type": "array", "items": {"type": "enum", "name": "E", "symbols": ["a"]}}, ["a"]),
        ({"type": "array", "items": ["null", "string"]}, [None, "a"]),
    ):
        assert reader_of(json.dumps(schema))(encoded(schema, value)) == value


def test_a_schema_without_a_type() -> None:
    with pytest.raises(ValueError, match="the schema is not one of Avro: a type has no 'type'"):
        reader_of("{}")
