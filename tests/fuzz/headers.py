# SPDX-License-Identifier: Apache-2.0
"""Mutated header blocks of NATS messages, as the gateway reads them."""

from __future__ import annotations

from typing import Final

import mqtt_nats.messages.headers
import mqtt_nats.messages.properties
import mqtt_streams.headers
import mqtt_streams.properties
import mqtt_streams.qos2
from mqtt_nats.codec import Limits, Properties, Publish, publish_head, put_varint
from mqtt_nats.messages.headers import header, identity, is_status, publish_qos, publisher
from mqtt_nats.messages.properties import body, from_headers
from mqtt_streams import headers as names
from mqtt_streams import qos2
from mqtt_streams.properties import RESERVED, header_lines, ttl_line
from mqtt_streams.properties import Properties as Travelling
from mqtt_streams.stored import StoredMessage
from tests.codec.support import decoder, key
from tests.fuzz.engine import Input, Target, Unexpected, expect
from tests.fuzz.mutation import of_pieces

_LIMITS: Final = Limits(
    max_packet_size=1 << 20, connect_packet_size=1 << 16, max_topic_levels=9, max_filters=9, max_user_properties=5000
)
_OWN: Final = frozenset(
    name.encode()
    for name in (
        *(names.EXPIRY, names.FORMAT, names.CONTENT_TYPE, names.CONTENT_TYPE_ENCODED, names.REPLY, names.CORRELATION),
        names.USER,
    )
)
"""What properties are written as, beside user properties under their own names."""

_BLANKS: Final = " \t\r\n\v\f"
"""What a client library may take off the name of a header."""

PIECES: Final = (
    *(b"\r\n", b"\r\n\r\n", b"\r", b"\n", b":", b" ", b"\t", b"NATS/1.0", b"NATS/1.0 503\r\n", b"=", b"%00", b"%0d%0A"),
    *(b"Nmqtt-Pub:1", b"Nmqtt-Pub:25", b"Nmqtt-Id:", b"Nmqtt-Client:", b"Nmqtt-Expiry:", b"4294967295", b"4294967296"),
    *(b"Nmqtt-Format:1", b"Content-Type:", b"content-type:", b"Nmqtt-Content-Type:", b"Nmqtt-Reply:", b"Nmqtt-User:"),
    *(b"Nmqtt-Correlation:", b"AAE=", b"Nmqtt-Retain:1", b"Nmqtt-Subject:", b"Nmqtt-Epoch:", b"Nats-Msg-Id:q2-1"),
    *(b"nats-x:", b"NMQTT-x:", b" Nats-TTL:", b"Status:", b"+", b"#", b"%ff", b"%F0%9F%98%80", b"\xc2\x80", b"\xff"),
    *(b"\xe2\x80\xa8", b"\xef\xbf\xbf", b"\xd9\xa1", b"\xc2\xa0", b"\x1c", b"\x85", b"0", b"9" * 20),
)


def seeds() -> list[Input]:
    """Blocks of gateways, of nats-server and of other NATS clients."""
    properties: Travelling = {
        "payload_format_indicator": 1,
        "message_expiry_interval": 60,
        "content_type": "text/plain",
        "response_topic": "a b/+é".replace("+", ""),
        "correlation_data": b"\0\1\xff",
        "user_property": [("name", "value"), ("name", ""), ("x", "é")],
    }
    unsafe: Travelling = {"content_type": " a", "user_property": [("nats-x", "1"), ("a b", "c=d\n")]}
    start = b"NATS/1.0\r\n"
    own = b"Nmqtt-Pub:1\r\nNmqtt-Id:%032x\r\nNmqtt-Client:cl%%2Fient\r\n" % 77
    return [
        (0, one)
        for one in (
            b"",
            start + b"\r\n",
            start + own + b"\r\n",
            start + own + header_lines(properties) + ttl_line(properties) + b"\r\n",
            start + own + header_lines(unsafe) + b"\r\n",
            start + b"Nmqtt-RTopic:a\r\nNmqtt-RFlags:1\r\nNmqtt-ROrigin:x\r\nNmqtt-Client:c\r\n\r\n",
            start + b"Nmqtt-Pub: 2\r\nNats-Msg-Id:q2-5\r\nNmqtt-Retain:1\r\n\r\n",
            start + b"Key: value\r\nkey:  other \r\nContent-Type: a\r\ncontent-type: b\r\n\r\n",
            qos2.held_block(b"a.b", 5, 17, b"0" * 32),
            b"NATS/1.0 404 No Messages\r\n\r\n",
            b"NATS/1.0 503\r\n\r\n",
        )
    ]


