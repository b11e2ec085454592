# SPDX-License-Identifier: Apache-2.0
"""Subjects and header blocks into columns: as gateways read them, whatever is in them, and each different one once."""

import datetime
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqtt_nats.messages.properties import body, from_headers
from mqtt_streams import headers as names
from mqtt_streams.properties import Properties, header_lines
from mqtt_streams.subjects import topic_to_subject
from pyspark_mqtt_nats.reading import dictionaries
from pyspark_mqtt_nats.reading.batches import Batches, header_keys, headers_column
from pyspark_mqtt_nats.reading.decoding import (
    SHOWN_MOST,
    Decoded,
    decode_headers,
    decode_subject,
    header_pairs,
    without_varying,
)
from pyspark_mqtt_nats.schema import COLUMNS, HEADERS, arrow_schema

PREFIX = "$MQTT.msgs."
ID = b"0123456789abcdef0123456789abcdef"
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
TOPIC = st.text(st.characters(codec="utf-8", exclude_characters="\0+#"), min_size=1, max_size=20)


def block(*lines: bytes) -> bytes:
    return b"".join((b"NATS/1.0\r\n", *(line + b"\r\n" for line in lines), b"\r\n"))


def gateway_block(
    qos: int, message_id: bytes, client: str, properties: Properties, retain: bool = False, *after: bytes
) -> bytes:
    """What a gateway stores; in a cluster the identifier once more, and what says how long it stays, come `after`."""
    lines = [b"Nmqtt-Pub:%d" % qos]
    if qos == 2:
        lines.append(b"Nats-Msg-Id:q2-17")
    lines.append(b"Nmqtt-Id:" + message_id)
    if client:
        lines.append(b"Nmqtt-Client:" + names.percent_encode(client).encode())
    lines += header_lines(properties).split(b"\r\n")[:-1]
    if retain:
        lines.append(b"Nmqtt-Retain:1")
    return block(*lines, *after)


def binary(values: list[bytes]) -> pa.Array:
    return pa.array(values, pa.binary())


def batch(
    columns: list[str], blocks: list[bytes], payloads: list[bytes] | None = None, **options: Any
) -> list[dict[str, Any]]:
    """The rows of a batch with these header blocks, on subjects a.0, a.1, ..."""
    count = len(blocks)
    numbers = pa.array(range(1, count + 1), pa.int64())
    found = Batches(columns, PREFIX, **options).batch(
        numbers,
        pa.array([1_700_000_000_123_456_789] * count, pa.int64()),
        binary([f"{PREFIX}a.{index % 3}".encode() for index in range(count)]),
        binary(blocks),
        binary(payloads or [b"%d" % index for index in range(count)]),
    )
    assert found.schema.equals(arrow_schema(columns))
    found.validate(full=True)
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


PROPERTIES: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {},
    optional={
        "payload_format_indicator": st.integers(0, 1),
        "message_expiry_interval": st.integers(0, 0xFFFF_FFFF),
        "content_type": TEXT,
        "response_topic": TOPIC,
        "correlation_data": st.binary(max_size=40),
        "user_property": st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4),
    },
)


@given(st.sampled_from([1, 2]), TEXT, PROPERTIES, st.booleans())
@example(1, "dévice 7", {"user_property": [("Nats-TTL", "5"), ("a", "1"), ("a", " 2 ")]}, True)
def test_what_a_gateway_writes_comes_back(qos: int, client: str, properties: Any, retain: bool) -> None:
    found = decode_headers(gateway_block(qos, ID, client, properties, retain))
    assert found == Decoded(
        qos,
        retain,
        client or None,
        properties.get("content_type"),
        properties.get("payload_format_indicator"),
        properties.get("response_topic"),
        properties.get("correlation_data"),
        properties.get("message_expiry_interval"),
        properties.get("user_property", []),
    )


