# SPDX-License-Identifier: Apache-2.0
"""Mutated header blocks and subjects of stored messages, as Spark reads them."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

import pyspark_mqtt_nats.reading.decoding
from mqtt_nats.codec import Properties
from mqtt_nats.messages.headers import publish_qos
from mqtt_nats.messages.properties import from_headers
from mqtt_streams.messages import PREFIX
from mqtt_streams.properties import RESERVED
from pyspark_mqtt_nats.reading import decoding
from pyspark_mqtt_nats.reading.decoding import Decoded
from tests.fuzz import headers
from tests.fuzz.engine import Input, Target, Unexpected, expect
from tests.fuzz.mutation import of_pieces

BLOCK, SUBJECT = 0, 1
"""Variants: a header block, a subject."""

_STRING: Final = 65_535
_ROW: Final = pa.struct(
    [
        ("qos", pa.int8()),
        ("retain", pa.bool_()),
        ("publisher", pa.string()),
        ("content_type", pa.string()),
        ("payload_format", pa.int8()),
        ("response_topic", pa.string()),
        ("correlation_data", pa.binary()),
        ("message_expiry", pa.int64()),
        ("user_properties", pa.list_(pa.struct([("name", pa.string()), ("value", pa.string())]))),
    ]
)


def seeds() -> list[Input]:
    """The blocks of the gateway's target, and subjects."""
    subjects = (b"$MQTT.msgs.a.b", b"$MQTT.msgs.$MQTT_SYS.x", b"$MQTT.msgs./.a//b./_c", b"a", b"", b"\xff.a")
    return [*((BLOCK, block) for _, block in headers.seeds()), *((SUBJECT, one) for one in subjects)]


def check(one: Input, number: int) -> tuple[int, bool]:
    """Any bytes give values that Arrow accepts, without an error; a value that cannot be read is None.

    A block gives the properties that the gateway makes of it for MQTT clients. It gives the same properties without
    the lines that differ in each message. No text has U+0000 in it, or more bytes than an MQTT string. No user
    property has the name of a header that belongs to NATS or to the gateways.
    """
    variant, data = one
    try:
        return _subject(data) if variant == SUBJECT else _block(data)
    except Unexpected:
        raise
    except Exception as error:
        raise Unexpected(f"{type(error).__name__}: {error}") from error


def _subject(data: bytes) -> tuple[int, bool]:
    found = decoding.decode_subject(data, PREFIX.encode())
    pa.array([found.subject, found.topic, *found.topic_levels], pa.string())
    expect("/".join(found.topic_levels) == found.topic, f"{found.topic!r} has the levels {found.topic_levels}")
    return 1, False


def _block(block: bytes) -> tuple[int, bool]:
    row = decoding.decode_headers(block)
    pa.array([_as_row(row)], _ROW)
    pairs = decoding.header_pairs(block)
    expect((pairs is None) == (row.user_properties is None), "one function reads the block, and one does not")
    identifier = decoding.message_id(block)
    expect(identifier is None or len(bytes.fromhex(identifier)) == 16, f"the id {identifier!r}")
    if pairs is None:
        expect(set(row) == {None}, f"of what is no block there is {row}")
        return 0, True
    pa.array([[name for name, _ in pairs]], pa.list_(pa.string()))
    shorter = decoding.without_varying(block)
    expect(len(shorter) <= len(block), "it has become longer")
    expect(decoding.decode_headers(shorter) == row, f"without what varies it is {decoding.decode_headers(shorter)}")
    _as_the_gateway(block[:-2] + b"\r\n", row)  # the end that a direct get does not keep
    return len(pairs), False


def _as_row(row: Decoded) -> dict[str, object]:
    users = None if row.user_properties is None else [{"name": a, "value": b} for a, b in row.user_properties]
    return {**row._asdict(), "user_properties": users}


def _as_the_gateway(block: bytes, row: Decoded) -> None:
    found, expiry = from_headers(block)
    known: Properties = headers.as_packet(found)
    users = row.user_properties or []
    expect(users == known.get("user_property", []), f"the gateway shows {known.get('user_property')}")
    expect(row.content_type == known.get("content_type"), f"the gateway's content type: {known.get('content_type')!r}")
    expect(row.response_topic == known.get("response_topic"), f"the gateway answers to {known.get('response_topic')!r}")
    expect(row.correlation_data == known.get("correlation_data"), "the gateway has other correlation data")
    expect(row.payload_format == known.get("payload_format_indicator"), "the gateway has another payload format")
    expect((-1 if row.message_expiry is None else row.message_expiry) == expiry, f"the gateway's expiry is {expiry}")
    if b" " not in block and b"\t" not in block:
        expect((row.qos or 0) == publish_qos(block), f"the gateway has QoS {publish_qos(block)}")
    for name, value in users:
        expect("\0" not in name + value and len(name.encode()) <= _STRING, f"the user property {name!r}")
        if b"Nmqtt-User" not in block:
            expect(not name.strip(" \t\r\n\v\f").lower().startswith(RESERVED), f"a user property has the name {name!r}")


TARGET: Final = Target(
    "spark-headers",
    (pyspark_mqtt_nats.reading.decoding,),
    seeds,
    check,
    variants=2,
    mutate=of_pieces(*headers.PIECES),
    followed=10,
)
