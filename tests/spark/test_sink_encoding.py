# SPDX-License-Identifier: Apache-2.0
"""Rows as frames: what is refused, what headers say, and what tells one message from another. No server is needed."""

import re
from itertools import islice
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    VarcharType,
)

from mqtt_nats.codec import Properties
from mqtt_nats.messages.properties import body, from_headers
from mqtt_streams.properties import header_lines
from pyspark_mqtt_nats.errors import OptionError
from pyspark_mqtt_nats.publishing import columns
from pyspark_mqtt_nats.publishing.encoding import Encoder, Frames, Identities, Message, Refused
from tests.messages.test_properties import property_sets
from tests.spark.sinking import TYPES, Row, batch_of, names_of, schema_of, users

IDENTITY = b"0123456789abcdef0123456789abcdef"


def encoder(**settings: Any) -> Encoder:
    return Encoder("$MQTT.msgs.", b"_INBOX.x.", settings.pop("max_payload", 1 << 20), **settings)


def values(row: Row) -> tuple[Any, ...]:
    """A row as `columns.rows` gives it."""
    names = names_of([row])
    (found,) = columns.rows(batch_of([row], names), names)
    return found


def frames(row: Row, **settings: Any) -> Frames:
    made = encoder(**settings)
    return made.frames(made.message(values(row)), IDENTITY, 0x2A)