ODD_NAME = st.sampled_from(
    [
        b"Nmqtt-Pub", b"Nmqtt-Id", b"Nmqtt-Client", b"Nmqtt-Retain", b"Nmqtt-Expiry", b"Nmqtt-Format", b"Content-Type",
        b"content-type", b"Content-Type ", b"Nmqtt-Content-Type", b"Nmqtt-Reply", b"Nmqtt-Correlation", b"Nmqtt-User",
        b"nmqtt-user", b"Nats-Msg-Id", b"Nats-TTL", b"Status", b"", b" ", b"X", b"x y", b"X\xff", b"X\0", b"NATS/1.0",
    ]
)  # fmt: skip
ODD_VALUE = st.one_of(
    st.sampled_from(
        [
            b"", b" 1", b"0", b"1", b"2", b"24", b"3", b"x", b"4294967295", b"4294967296", b"-1", b"%41=%zz", b"a=b=c",
            b"%00", b"%ff", b"a%2Fb", b"a/%23", b"AAEC", b"AAE", b"=AAEC", b"\xff", b"\x01", b"\xc3\xa9 ", b"a:b",
        ]
    ),
    st.binary(max_size=12).filter(lambda value: b"\r" not in value),
)  # fmt: skip
ODD_LINE = st.one_of(st.builds(lambda name, value: name + b":" + value, ODD_NAME, ODD_VALUE), st.just(b"no colon"))
ODD_BLOCK = st.lists(ODD_LINE, max_size=8).map(lambda lines: block(*lines))


@given(ODD_BLOCK)
def test_properties_are_those_that_subscribers_see(raw: bytes) -> None:
    """Differential: the gateway's own reading of the same block."""
    found = decode_headers(raw)
    given_names = {
        "payload_format_indicator": found.payload_format,
        "content_type": found.content_type,
        "response_topic": found.response_topic,
        "correlation_data": found.correlation_data,
        "user_property": found.user_properties,
    }
    properties: Any = {name: value for name, value in given_names.items() if value is not None}
    assert (body(properties), -1 if found.message_expiry is None else found.message_expiry) == from_headers(raw)


ANY_BLOCK = st.one_of(
    ODD_BLOCK,
    st.binary(max_size=60),
    st.binary(max_size=60).map(lambda rest: b"NATS/1.0" + rest),
    st.builds(gateway_block, st.just(1), st.just(ID), st.text("ab", max_size=3), PROPERTIES, st.booleans()),
    st.builds(gateway_block, st.just(2), st.just(ID), st.text("ab", max_size=3), PROPERTIES, st.booleans()),
    st.sampled_from(
        [
            b"",
            block(),
            b"NATS/1.0 503 a:b\r\n\r\n",
            b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:" + ID + b"\r\n\r\n",
            b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:" + ID,
            b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:" + ID + b"\r\nNATS/1.0\r\nNmqtt-Pub:2\r\n\r\n",
            b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:" + ID[1:] + b"\r\nNmqtt-Pub:2\r\n\r\n",
            b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:\r\nX:234567890123456789012345678901\r\n\r\n",
            b"NATS/1.0\r\n\r\nNmqtt-Id:x\r\n",
            b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:" + ID + b"\r\nx",
            b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:" + ID + b"\r\nxy",
            block(b"a:b", b"", b"c:d"),
        ]
    ),
)


def structs(pairs: list[tuple[str, Any]] | None) -> list[dict[str, Any]] | None:
    return None if pairs is None else [{"key": key, "value": value} for key, value in pairs]


@given(st.lists(ANY_BLOCK, max_size=8))
def test_no_block_fails_a_batch_and_each_is_read_by_itself(blocks: list[bytes]) -> None:
    """In bulk, stripped of what varies, and from a dictionary, a block says what it says alone."""
    rows = batch(list(COLUMNS), blocks)
    assert len(rows) == len(blocks)
    for row, raw in zip(rows, blocks, strict=True):
        alone = decode_headers(raw)._asdict()
        alone["user_properties"] = structs(alone["user_properties"])
        assert {name: row[name] for name in alone} == alone
        assert row[HEADERS] == structs(header_pairs(raw))


@given(ANY_BLOCK)
@example(block(b"Nmqtt-Pub:1", b"Nmqtt-Id:" + ID[1:], b"X:1"))
@example(block(b"Nmqtt-Pub:1", b"Nmqtt-Id:" + ID + b"0", b"X:1"))
@example(block(b"Nmqtt-Pub:1", b"Nmqtt-Id:" + ID, b"X:1", b"Nats-Msg-Id:" + ID))
@example(block(b"Nmqtt-Pub:1", b"Nmqtt-Id:" + ID, b"Nats-Msg-Id:" + ID[1:], b"X:1"))
def test_lines_that_vary_change_no_column(raw: bytes) -> None:
    assert decode_headers(without_varying(raw)) == decode_headers(raw)
    (key,) = header_keys(binary([raw])).to_pylist()
    assert decode_headers(key) == decode_headers(raw)


