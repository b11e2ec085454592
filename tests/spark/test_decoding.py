# SPDX-License-Identifier: Apache-2.0
"""Payloads as columns: the option `decoders`, and `decode` with Spark's own functions, which agree."""

import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from pyspark_mqtt_nats.decoding import decode
from pyspark_mqtt_nats.errors import OptionError
from pyspark_mqtt_nats.hints import Projection, spark_schema
from tests.harness.nats import NatsServer
from tests.spark.storing import Store

NUMBERS: dict[bytes, float | None] = {
    b"20.5": 20.5,
    b" -3 \n": -3.0,
    b"+5": 5.0,
    b".5": 0.5,
    b"5.": 5.0,
    b"1e3": 1000.0,
    b"1E-3": 0.001,
    b"1e400": math.inf,
    b"9007199254740993": 9007199254740992.0,
    b"": None,
    b"x": None,
    b"1 2": None,
    b"NaN": None,
    b"Infinity": None,
    b"1d": None,
    b"0x10": None,
    b"1_000": None,
    b"\xff": None,
    b"1\0": None,
    "\u0661".encode(): None,
}
TEXTS: dict[bytes, str | None] = {b"on": "on", b"": "", "\u00b0C\n".encode(): "\u00b0C\n", b"\xff\xfe": None}
DOCUMENTS: dict[bytes, bool] = {
    b'{"a": 1}': True,
    b'[1, "x", null]': True,
    b" 5 ": True,
    b'"text"': True,
    b"null": True,
    b'{"a": }': False,
    b"{'a': 1}": False,
    b"": False,
    b"on": False,
    b'"\xff"': False,
}
HINTS = {"n/+": "number", "t/#": "text", "j/+": "json", "#": "number"}


def rows() -> list[tuple[str, bytes, float | None, str | None, str | None]]:
    """Topic, payload, and the columns `number`, `text` and `json`."""
    found: list[tuple[str, bytes, float | None, str | None, str | None]] = []
    found += [("n/x", payload, number, None, None) for payload, number in NUMBERS.items()]
    found += [("t/x", payload, None, text, None) for payload, text in TEXTS.items()]
    found += [("t", b"also", None, "also", None), ("other", b"7", 7.0, None, None), ("$x", b"8", 8.0, None, None)]
    found += [("j/x", payload, None, None, payload.decode() if good else None) for payload, good in DOCUMENTS.items()]
    return found


def made_by_the_option(wanted: StructType, hints: dict[str, str], size: int) -> list[tuple[Any, ...]]:
    """The columns that the source makes, from batches of so many rows."""
    projection = Projection.of(wanted, tuple(hints.items()))
    assert {"topic", "payload"} <= set(projection.stored)
    topics, payloads = [row[0] for row in rows()], [row[1] for row in rows()]
    whole = pa.record_batch({"topic": topics, "payload": pa.array(payloads, pa.binary())})
    batches = (whole.slice(at, size) for at in range(0, len(topics), size))
    found = list(projection.apply(batches))
    assert all(batch.schema.names == list(wanted.names) for batch in found)
    return [tuple(row.values()) for batch in found for row in batch.to_pylist()]


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_the_option(size: int) -> None:
    schema = StructType().add("json", "string").add("number", "double").add("topic", "string").add("text", "string")
    expected = [(json, number, topic, text) for topic, _, number, text, json in rows()]
    assert made_by_the_option(schema, HINTS, size) == expected
    only = StructType().add("text", "string")
    assert made_by_the_option(only, HINTS, size) == [(text,) for _, _, _, text, _ in rows()]


def test_columns_of_the_option() -> None:
    hints = (("a", "text"), ("b", "number"), ("c", "text"))
    assert spark_schema(hints, False).names[-2:] == ["text", "number"]
    plain = Projection.of(StructType().add("sequence", "long"), hints)
    assert (plain.stored, plain.hints) == (("sequence",), ())
    for wanted, message in (
        (StructType().add("number", "long"), "'number' of the schema must be DOUBLE"),
        (StructType().add("text", "string", nullable=False), "'text' of the schema must be STRING, and nullable"),
        (StructType().add("text", "string").add("text", "string"), "a column twice"),
        (StructType().add("json", "string"), "'json'"),
        (StructType(), "no columns"),
    ):
        with pytest.raises(OptionError, match=message):
            Projection.of(wanted, hints)
    with pytest.raises(OptionError, match=r"decoders: 'a' has the kind 'a INT'.*decode takes a schema"):
        spark_schema((("a", "a INT"),), False)


@pytest.mark.timeout(360)
def test_decode_and_the_option_agree(spark: SparkSession, nats_server: NatsServer) -> None:
    with Store(nats_server.url) as store:
        store.put_payloads((topic.replace("/", "."), payload) for topic, payload, *_ in rows())
        option = '{"n/+": "number", "t/#": "text", "j/+": "json", "#": "number"}'
        own = store.load(spark, decoders=option).select("topic", "payload", "number", "text", "json")
        stored = store.load(spark).select("topic", "payload")
        for frame in (own, decode(stored, HINTS)):
            assert [tuple(row) for row in frame.collect()] == rows()

        reports = {"j/+": "a INT, at TIMESTAMP, tags ARRAY<STRING>", "n/+": "a INT", "+/y": "text"}
        store.put_payloads(
            [
                ("j.report", b'{"at": "2026-01-02T03:04:05Z", "a": 5, "tags": ["x"], "more": 1}'),
                ("j.report", b'{"a": "wrong"}'),
                ("n.report", b'{"a": 6, "at": 1}'),
                ("n.y", b"not a number"),
                ("z.y", b"text"),
            ]
        )
        found = decode(store.load(spark, startingSequence=len(rows()) + 1), reports)
        found = found.select("a", "tags", "text", found["at"].cast("string").alias("time"))
        assert [(row.a, row.time, row.tags, row.text) for row in found.collect()] == [
            (5, "2026-01-02 03:04:05", ["x"], None),
            (None, None, None, None),
            (6, None, None, None),
            (None, None, None, None),
            (None, None, None, "text"),
        ]

        # `fail` says which payload it was and what to change.
        good = stored.where("topic = 't' or topic = 'other'")
        assert decode(good, HINTS, errors="fail").count() == 2
        for kind, topic, message in (
            ("number", "n/x", "the payload of topic n/x is no number: change the decoder of '+/x' (option decoders)"),
            ("text", "t/x", "is no UTF-8 text"),
            ("json", "j/x", "is no JSON"),
            ("a INT", "j/x", "is no JSON object"),
        ):
            bad = decode(stored.where(f"topic = '{topic}'"), {"+/x": kind}, errors="fail")
            with pytest.raises(PySparkException) as told:
                bad.collect()
            assert message in str(told.value)

        for call, message in (
            (lambda: decode(stored, {"a/#/b": "text"}), "decoders: 'a/#/b'"),
            (lambda: decode(stored, {"a": "avro"}), "decoders: 'a' has the kind 'avro': expected number, text, json"),
            (lambda: decode(stored, {"a": "topic STRING"}), "'a' gives 'topic', which is a column already"),
            (lambda: decode(own, {"a": "number"}), "'a' gives 'number', which is a column already"),
            (lambda: decode(stored, {"a": "x INT", "b": "X STRING"}), "'b' gives 'X' string, an earlier one 'x' int"),
            (lambda: decode(stored, {}, errors="skip"), "errors = 'skip'"),  # type: ignore[arg-type]
        ):
            with pytest.raises(OptionError) as refused:
                run(call)
            assert message in str(refused.value)


def run(call: Callable[[], Any]) -> None:
    """Call it, for its error."""
    call()
