# SPDX-License-Identifier: Apache-2.0
"""Application messages on their way to subscribers, and the encodings that subscribers share.

A shared encoding has no part that differs between subscribers. It is made at most once for each protocol version and
QoS; :func:`tailored` makes the packet of a subscriber that needs its own.
"""

from __future__ import annotations

from typing import Final

from mqtt_nats.codec import ID, publish_head, put_varint
from mqtt_nats.messages.headers import header, publish_qos, publisher
from mqtt_nats.messages.properties import from_headers
from mqtt_nats.protocol.durable_sender import packet_id
from mqtt_streams.headers import for_line, for_some

EXPIRY: Final = b"\x02"
ALIAS: Final = b"\x23"
SUBSCRIPTION: Final = b"\x0b"
UNNAMED: Final = b"\0\0"
"""The topic of a PUBLISH packet that has only an alias."""

MOMENT: Final = 1.0
"""Seconds within which a message with an expiry interval of 0 still reaches connected subscribers."""


class Message:
    """A message that the subscribers of one gateway share.

    ``key`` is the topic as it stands in a PUBLISH packet, with its two length bytes. Each encoding is made at most
    once for any number of subscribers; only the packet identifier differs between subscribers.
    The publisher's DUP flag is not in the message [MQTT-3.3.1-3] (3.1.1, 5.0).
    """

    __slots__ = ("_heads", "_tail5", "_zero", "_zero5", "key", "payload", "qos", "retain", "sender")

    # Attributes that only some messages have: see Rich.
    body: bytes = b""
    expiry: int = -1
    kept: bool = False
    born: float = 0.0
    identity: str = ""

    def __init__(self, key: bytes, payload: bytes, qos: int, sender: str = "", retain: bool = False) -> None:
        self.key = key
        self.payload = payload
        self.qos = qos
        self.sender = sender
        self.retain = retain
        """RETAIN flag of the packet: the message is a retained one for a new subscription."""
        self._zero = b""
        self._zero5 = b""
        self._tail5 = b""
        self._heads: list[bytes] | None = None

    @property
    def size(self) -> int:
        """Bytes of topic, properties and payload."""
        return len(self.key) + len(self.body) + len(self.payload)

    def zero(self) -> bytes:
        """Return the PUBLISH packet at QoS 0 (3.1.1) [MQTT-2.3.1-5] [MQTT-4.3.1-1]."""
        if not self._zero:
            self._zero = publish_head(0x31 if self.retain else 0x30, self.key, len(self.payload)) + self.payload
        return self._zero

    def zero5(self) -> bytes:
        """Return the PUBLISH packet at QoS 0 [MQTT-2.2.1-2] [MQTT-4.3.1-1] (5.0)."""
        if not self._zero5:
            tail = self.tail5()
            self._zero5 = publish_head(0x31 if self.retain else 0x30, self.key, len(tail)) + tail
        return self._zero5

    def head(self, qos: int) -> bytes:
        """Return the bytes before the packet identifier (3.1.1), DUP clear [MQTT-4.3.2-1] [MQTT-4.3.3-1]."""
        heads = self._heads
        if heads is None:
            heads = self._heads = [b""] * 5
        head = heads[qos]
        if not head:
            flags = 0x30 | qos << 1 | (1 if self.retain else 0)
            head = heads[qos] = publish_head(flags, self.key, 2 + len(self.payload))
        return head

    def head5(self, qos: int) -> bytes:
        """Return the bytes before the packet identifier, DUP clear [MQTT-4.3.2-2] [MQTT-4.3.3-2] (5.0)."""
        heads = self._heads
        if heads is None:
            heads = self._heads = [b""] * 5
        if not heads[qos + 2]:
            flags = 0x30 | qos << 1 | (1 if self.retain else 0)
            heads[qos + 2] = publish_head(flags, self.key, 2 + len(self.tail5()))
        return heads[qos + 2]

    def tail5(self) -> bytes:
        """Return the bytes after the packet identifier (5.0); not for a message that waits while its expiry runs."""
        if not self._tail5:
            self._tail5 = with_properties(self.body, self.expiry, self.payload)
        return self._tail5

    def remaining(self, now: float) -> int:
        """Return the seconds left of the expiry interval at Unix time ``now``; -1 = no expiry."""
        return self.expiry