@pytest.mark.parametrize("qos", [1, 2])
def test_messages_of_one_publisher_have_one_key(qos: int) -> None:
    """So they are decoded once, although each has an id of its own."""
    keys = header_keys(
        binary([gateway_block(qos, b"%032x" % number, "me", {"content_type": "a"}) for number in range(9)])
    )
    assert len(set(keys.to_pylist())) == 1


@pytest.mark.parametrize(
    "others",
    [
        [],
        [gateway_block(1, b"f" * 32, "me", {})],  # of a server alone
        [gateway_block(1, b"f" * 32, "me", {}, False, b"Nats-Msg-Id:" + b"f" * 32, b"Nats-TTL:9s")],
        [gateway_block(2, b"f" * 32, "me", {})],
        [b"", b"junk"],
    ],
)
def test_messages_of_one_publisher_in_a_cluster_have_one_key(others: list[bytes]) -> None:
    """There each has its identifier twice; whatever else is in the batch."""
    ids = [b"%032x" % number for number in range(9)]
    blocks = [gateway_block(1, one, "me", {"content_type": "a"}, False, b"Nats-Msg-Id:" + one) for one in ids]
    keys = header_keys(binary([*blocks, *others])).to_pylist()
    assert len(set(keys[:9])) == 1
    assert len(set(keys)) == 1 + len(others)
    assert [decode_headers(one) for one in keys] == [decode_headers(one) for one in (*blocks, *others)]


@given(st.lists(ODD_BLOCK, max_size=6))
def test_headers_in_bulk_are_the_headers_one_by_one(blocks: list[bytes]) -> None:
    found = headers_column(binary(blocks))
    assert found.equals(pa.array(list(map(header_pairs, blocks)), COLUMNS[HEADERS].arrow_type))


def test_what_is_no_block_has_no_columns() -> None:
    """Null, not 0 or false: what the publisher meant is not known. Without any headers it is."""
    rows = batch(["qos", "retain", "user_properties", HEADERS], [b"junk", b"NATS/1.0\r\na:b", b"", block()])
    nothing = {"qos": None, "retain": None, "user_properties": None, HEADERS: None}
    assert rows[:2] == [nothing] * 2
    assert rows[2:] == [{"qos": None, "retain": False, "user_properties": [], HEADERS: []}] * 2


def test_one_bad_value_spoils_only_its_column() -> None:
    raw = block(
        b"Nmqtt-Pub:7", b"Nmqtt-Client:d%FF", b"Nmqtt-Format:9", b"Nmqtt-Correlation:???", b"Nmqtt-Expiry:soon",
        b"Nmqtt-Reply:a/+/b", b"Content-Type:\xff", b"good:1", b"bad:\x01", b"Nmqtt-User:x%20y=1",
    )  # fmt: skip
    users = [("good", "1"), ("x y", "1")]
    assert decode_headers(raw) == Decoded(None, False, "d\ufffd", None, None, None, None, None, users)


def test_user_properties_are_limited_as_in_gateways() -> None:
    found = decode_headers(block(*[b"n:%d" % index for index in range(SHOWN_MOST + 5)])).user_properties
    assert found == [("n", str(index)) for index in range(SHOWN_MOST)]


@given(TOPIC)
@example("a//b")
@example("spBv1.0/x y/*")
def test_a_topic_comes_back(topic: str) -> None:
    try:
        subject = topic_to_subject(topic)
    except ValueError:
        return
    found = decode_subject(PREFIX.encode() + subject.encode(), PREFIX.encode())
    assert found == (subject, topic, topic.split("/"))


def test_subjects_of_others() -> None:
    assert decode_subject(b"archive.a", b"$MQTT.msgs.") == ("archive.a", "archive/a", ["archive", "a"])
    assert decode_subject(b"a.\xff", b"") == ("a.\ufffd", "a/\ufffd", ["a", "\ufffd"])
    assert decode_subject(b"$MQTT.msgs.$MQTT_SYS.up", b"$MQTT.msgs.").topic == "$SYS/up"


def test_times_are_cut_to_microseconds() -> None:
    (row,) = batch(["timestamp", "sequence"], [b""])
    assert row["timestamp"] == datetime.datetime(2023, 11, 14, 22, 13, 20, 123456, datetime.UTC)


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_alone_is_the_same_as_among_all(name: str) -> None:
    properties: Properties = {"content_type": "text/plain", "correlation_data": b"\0\1", "user_property": [("a", "b")]}
    blocks = [gateway_block(1, ID, "me", properties), b"", gateway_block(2, ID, "you", {}, retain=True)]
    assert [row[name] for row in batch([name], blocks)] == [row[name] for row in batch(list(COLUMNS), blocks)]


