# SPDX-License-Identifier: Apache-2.0
"""Payloads as columns: the option `decoders`, and `decode` for any DataFrame."""

from collections.abc import Callable
from json import dumps
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from pyspark_mqtt_nats.decoders.option import parse_decoders
from pyspark_mqtt_nats.decoding import decode
from pyspark_mqtt_nats.errors import OptionError
from pyspark_mqtt_nats.projection import Projection, spark_schema
from tests.harness.doubles import stands_for
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
    b"1e999": None,
    b"-1e400": None,
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
    b"1e999": True,
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
    projection = Projection.of(wanted, parse_decoders(hints))
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


def test_the_option_says_which_payloads_are_wrong() -> None:
    wanted = StructType().add("topic", "string").add("decode_error", "string")
    told = made_by_the_option(wanted, HINTS, 5)
    expected = []
    for topic, _, number, text, json in rows():
        kind = "number" if topic[:2] not in ("t", "t/", "j/") else "text" if topic[0] == "t" else "json"
        right = {"number": number, "text": text, "json": json}[kind] is not None
        expected.append((topic, right))
    assert [(topic, error is None) for topic, error in told] == expected
    assert {error for topic, error in told if topic == "n/x"} == {None, "no finite number"}
    assert {error for topic, error in told if topic == "t/x"} == {None, "not UTF-8"}


def test_columns_of_the_option() -> None:
    decoders = parse_decoders({"a": "text", "b": "number", "c": "text"})
    assert spark_schema(decoders).names[-3:] == ["text", "number", "decode_error"]
    plain = Projection.of(StructType().add("sequence", "long"), decoders)
    assert (plain.stored, plain.decoders) == (("sequence",), ())
    for wanted, message in (
        (StructType().add("number", "long"), "'number' of the schema must be DOUBLE"),
        (StructType().add("text", "string", nullable=False), "'text' of the schema must be STRING, and nullable"),
        (StructType().add("text", "string").add("TEXT", "string"), "'TEXT' twice"),
        (StructType().add("json", "string"), "'json'"),
        (StructType(), "no columns"),
    ):
        with pytest.raises(OptionError, match=message):
            Projection.of(wanted, decoders)
    with pytest.raises(OptionError, match="decoders: 'QoS' is a column of every message already"):
        spark_schema(parse_decoders({"a": "QoS INT"}))


@stands_for(TaskContext)
class FakeTaskContext:
    """Stands for `TaskContext`: the settings of the session."""

    def __init__(self, settings: dict[str, str]) -> None:
        self._settings = settings

    def getLocalProperty(self, key: str) -> str | None:
        return self._settings.get(key)


def test_names_of_columns_are_as_spark_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In capitals or small letters, unless Spark is configured to tell them apart."""
    wanted = StructType().add("Topic", "string").add("NUMBER", "double")
    projection = Projection.of(wanted, parse_decoders({"#": "number"}))
    batch = pa.record_batch({"topic": ["a"], "payload": pa.array([b"5"], pa.binary())})
    (made,) = projection.apply(iter([batch]))
    assert made.to_pylist() == [{"Topic": "a", "NUMBER": 5.0}]
    told = {"spark.sql.caseSensitive": "true"}
    monkeypatch.setattr(TaskContext, "get", lambda: FakeTaskContext(told))
    with pytest.raises(OptionError, match=r"column 'Topic' .* is 'topic' here, and spark\.sql\.caseSensitive is true"):
        list(projection.apply(iter([batch])))
    told["spark.sql.caseSensitive"] = "false"
    assert len(list(projection.apply(iter([batch])))) == 1


@pytest.mark.timeout(360)
def test_decode_and_the_option_agree(spark: SparkSession, nats_server: NatsServer) -> None:
    with Store(nats_server.url) as store:
        store.put_payloads((topic.replace("/", "."), payload) for topic, payload, *_ in rows())
        option = '{"n/+": "number", "t/#": "text", "j/+": "json", "#": "number"}'
        names = ("topic", "payload", "number", "text", "json", "decode_error")
        own = store.load(spark, decoders=option).select(*names)
        stored = store.load(spark).select("topic", "payload")
        told = [tuple(row) for row in own.collect()]
        assert [row[:5] for row in told] == rows()
        assert [tuple(row) for row in decode(stored, HINTS).select(*names).collect()] == told

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
        found = found.select("a", "tags", "text", found["at"].cast("string").alias("time"), "decode_error")
        expected = [
            (5, "2026-01-02 03:04:05", ["x"], None, None),
            (None, None, None, None, "json: a: expected INT"),
            (6, None, None, None, None),
            (None, None, None, None, "json: invalid literal, expected 'null': line 1 column 1 (char 0)"),
            (None, None, None, "text", None),
        ]
        assert [(row.a, row.time, row.tags, row.text, row.decode_error) for row in found.collect()] == expected
        option = '{"j/+": "a INT, at TIMESTAMP, tags ARRAY<STRING>", "n/+": "a INT", "+/y": "text"}'
        own = store.load(spark, startingSequence=len(rows()) + 1, decoders=option)
        own = own.selectExpr("a", "CAST(at AS STRING)", "tags", "text", "decode_error")
        assert [tuple(row) for row in own.collect()] == expected
        spark.conf.set("spark.sql.session.timeZone", "America/New_York")
        try:
            again = decode(store.load(spark, startingSequence=len(rows()) + 1), reports)
            local = again.selectExpr("CAST(at AS STRING) AS time").where("time IS NOT NULL").first()
            assert local is not None
            assert local.time == "2026-01-01 22:04:05"
        finally:
            spark.conf.set("spark.sql.session.timeZone", "UTC")

        # `fail` says which payload it was and what to change.
        good = stored.where("topic = 't' or topic = 'other'")
        assert decode(good, HINTS, errors="fail").count() == 2
        assert decode(good, dumps(HINTS), errors="fail").columns == decode(good, HINTS).columns
        for kind, topic, message in (
            ("number", "n/x", "payload of topic n/x cannot be decoded, no finite number: change the decoder (option"),
            ("text", "t/x", "not UTF-8"),
            ("json", "j/x", "json: "),
            ("a INT", "j/x", "expected an object with fields"),
        ):
            bad = decode(stored.where(f"topic = '{topic}'"), {"+/x": kind}, errors="fail")
            with pytest.raises(PySparkException) as failed:
                bad.collect()
            assert message in str(failed.value)

        for call, message in (
            (lambda: decode(stored, {"a/#/b": "text"}), "decoders: 'a/#/b'"),
            (lambda: decode(stored, "number"), "decoders: not JSON"),
            (lambda: decode(stored, {"a": "xml"}), "decoders: 'a' has the format 'xml': expected number, text, json"),
            (lambda: decode(stored, {"a": "topic STRING"}), "'topic' is a column already"),
            (lambda: decode(stored, {"a": "x INT", "b": "X STRING"}), "'b' gives 'X' string, an earlier one 'x' int"),
            (lambda: decode(stored, {}, errors="skip"), "errors = 'skip'"),  # type: ignore[arg-type]
        ):
            with pytest.raises(OptionError) as refused:
                run(call)
            assert message in str(refused.value)


def run(call: Callable[[], Any]) -> None:
    """Call it, for its error."""
    call()