class Rich(Message):
    """A message with properties, an expiry, or its publisher's RETAIN flag."""

    __slots__ = ("body", "born", "expiry", "kept")

    def __init__(
        self,
        key: bytes,
        payload: bytes,
        qos: int,
        sender: str = "",
        retain: bool = False,
        *,
        body: bytes = b"",
        expiry: int = -1,
        born: float = 0.0,
        kept: bool = False,
    ) -> None:
        super().__init__(key, payload, qos, sender, retain)
        self.body = body
        """Properties as they stand in a PUBLISH packet, without the expiry and the subscriber's own properties."""
        self.expiry = expiry
        """Message expiry interval at ``born``, in seconds; -1 = none."""
        self.born = born
        """Unix time from which the expiry counts."""
        self.kept = kept
        """The publisher has set RETAIN."""

    def remaining(self, now: float) -> int:
        """Return the seconds left of the expiry interval at Unix time ``now``; -1 = no expiry [MQTT-3.3.2-6] (5.0)."""
        return left(self.expiry, self.born, now)


class Stored:
    """A message of a stream that all sessions share: its packet identifier follows from its stream sequence.

    So the whole PUBLISH packet is the same for all subscribers with the same QoS and protocol version.
    """

    __slots__ = (
        "_body",
        "_expiry",
        "_headers",
        "born",
        "identifier",
        "key",
        "packets",
        "packets5",
        "payload",
        "qos",
        "retain",
        "stamp",
        "subject",
        "timed",
    )

    def __init__(
        self,
        subject: str,
        key: bytes,
        payload: bytes,
        qos: int,
        identifier: int,
        retain: bool = False,
        stamp: bytes = b"",
        headers: bytes = b"",
    ) -> None:
        self.subject = subject
        self.key = key
        self.payload = payload
        self.qos = qos
        """QoS of the publish; 0 = not published as an MQTT message at QoS 1 or 2."""
        self.identifier = identifier
        self.retain = retain
        self.stamp = stamp
        """Store time in nanoseconds since 1970, in decimal digits as in the acknowledgement subject."""
        self.timed = b"\r\nNmqtt-Expiry:" in headers or for_some(headers)
        """The message has an expiry, or is for some sessions only, so its packets are not shared."""
        self.born = int(stamp) / 1e9 if self.timed else 0.0
        self.packets: list[bytes] = [b"", b"", b""]
        self.packets5: list[bytes] = [b"", b"", b""]
        self._headers = headers
        self._body: bytes | None = None
        self._expiry = -1

    @property
    def size(self) -> int:
        """Bytes of topic, headers and payload."""
        return len(self.key) + len(self._headers) + len(self.payload)

    @property
    def headers(self) -> bytes:
        """Raw headers of the stored message."""
        return self._headers

    @property
    def body(self) -> bytes:
        """Properties as they stand in a PUBLISH packet; read from the headers at the first use."""
        if self._body is None:
            self._body, self._expiry = from_headers(self._headers) if self._headers else (b"", -1)
        return self._body

    @property
    def expiry(self) -> int:
        """Message expiry interval in seconds; -1 = none."""
        if self.timed and self._body is None:
            self._body, self._expiry = from_headers(self._headers)
        return self._expiry

    @property
    def kept(self) -> bool:
        """The publisher has set RETAIN."""
        return b"\r\nNmqtt-Retain:" in self._headers

    def withheld_from(self, client_id: str) -> bool:
        """Return whether the message is for some sessions only, and not for that of this client id."""
        headers = self._headers
        return self.timed and for_some(headers) and b"\r\n" + for_line(client_id) not in headers

    @property
    def identity(self) -> str:
        """Message id, 32 hex digits; empty = the publisher has given none."""
        return header(self._headers, b"Nmqtt-Id:").decode("latin-1")

    @property
    def sender(self) -> str:
        """Client id of the publisher; empty = not known."""
        return publisher(self._headers)

    def packet(self, qos: int) -> bytes:
        """Return the PUBLISH packet at QoS 1 or 2 (3.1.1), DUP clear [MQTT-4.3.2-1] [MQTT-4.3.3-1]."""
        identifier = self.identifier
        flags = 0x30 | qos << 1 | (1 if self.retain else 0)
        head = publish_head(flags, self.key, 2 + len(self.payload))
        data = self.packets[qos] = b"%b%c%c%b" % (head, identifier >> 8, identifier & 0xFF, self.payload)
        return data

    def packet5(self, qos: int) -> bytes:
        """Return the PUBLISH packet of a message without expiry at QoS 1 or 2, DUP clear (5.0)."""
        flags = 0x30 | qos << 1 | (1 if self.retain else 0)
        tail = with_properties(self.body, -1, self.payload)
        data = self.packets5[qos] = publish_head(flags, self.key, 2 + len(tail)) + ID[self.identifier] + tail
        return data

    def remaining(self, now: float) -> int:
        """Return the seconds left of the expiry interval at Unix time ``now``; -1 = no expiry [MQTT-3.3.2-6] (5.0)."""
        return left(self.expiry, self.born, now)