class Counting:
    """Decodes a key into its length and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def __call__(self, key: bytes) -> tuple[int]:
        self.asked.append(key)
        return (len(key),)


def column(dictionary: dictionaries.Dictionary, keys: list[bytes]) -> list[int]:
    found: list[int] = dictionary.column("size", dictionary.codes(pa.array(keys, pa.binary()))).to_pylist()
    return found


@pytest.mark.parametrize(("entries", "size"), [(5, 1 << 20), (1 << 16, 20)])
def test_a_dictionary_decodes_once_and_stays_small(monkeypatch: pytest.MonkeyPatch, entries: int, size: int) -> None:
    monkeypatch.setattr(dictionaries, "ENTRIES_MOST", entries)
    monkeypatch.setattr(dictionaries, "BYTES_MOST", size)
    decode = Counting()
    dictionary = dictionaries.Dictionary(decode, {"size": (0, pa.int64())})
    for _ in range(3):
        assert column(dictionary, [b"a", b"bb", b"a", b"ccc"]) == [1, 2, 1, 3]
    assert decode.asked == [b"a", b"bb", b"ccc"]
    assert column(dictionary, [b"d" * 30, b"bb"]) == [30, 2]
    assert column(dictionary, [b"eeee", b"ff", b"bb", b"g"]) == [4, 2, 2, 1]
    assert decode.asked[3:] in ([b"d" * 30, b"eeee", b"ff", b"bb", b"g"], [b"d" * 30, b"eeee", b"ff", b"g"])
    assert len(dictionary._codes) <= max(entries, 4)
    many = [b"%d" % number for number in range(50)]
    assert column(dictionary, many) == [len(key) for key in many]
    assert column(dictionary, [b"a"]) == [1]


def test_only_what_is_wanted_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*anything: object) -> None:
        raise AssertionError("decoded for nothing")

    monkeypatch.setattr("pyspark_mqtt_nats.reading.batches.decode_headers", fail)
    monkeypatch.setattr("pyspark_mqtt_nats.reading.batches.decode_subject", fail)
    assert batch(["sequence", "payload"], [b"x", b"y"]) == [
        {"sequence": 1, "payload": b"0"},
        {"sequence": 2, "payload": b"1"},
    ]


@pytest.mark.parametrize("columns", [["sequence"], ["payload", "topic"], ["qos", "sequence"]])
def test_rows_of_other_topics_are_left_out(columns: list[str]) -> None:
    wanted: Callable[[str], bool] = lambda subject: subject != "a.1"  # noqa: E731
    rows = batch(columns, [b""] * 7, visible=wanted)
    assert len(rows) == 5
    if "sequence" in columns:
        assert [row["sequence"] for row in rows] == [1, 3, 4, 6, 7]


def test_retained_records() -> None:
    """Tombstones, markers and what is no record are no rows; QoS is in the flags, or in the body of older servers."""
    blocks = [
        block(b"Nmqtt-RTopic:a/0", b"Nmqtt-RFlags:3", b"Nmqtt-ROrigin:abcdefgh", b"Content-Type:text/plain"),
        block(b"Nmqtt-RTopic:a/1", b"Nmqtt-RFlags:-1"),
        block(b"Nats-Marker-Reason:MaxAge"),
        b"",
        block(b"Nmqtt-RTopic:a/1", b"Nmqtt-RFlags:5"),
        b"junk",
        block(b"Nmqtt-RFlags:1"),
        block(b"Nmqtt-RFlags:1"),
    ]
    old = b'{"topic":"a/0","msg":"b2xk","flags":3}'
    payloads = [b"new", b"", b"", old, b"two", b"not a record", b"", b"zero"]
    rows = batch(["sequence", "payload", "qos", "retain", "topic", "content_type"], blocks, payloads, retained=True)
    assert [tuple(row.values()) for row in rows] == [
        (1, b"new", 1, True, "a/0", "text/plain"),
        (4, b"old", 1, True, "a/0", None),
        (5, b"two", 2, True, "a/1", None),
        (8, b"zero", 0, True, "a/1", None),
    ]
    assert batch(["payload"], blocks[1:3], [b"", b""], retained=True) == []
