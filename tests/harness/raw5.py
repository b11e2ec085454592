# SPDX-License-Identifier: Apache-2.0
"""MQTT 5.0 by hand: packets built and taken apart byte by byte, without the product's codec."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from tests.harness import raw
from tests.harness.raw import Raw, Received, field, packet, remaining_length

CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP = 2, 3, 4, 5, 6, 7
SUBACK, UNSUBACK, PINGRESP, DISCONNECT, AUTH = 9, 11, 13, 14, 15

FORMAT, EXPIRY, CONTENT_TYPE, RESPONSE_TOPIC, CORRELATION = 0x01, 0x02, 0x03, 0x08, 0x09
SUBSCRIPTION_ID, SESSION_EXPIRY, ASSIGNED_ID, SERVER_KEEP_ALIVE = 0x0B, 0x11, 0x12, 0x13
METHOD, DATA, PROBLEM_INFORMATION, WILL_DELAY, REQUEST_RESPONSE = 0x15, 0x16, 0x17, 0x18, 0x19
RESPONSE_INFORMATION, SERVER_REFERENCE, REASON_STRING = 0x1A, 0x1C, 0x1F
RECEIVE_MAXIMUM, ALIAS_MAXIMUM, ALIAS = 0x21, 0x22, 0x23
MAXIMUM_QOS, RETAIN_AVAILABLE, USER, MAXIMUM_PACKET_SIZE = 0x24, 0x25, 0x26, 0x27
WILDCARDS, SUBSCRIPTION_IDS, SHARED = 0x28, 0x29, 0x2A

_BYTES = {FORMAT, PROBLEM_INFORMATION, REQUEST_RESPONSE, MAXIMUM_QOS, RETAIN_AVAILABLE, WILDCARDS}
_BYTES |= {SUBSCRIPTION_IDS, SHARED}
_TWO = {SERVER_KEEP_ALIVE, RECEIVE_MAXIMUM, ALIAS_MAXIMUM, ALIAS}
_FOUR = {EXPIRY, SESSION_EXPIRY, WILL_DELAY, MAXIMUM_PACKET_SIZE}
_BINARY = {CORRELATION, DATA}

NO_LOCAL, AS_PUBLISHED = 4, 8
"""Subscription options, to be added to the QoS; Retain Handling is 16 or 32."""


def prop(id: int, value: int | str | bytes | tuple[str, str]) -> bytes:
    """One property."""
    head = bytes((id,))
    if isinstance(value, tuple):
        return head + field(value[0]) + field(value[1])
    if isinstance(value, str | bytes):
        return head + field(value)
    if id == SUBSCRIPTION_ID:
        return head + remaining_length(value)
    return head + value.to_bytes(1 if id in _BYTES else 2 if id in _TWO else 4, "big")


def properties(*parts: bytes) -> bytes:
    """A property list with its length."""
    return remaining_length(sum(map(len, parts))) + b"".join(parts)


def connect(
    client_id: bytes | str = "",
    *parts: bytes,
    clean: bool = True,
    keepalive: int = 60,
    flags: int = 0,
    tail: bytes = b"",
) -> bytes:
    """A CONNECT packet: ``parts`` are properties, ``flags`` go beside Clean Start, ``tail`` follows the client id."""
    head = field("MQTT") + bytes((5, flags | clean << 1)) + keepalive.to_bytes(2, "big")
    return packet(0x10, head + properties(*parts) + field(client_id) + tail)


def will(topic: bytes | str, payload: bytes | str, *parts: bytes) -> bytes:
    """The fields of a will, for ``tail``; flag 4 announces it, with its QoS << 3 and RETAIN 32."""
    return properties(*parts) + field(topic) + field(payload)


def publish(
    topic: bytes | str, payload: bytes = b"", *parts: bytes, qos: int = 0, id: int = 1, flags: int = 0
) -> bytes:
    """A PUBLISH packet; ``flags`` are DUP (8) and RETAIN (1)."""
    identifier = id.to_bytes(2, "big") if qos else b""
    return packet(0x30 | qos << 1 | flags, field(topic) + identifier + properties(*parts) + payload)


def subscribe(*filters: tuple[bytes | str, int], id: int = 1, parts: bytes = b"") -> bytes:
    """A SUBSCRIBE packet of filters with their options."""
    body = b"".join(field(text) + bytes((options,)) for text, options in filters)
    return packet(0x82, id.to_bytes(2, "big") + properties(parts) + body)


def unsubscribe(*filters: bytes | str, id: int = 1, parts: bytes = b"") -> bytes:
    """An UNSUBSCRIBE packet."""
    return packet(0xA2, id.to_bytes(2, "big") + properties(parts) + b"".join(map(field, filters)))


def ack(kind: int, id: int, reason: int | None = None, *parts: bytes) -> bytes:
    """PUBACK, PUBREC, PUBREL or PUBCOMP; without ``reason`` in the short form."""
    body = id.to_bytes(2, "big")
    if reason is not None:
        body += bytes((reason,)) + (properties(*parts) if parts else b"")
    return packet(kind << 4 | (2 if kind == PUBREL else 0), body)


def disconnect(reason: int | None = None, *parts: bytes) -> bytes:
    """A DISCONNECT packet; without ``reason`` in the short form."""
    return packet(0xE0, b"" if reason is None else bytes((reason,)) + properties(*parts))


def auth(reason: int, *parts: bytes) -> bytes:
    """An AUTH packet."""
    return packet(0xF0, bytes((reason,)) + properties(*parts))


class Answer(NamedTuple):
    """A packet of the gateway's, taken apart."""

    kind: int
    id: int
    """Packet identifier; for CONNACK its flags; 0 where there is none."""
    reasons: tuple[int, ...]
    """Reason codes; one except in SUBACK and UNSUBACK."""
    properties: list[tuple[int, Any]]

    @property
    def reason(self) -> int:
        """The only reason code."""
        (one,) = self.reasons
        return one

    def get(self, id: int) -> Any:
        """The value of a property that may stand once; None without it."""
        values = [value for found, value in self.properties if found == id]
        assert len(values) < 2, self
        return values[0] if values else None