def parsed(frame: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Subject, reply subject, raw headers and payload; the lengths must be right."""
    line, _, rest = frame.partition(b"\r\n")
    verb, subject, *middle, total = line.split(b" ")
    size = int(middle.pop()) if verb == b"HPUB" else 0
    assert len(rest) == int(total) + 2
    assert rest.endswith(b"\r\n")
    return subject, b"".join(middle), rest[:size], rest[size:-2]


class TestFrames:
    def test_qos_0_without_anything_is_plain(self) -> None:
        assert frames({"topic": "a/b", "payload": b"x", "qos": 0}) == (b"", b"PUB a.b 1\r\nx\r\n", b"")

    @pytest.mark.parametrize("qos", [1, 2])
    def test_both_copies_have_one_identifier(self, qos: int) -> None:
        retained, bare, stored = frames({"topic": "a/b c", "payload": b"x\r\ny", "qos": qos})
        head = b"NATS/1.0\r\nNmqtt-Pub:%d\r\nNmqtt-Id:%b\r\nNats-Msg-Id:%b\r\n" % (qos, IDENTITY, IDENTITY)
        assert not retained
        assert parsed(bare) == (b"a.b/_c", b"", head + b"Nmqtt-Subject:a.b/_c\r\n\r\n", b"x\r\ny")
        assert parsed(stored) == (b"$MQTT.msgs.a.b/_c", b"_INBOX.x.2b", head + b"\r\n", b"x\r\ny")

    def test_expiry_is_the_life_of_the_copies_that_are_kept(self) -> None:
        retained, bare, stored = (
            parsed(one)[2] for one in frames({"topic": "a", "payload": b"x", "message_expiry": 0, "retain": True})
        )
        assert b"Nmqtt-Expiry:0\r\n" in bare
        assert b"Nats-TTL" not in bare
        assert b"\r\nNats-TTL:3600s\r\n" in stored
        assert b"\r\nNats-TTL:1s\r\n" in retained

    def test_retained(self) -> None:
        retained, bare, stored = frames({"topic": "a b", "payload": b"x", "retain": True, "content_type": "t"})
        subject, reply, head, payload = parsed(retained)
        assert (subject, reply, payload) == (b"$MQTT.rmsgs.a/_b", b"_INBOX.x.2a", b"x")
        lines = head.split(b"\r\n")
        assert lines[:4] == [b"NATS/1.0", b"Nats-Rollup:sub", b"Nmqtt-RTopic:a_b", b"Nmqtt-RFlags:3"]
        assert re.fullmatch(rb"Nmqtt-ROrigin:[0-9a-f]{8}", lines[4])
        assert lines[5:] == [b"Nats-Msg-Id:" + IDENTITY, b"Content-Type:t", b"", b""]
        assert all(b"\r\nNmqtt-Retain:1\r\n" in parsed(one)[2] for one in (bare, stored))

    def test_retained_and_empty_is_a_tombstone(self) -> None:
        retained, bare, stored = frames({"topic": "a", "payload": b"", "retain": True, "qos": 0, "content_type": "t"})
        assert b"\r\nNmqtt-RFlags:-1\r\n" in retained
        assert b"Content-Type" not in retained
        assert parsed(bare)[2] == b"NATS/1.0\r\nNmqtt-Pub:0\r\nContent-Type:t\r\nNmqtt-Retain:1\r\n\r\n"
        assert not stored

    @pytest.mark.parametrize(
        ("more", "reply"),
        [
            ({}, b"r.s"),
            ({"qos": 1}, b""),
            ({"correlation_data": b"1"}, b""),
            ({"response_topic": "r" * 200}, b"r" * 200),
            ({"response_topic": "r" * 201}, b""),
        ],
    )
    def test_reply_subject_where_nats_clients_can_answer_themselves(self, more: Row, reply: bytes) -> None:
        row = {"topic": "a", "payload": b"", "qos": 0, "response_topic": "r/s", **more}
        assert parsed(frames(row).bare)[1] == reply

    def test_defaults_are_for_rows_without_a_value(self) -> None:
        made = encoder(topic="of/option", qos=2, retain=True)
        target, payload, qos, retain, *_ = made.message(values({"topic": None, "payload": "\u00e4"} | {"qos": None}))
        assert (target.topic, payload, qos, retain) == ("of/option", "\u00e4".encode(), 2, True)
        own: Row = {"topic": "own", "payload": b"", "qos": 0, "retain": False}
        target, payload, qos, retain, *_ = made.message(values(own))
        assert (target.topic, payload, qos, retain) == ("own", b"", 0, False)


@given(property_sets, st.sampled_from([0, 1, 2]), st.booleans())
def test_properties_are_headers_as_gateways_write_them(properties: Properties, qos: int, retain: bool) -> None:
    row: dict[str, Any] = {"topic": "a", "payload": b"text", "qos": qos, "retain": retain}
    renamed = {"message_expiry_interval": "message_expiry", "payload_format_indicator": "payload_format"}
    for name, value in properties.items():
        if name == "user_property":
            row["user_properties"] = users(*cast("list[tuple[str, str]]", value))
        elif name != "response_topic" or not str(value).startswith(("$", "_")):
            row[renamed.get(name, name)] = value
    if "response_topic" not in row:
        properties = cast("Properties", {key: value for key, value in properties.items() if key != "response_topic"})
    lines = header_lines(properties)
    copies = frames(row)
    for frame in filter(None, copies):
        head = parsed(frame)[2]
        assert lines in head
        expected = body(properties), properties.get("message_expiry_interval", -1)
        assert from_headers(head) == expected
    assert bool(copies.retained) == retain
    assert bool(copies.stored) == bool(qos)


REFUSED: list[tuple[Row, str]] = [
    ({"topic": None}, "column topic: it is null, and there is no option topic"),
    ({"topic": ""}, "column topic: it is empty"),
    ({"topic": "a/+"}, "column topic: 'a/+' has a wildcard, + or #"),
    ({"topic": "#"}, "column topic: '#' has a wildcard, + or #"),
    ({"topic": "a\0"}, "column topic: 'a\\x00' has a NUL"),
    ({"topic": "$SYS/a"}, "column topic: '$SYS/a': topics under '$SYS' are reserved"),
    ({"topic": "$MQTT"}, "column topic: '$MQTT': topics under '$MQTT' are reserved"),
    ({"topic": "_INBOX/a"}, "column topic: '_INBOX/a': topics under '_INBOX' are reserved"),
    ({"topic": "x" * 65_536}, f"column topic: '{'x' * 77}...' is longer than 65535 bytes"),
    ({"topic": "x" * 3801}, f"column topic: '{'x' * 77}...': the topic needs a NATS subject of more than 3800 bytes"),
    ({"payload": None}, "column payload: it is null; an empty payload is not"),
    ({"qos": 3}, "column qos: 3 is not 0, 1 or 2"),
    ({"qos": -1}, "column qos: -1 is not 0, 1 or 2"),
    ({"content_type": "a\0"}, "column content_type: it has a NUL"),
    ({"content_type": "x" * 65_536}, "column content_type: it is longer than 65535 bytes"),
    ({"payload_format": 2}, "column payload_format: 2 is not 0 or 1"),
    ({"payload": b"\xff", "payload_format": 1}, "column payload_format: it is 1, but the payload is not UTF-8 text"),
    ({"response_topic": ""}, "column response_topic: it is empty"),
    ({"response_topic": "a/#"}, "column response_topic: 'a/#' has a wildcard, + or #"),
    ({"response_topic": "$reply/a"}, "column response_topic: '$reply/a': topics under '$reply' are reserved"),
    ({"correlation_data": b"x" * 65_536}, "column correlation_data: it is longer than 65535 bytes"),
    ({"message_expiry": -1}, "column message_expiry: -1 is not between 0 and 4294967295 (seconds)"),
    ({"message_expiry": 1 << 32}, "column message_expiry: 4294967296 is not between 0 and 4294967295 (seconds)"),
    ({"user_properties": [None]}, "column user_properties: an entry is null: expected a key and a value"),
    ({"user_properties": users(("a", None))}, "column user_properties: an entry is null: expected a key and a value"),
    ({"user_properties": users((None, "a"))}, "column user_properties: an entry is null: expected a key and a value"),
    ({"user_properties": users(("a", "\0"))}, "column user_properties: it has a NUL"),
    (
        {"user_properties": users(*[("a", "b")] * 1025)},
        "column user_properties: there are 1025, and at most 1024 arrive",
    ),
    ({"payload": b"x" * 383}, "column payload: the message has 516 bytes with its headers; the server takes 515"),
    (
        {"payload": b"x" * 516, "qos": 0},
        "column payload: the message has 516 bytes with its headers; the server takes 515",
    ),
    (
        {"payload": b"x" * 300, "retain": True},
        "column payload: the message has 433 bytes with its headers; the server takes 432",
    ),
]


@pytest.mark.parametrize(("row", "text"), REFUSED, ids=range(len(REFUSED)))
def test_refused(row: Row, text: str) -> None:
    most = int(text.rpartition(" ")[2]) if text.endswith(("515", "432")) else 1 << 20
    with pytest.raises(Refused) as caught:
        frames({"topic": "a/b", "payload": b""} | dict(row), max_payload=most)
    assert str(caught.value) == text
    assert caught.value.column == text.split()[1].rstrip(":")


def test_text_need_not_be_utf8_where_bytes_are_allowed() -> None:
    batch = odd(payload=[b"\xff"], correlation_data=[b"\xfe"], topic=[b"a"])
    ((topic, payload, *_, correlation, _, _),) = columns.rows(batch, batch.schema.names)
    assert (topic, payload, correlation) == ("a", b"\xff", b"\xfe")


def test_text_that_is_not_utf8_is_refused_in_its_place() -> None:
    """What comes before it is given; of two columns the one that is wrong first."""
    topics, kinds = [b"a", b"b", b"\xff", b"d"], [b"1", b"2", b"3", b"\xff"]
    for columns_ in ({"topic": topics, "content_type": kinds}, {"content_type": kinds, "topic": topics}):
        batch = odd(payload=[b"x"] * 4, **columns_)
        found = columns.rows(batch, batch.schema.names)
        assert [row[0] for row in islice(found, 2)] == ["a", "b"]
        with pytest.raises(Refused, match=r"^column topic: it is not UTF-8$"):
            next(found)
    pairs = pa.array([[{"key": "k", "value": "v"}], [{"key": "k", "value": None}]])
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
    bad = pa.array([[{"key": b"k", "value": b"v"}], [{"key": b"\xff", "value": b"v"}]]).view(kind)
    for array, good in ((pairs, 2), (bad, 1)):
        batch = pa.record_batch({"user_properties": array})
        found = columns.rows(batch, ["user_properties"])
        assert len(list(islice(found, good))) == good
    with pytest.raises(Refused, match="user_properties"):
        next(found)


def odd(**texts: list[bytes]) -> pa.RecordBatch:
    """Columns of text with whatever bytes."""
    return pa.record_batch({name: pa.array(found, pa.binary()).view(pa.string()) for name, found in texts.items()})


def test_as_large_as_the_server_takes() -> None:
    frames({"topic": "a/b", "payload": b"x" * 382}, max_payload=515)
    frames({"topic": "a/b", "payload": b"x" * 515, "qos": 0}, max_payload=515)


def test_a_long_prefix_leaves_less_for_topics() -> None:
    made = Encoder("p" * 300 + ".", b"_INBOX.x.", 1 << 20)
    made.message(values({"topic": "t" * 3600, "payload": b""}))
    with pytest.raises(Refused, match=r"is too long for NATS$"):
        made.message(values({"topic": "t" * 3700, "payload": b""}))


class TestIdentities:
    """What a task that is run again says of its rows."""

    @staticmethod
    def of(rows: list[Row], query: str = "q", epoch: str = "0", partition: int = 0) -> list[bytes]:
        made = encoder()
        identities = Identities(query, epoch, partition)
        return [identities.next(made.message(values(row))) for row in rows]

    def test_are_hex_and_different(self) -> None:
        rows: list[Row] = [
            {"topic": "a", "payload": b"x"},
            {"topic": "a", "payload": b"x", "qos": 2},
            {"topic": "a", "payload": b"x", "retain": True},
            {"topic": "a", "payload": b"x", "content_type": "t"},
            {"topic": "ax", "payload": b""},
            {"topic": "a/x", "payload": b""},
            {"topic": "a", "payload": b""},
            {"topic": "a", "payload": b"Content-Type:t\r\nx"},
            *[{"topic": "a", "payload": b"x"}] * 3,
        ]
        found = self.of(rows)
        assert len(set(found)) == len(rows)
        assert all(re.fullmatch(rb"[0-9a-f]{32}", one) for one in found)

    def test_depend_on_query_epoch_and_partition(self) -> None:
        row: list[Row] = [{"topic": "a", "payload": b"x"}]
        found = [self.of(row), self.of(row, "r"), self.of(row, epoch="1"), self.of(row, partition=1)]
        assert len({one for (one,) in found}) == 4
        assert self.of(row, epoch="1", partition=11) != self.of(row, epoch="11", partition=1)

    @given(
        st.lists(st.sampled_from([b"", b"x", b"y", b"z"]), max_size=12).flatmap(
            lambda o: st.tuples(st.just(o), st.permutations(o))
        )
    )
    def test_do_not_depend_on_the_order(self, orders: tuple[list[bytes], list[bytes]]) -> None:
        one, other = ([{"topic": "a", "payload": payload} for payload in order] for order in orders)
        first, second = self.of(cast("list[Row]", one)), self.of(cast("list[Row]", other))
        assert len(set(first)) == len(first)
        assert sorted(first) == sorted(second)

    def test_equal_rows_far_apart_are_not_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Identities, "BLOCK", 3)
        rows: list[Row] = [{"topic": "a", "payload": b"x"}] * 10
        assert len(set(self.of(rows))) == 10
        assert self.of(rows) == self.of(rows)


class TestColumns:
    def test_every_column_with_its_type(self) -> None:
        assert columns.check(schema_of(list(TYPES)), False) == tuple(columns.COLUMNS)

    def test_other_types_that_will_do_and_names_in_capitals(self) -> None:
        schema = StructType(
            [
                StructField("Payload", StringType()),
                StructField("TOPIC", VarcharType(10)),
                StructField("qos", ByteType()),
                StructField("message_expiry", IntegerType()),
                StructField("payload_format", LongType()),
                StructField("correlation_data", StringType()),
            ]
        )
        names = columns.check(schema, False)
        assert names == ("payload", "topic", "qos", "message_expiry", "payload_format", "correlation_data")

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ([("key", StringType())], "column 'key' cannot be written: drop it; there are topic, payload, qos"),
            ([("Payloads", StringType())], "column 'Payloads' cannot be written: did you mean 'payload'?"),
            ([("Sequence", LongType())], "column 'Sequence' cannot be written: it is given by the store: .drop"),
            ([("payload", StringType()), ("PAYLOAD", StringType())], "column 'PAYLOAD' is repeated"),
            ([("payload", LongType())], "column 'payload' is BIGINT; it must be BINARY or STRING: cast it"),
            ([("qos", DoubleType())], "column 'qos' is DOUBLE; it must be INT: cast it"),
            ([("retain", IntegerType())], "column 'retain' is INT; it must be BOOLEAN: cast it"),
            ([("topic", LongType())], "column 'topic' is BIGINT; it must be STRING: cast it"),
            (
                [("user_properties", MapType(StringType(), StringType()))],
                "column 'user_properties' is MAP<STRING,STRING>; it must be ARRAY<STRUCT<key: STRING, value: STRING>>",
            ),
            ([("user_properties", ArrayType(StringType()))], "column 'user_properties' is ARRAY<STRING>; it must be"),
            (
                [("user_properties", ArrayType(StructType([StructField("value", StringType())])))],
                "column 'user_properties' is ARRAY<STRUCT<VALUE:STRING>>; it must be",
            ),
            ([("topic", StringType())], "there is no column 'payload'"),
            ([("payload", StringType())], "there is neither a column 'topic' nor the option topic"),
        ],
    )
    def test_refused(self, fields: list[tuple[str, Any]], text: str) -> None:
        schema = StructType([StructField(name, kind) for name, kind in fields])
        with pytest.raises(OptionError) as caught:
            columns.check(schema, False)
        assert str(caught.value).startswith(text)
        assert "\n" not in str(caught.value)

    def test_every_row_of_a_batch(self) -> None:
        rows = [{"topic": f"a/{number}", "payload": b"%d" % number} for number in range(1000)]
        found = list(columns.rows(batch_of(rows, ["payload", "topic"]), ["payload", "topic"]))
        assert [row[:2] for row in found] == [(row["topic"], row["payload"]) for row in rows]
        assert {row[2:] for row in found} == {(None,) * 8}
        assert not list(columns.rows(batch_of([], ["payload"]), ["payload"]))


def test_message_of_many_topics() -> None:
    made = encoder()
    for number in range(20_000):
        message: Message = made.message((f"t/{number}", b"", *[None] * 8))
        assert message.target.subject == b"t.%d" % number
    assert len(made._targets) <= 16_384