def stored(subject: str, key: bytes, payload: bytes, sequence: int, stamp: bytes, headers: bytes) -> Stored:
    """Return a message of ``$MQTT_msgs``; ``stamp``: time of its store in nanoseconds since 1970."""
    return Stored(subject, key, payload, publish_qos(headers), packet_id(sequence), False, stamp, headers)


def left(expiry: int, born: float, now: float) -> int:
    """Return the seconds left of an expiry interval that began at ``born``, at least 0; -1 = no expiry."""
    return max(expiry - int(now - born), 0) if expiry > 0 else expiry


def expired(message: Message | Stored, now: float) -> bool:
    """Whether the message has expired at Unix time ``now``: it is not sent any more [MQTT-3.3.2-5] (5.0)."""
    expiry = message.expiry
    return expiry >= 0 and now - message.born >= (expiry if expiry > MOMENT else MOMENT)


def with_properties(body: bytes, expiry: int, payload: bytes) -> bytes:
    """Return the properties with their length, then the payload."""
    if expiry >= 0:
        body = EXPIRY + expiry.to_bytes(4, "big") + body
    if not body:
        return b"\0" + payload
    return put_varint(len(body)) + body + payload


def tailored(
    message: Message | Stored,
    version: int,
    qos: int,
    identifier: int,
    now: float,
    *,
    ids: bytes = b"",
    retain: bool = False,
    dup: bool = False,
    alias: int = 0,
    named: bool = True,
) -> bytes:
    """Return the PUBLISH packet for one subscriber.

    Args:
        identifier: packet identifier; 0 at QoS 0.
        now: Unix time in seconds, for the rest of the expiry interval.
        ids: encoded subscription identifiers [MQTT-3.3.4-3] [MQTT-3.3.4-4] (5.0).
        alias: topic alias, 0 = none; with ``named`` false the packet has no topic.
    """
    first = 0x30 | dup << 3 | qos << 1 | retain
    variable = ID[identifier] if qos else b""
    if version == 5:
        body = ids + message.body
        if alias:
            body = ALIAS + ID[alias] + body
        tail = variable + with_properties(body, message.remaining(now), message.payload)
    else:
        tail = variable + message.payload
    return publish_head(first, message.key if named else UNNAMED, len(tail)) + tail


def encoded_id(identifier: int | None) -> bytes:
    """Return a subscription identifier as a property; empty for none."""
    return b"" if identifier is None else SUBSCRIPTION + put_varint(identifier)