class Message(NamedTuple):
    """A PUBLISH of the gateway's, taken apart."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    dup: bool
    id: int
    properties: list[tuple[int, Any]]

    def all(self, id: int) -> list[Any]:
        """The values of a property, in order."""
        return [value for found, value in self.properties if found == id]

    def get(self, id: int) -> Any:
        """The value of a property that may stand once; None without it."""
        values = self.all(id)
        assert len(values) < 2, self
        return values[0] if values else None


def _number(data: bytes, at: int) -> tuple[int, int]:
    """(value, offset after it) of a variable byte integer, which must be as short as it can."""
    value = shift = 0
    start = at
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            assert remaining_length(value) == data[start:at], "a length takes more bytes than it needs"
            return value, at


def _field(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + 2 + int.from_bytes(data[at : at + 2], "big")
    assert end <= len(data), "a field ends after its packet"
    return data[at + 2 : end], end


def _properties(data: bytes, at: int) -> tuple[list[tuple[int, Any]], int]:
    length, at = _number(data, at)
    end = at + length
    assert end <= len(data), "properties end after their packet"
    found: list[tuple[int, Any]] = []
    while at < end:
        id, at = _number(data, at)
        value: Any
        if id == SUBSCRIPTION_ID:
            value, at = _number(data, at)
        elif id in _BYTES | _TWO | _FOUR:
            size = 1 if id in _BYTES else 2 if id in _TWO else 4
            value, at = int.from_bytes(data[at : at + size], "big"), at + size
        elif id == USER:
            name, at = _field(data, at)
            text, at = _field(data, at)
            value = (name.decode(), text.decode())
        else:
            value, at = _field(data, at)
            if id not in _BINARY:
                value = value.decode()
        found.append((id, value))
    assert at == end, "a property ends after the properties"
    return found, end


def answer(one: Received) -> Answer:
    """Take a packet apart that is not PUBLISH."""
    body = one.body
    if one.kind == PINGRESP:
        assert one.first == 0xD0
        assert not body
        return Answer(one.kind, 0, (), [])
    assert one.first == one.kind << 4 | (2 if one.kind == PUBREL else 0), one
    if one.kind in (DISCONNECT, AUTH):
        found, end = _properties(body, 1) if len(body) > 1 else ([], len(body))
        assert end == len(body), one
        return Answer(one.kind, 0, (body[0] if body else 0,), found)
    if one.kind == CONNACK:
        found, end = _properties(body, 2)
        assert end == len(body), one
        return Answer(one.kind, body[0], (body[1],), found)
    id = int.from_bytes(body[:2], "big")
    if one.kind in (SUBACK, UNSUBACK):
        found, end = _properties(body, 2)
        return Answer(one.kind, id, tuple(body[end:]), found)
    found, end = _properties(body, 3) if len(body) > 3 else ([], len(body))
    assert end == len(body), one
    return Answer(one.kind, id, (body[2] if len(body) > 2 else 0,), found)


def message(one: Received) -> Message:
    """Take a PUBLISH apart."""
    assert one.kind == PUBLISH, one
    topic, at = _field(one.body, 0)
    id = 0
    if one.qos:
        id, at = int.from_bytes(one.body[at : at + 2], "big"), at + 2
        assert id, "packet identifier 0"
    found, at = _properties(one.body, at)
    return Message(topic.decode(), one.body[at:], one.qos, bool(one.first & 1), bool(one.first & 8), id, found)


class Raw5(Raw):
    """A TCP connection of a 5.0 client to a gateway."""

    connack: Answer

    @classmethod
    def open(
        cls,
        port: int,
        client_id: bytes | str = "",
        *parts: bytes,
        clean: bool = True,
        keepalive: int = 60,
        flags: int = 0,
        tail: bytes = b"",
    ) -> Self:
        """A connection whose CONNECT was accepted."""
        client = cls(port)
        try:
            client.send(connect(client_id, *parts, clean=clean, keepalive=keepalive, flags=flags, tail=tail))
            client.connack = client.answer(CONNACK)
            assert client.connack.reason == 0, client.connack
        except AssertionError:
            client.close()
            raise
        return client

    @property
    def present(self) -> bool:
        """Session present."""
        return self.connack.id == 1

    def answer(self, kind: int, id: int | None = None, reason: int | None = None) -> Answer:
        """The next packet, which must be of ``kind`` and have this packet identifier and reason code."""
        found = answer(self.expect(kind))
        assert id is None or found.id == id, found
        assert reason is None or found.reasons == (reason,), found
        return found

    def expect_one_of(self, *kinds: int) -> int:
        """The next packet, which must be of one of these kinds; which it is."""
        one = self.receive()
        assert one is not None, f"the gateway closed instead of sending one of {kinds}"
        assert one.kind in kinds, one
        return one.kind

    def message(self, payload: bytes | None = None) -> Message:
        """The next packet, which must be a PUBLISH and have this payload."""
        found = message(self.expect(PUBLISH))
        assert payload is None or found.payload == payload, found
        return found

    def receive_message(self, payload: bytes | None = None) -> Message:
        """:meth:`message`, acknowledged by the whole handshake."""
        found = self.message(payload)
        if found.qos == 1:
            self.send(ack(PUBACK, found.id))
        elif found.qos == 2:
            self.send(ack(PUBREC, found.id))
            self.released(found.id)
            self.send(ack(PUBCOMP, found.id))
        return found

    def released(self, id: int) -> None:
        """Wait for a PUBREL; messages that come before it are received later."""
        found = answer(self._past_messages("PUBREL"))
        assert found == (PUBREL, id, (0,), []), found

    def messages(self) -> list[Message]:
        """What has come until a ping is answered, all of it PUBLISH."""
        return [message(one) for one in self.ping()]

    def quiet(self) -> None:
        """Nothing but the answer to a ping may come."""
        assert self.ping() == []

    def deliver(self, topic: bytes | str, payload: bytes, *parts: bytes, qos: int = 1, flags: int = 0) -> None:
        """Publish and see it acknowledged, by the whole handshake and nothing else."""
        self.send(publish(topic, payload, *parts, qos=qos, flags=flags))
        if qos == 0:
            self.quiet()
        elif qos == 1:
            assert self.answer(PUBACK, 1).reason in (0, 0x10)
        else:
            assert self.answer(PUBREC, 1).reason in (0, 0x10)
            self.send(ack(PUBREL, 1))
            self.answer(PUBCOMP, 1, 0)

    def subscribed(self, *filters: tuple[bytes | str, int], id: int = 1, parts: bytes = b"") -> tuple[int, ...]:
        """Subscribe; the reason codes of SUBACK. Messages that come before it, as they may, are received later."""
        self.send(subscribe(*filters, id=id, parts=parts))
        found = answer(self._past_messages("SUBACK"))
        assert (found.kind, found.id) == (SUBACK, id), found
        return found.reasons

    def _past_messages(self, what: str) -> Received:
        early: list[Received] = []
        while (one := self.receive()) is not None and one.kind == PUBLISH:
            early.append(one)
        assert one is not None, f"the gateway closed instead of sending {what}"
        self._early = early + self._early
        return one

    def ended(self, reason: int) -> Answer:
        """The gateway must send DISCONNECT with this reason code, and nothing else, and close."""
        (one,) = self.expect_closed()
        found = answer(one)
        assert (found.kind, found.reason) == (DISCONNECT, reason), found
        return found


def refused(port: int, data: bytes, reason: int) -> Answer:
    """Send ``data``, a CONNECT that must be answered with this reason code and nothing else, and closed."""
    with Raw5(port) as client:
        client.send(data)
        (one,) = client.expect_closed()
        found = answer(one)
        assert (found.kind, found.reason) == (raw.CONNACK, reason), found
        return found