def check(one: Input, number: int) -> tuple[int, bool]:
    """Any bytes are read without an error, and both functions that read them agree.

    The properties that were read are legal in a PUBLISH packet. No user property has the name of a header that
    belongs to NATS or to the gateways. Properties that are written as headers and read again are the same. Each
    header that is written is one line, and has no such name either.
    """
    _, block = one
    try:
        found, expiry = from_headers(block)
        _read(block)
    except Unexpected:
        raise
    except Exception as error:
        raise Unexpected(f"{type(error).__name__}: {error}") from error
    expect(-1 <= expiry <= 0xFFFF_FFFF, f"the expiry is {expiry}")
    properties = as_packet(found)
    expect(body(properties) == found, f"as a packet has them they are {body(properties)!r}")
    for name, _value in properties.get("user_property", ()):
        if b"Nmqtt-User" not in block:
            expect(not name.strip(_BLANKS).lower().startswith(RESERVED), f"a user property has the name {name!r}")
    travelling: Travelling = {**properties}  # type: ignore[typeddict-unknown-key]  # these travel
    if expiry >= 0:
        travelling["message_expiry_interval"] = expiry
    lines = header_lines(travelling)
    _check_lines(lines, travelling)
    again = from_headers(names.START + lines + ttl_line(travelling) + names.END)
    expect(again == (found, expiry), f"written as {lines!r} they are {again}")
    return len(properties), not found


def as_packet(found: bytes) -> Properties:
    """The properties of a PUBLISH packet with these bytes.

    Raises:
        Unexpected: a client would refuse it.
    """
    tail = put_varint(len(found)) + found
    reader = decoder(5, "server", _LIMITS)
    packets = reader.feed(publish_head(0x30, key("a"), len(tail)) + tail)
    expect(reader.error is None and len(packets) == 1, f"{found!r} is not legal in a packet: {reader.error!r}")
    packet = packets[0]
    return (packet.properties if isinstance(packet, Publish) else None) or {}


def _read(block: bytes) -> None:
    """What single headers are, by each function that reads them."""
    pairs = names.parse(block)
    first: dict[str, str] = {}
    last: dict[str, str] = {}
    for name, value in pairs:
        first.setdefault(name, value)
        last[name] = value
    for name in (names.PUB, names.ID, names.CLIENT, names.EPOCH, names.SUBJECT, names.MSG_ID, names.EXPIRY):
        expect(names.get(block, name) == first.get(name), f"the first {name} is {names.get(block, name)!r}")
        expect(names.get_last(block, name) == last.get(name), f"the last {name} is {names.get_last(block, name)!r}")
        count = names.get_int(block, name)
        expect(count is None or 0 <= count < 10**19, f"{name} is the number {count}")
    qos = publish_qos(block)
    expect(qos in (0, 1, 2), f"the QoS is {qos}")
    expect(not qos or first[names.PUB][0] == str(qos), f"the QoS is {qos}, the header {first.get(names.PUB)!r}")
    known = identity(block)
    expect(known == header(block, b"Nmqtt-Id:") or known.startswith((b"q2-", b"will-")), f"the identity is {known!r}")
    expect(b"\r\n" not in known, "the identity has a line end")
    publisher(block).encode(errors="surrogatepass")
    expect(not (is_status(block) and block.startswith(b"NATS/1.0\r")), "a block without a status has one")
    code = names.status(block)
    expect(code is None or 0 <= code <= 999, f"the status is {code}")
    held = qos2.parse(StoredMessage("$MQTT.qos2.in.x.7", 1, 1, block, b""))
    if held is not None:
        expect(held.packet_id == 7 and 0 <= held.flags <= 15 and held.subject, f"it is held as {held}")


def _check_lines(lines: bytes, properties: Travelling) -> None:
    """That each line is one header, of a property or a user property."""
    users = {name.encode() for name, _ in properties.get("user_property", ())}
    for line in lines.split(b"\r\n")[:-1]:
        name, colon, value = line.partition(b":")
        expect(colon and not {13, 10, 0} & set(line), f"the line {line!r}")
        expect(name in _OWN or name in users, f"a header {name!r}")
        expect(name in _OWN or not name.lower().startswith(tuple(one.encode() for one in RESERVED)), f"{name!r}")
        expect(value == value.strip(), f"the value {value!r}")


TARGET: Final = Target(
    "headers",
    (
        mqtt_nats.messages.headers,
        mqtt_nats.messages.properties,
        mqtt_streams.headers,
        mqtt_streams.properties,
        mqtt_streams.qos2,
    ),
    seeds,
    check,
    mutate=of_pieces(*PIECES),
)
