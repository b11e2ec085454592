# SPDX-License-Identifier: Apache-2.0
"""Rows as the frames that a gateway would send to NATS for the same publish (docs/nats.md).

A message at QoS 1 or 2 has a bare copy on the topic's subject, for those who are connected, and a stored one, for
durable sessions. Both have the same identifier: JetStream drops a stored copy that it has, and gateways a bare copy.
"""

import secrets
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from mqtt_streams.headers import PUB_LINES, START
from mqtt_streams.properties import STAY, Properties, header_lines, ttl_line
from mqtt_streams.retained import retained_subject, set_block, tombstone_block
from mqtt_streams.subjects import MAX_TOPIC_BYTES, topic_to_subject

STRING_MOST: Final = 65_535
"""Bytes of an MQTT string, or of correlation data."""

USERS_MOST: Final = 1024
"""User properties of one message that gateways show."""

EXPIRY_MOST: Final = 0xFFFF_FFFF
"""Largest message expiry interval (seconds)."""

REPLY_MOST: Final = 200
"""Longest Response Topic that is also the reply subject (bytes), as in gateways."""

LINE_MOST: Final = 4000
"""Longest control line, in bytes: nats-server ends the connection over one of more than 4096."""

RETAIN_LINE: Final = b"Nmqtt-Retain:1\r\n"

_TOPICS_MOST: Final = 16_384


class Refused(Exception):
    """A row cannot be published: `column` is the one to change."""

    def __init__(self, column: str, text: str) -> None:
        super().__init__(f"column {column}: {text}")
        self.column = column


class Target(NamedTuple):
    """A topic, and the beginnings of the frames for it. `bare` and `stored` are for messages with headers."""

    topic: str
    subject: bytes
    plain: bytes
    bare: bytes
    stored: bytes
    retained: bytes


class Message(NamedTuple):
    """A row, checked. `lines`: header lines of its properties, `stay` of the stored copy, `ttl` of the retained one.

    `reply`: where NATS clients answer, with a space after it.
    """

    target: Target
    payload: bytes
    qos: int
    retain: bool
    lines: bytes = b""
    stay: bytes = b""
    ttl: bytes = b""
    reply: bytes = b""


class Frames(NamedTuple):
    """What is sent for a row, in this order; b"" where there is none. JetStream acknowledges all but `bare`."""

    retained: bytes
    bare: bytes
    stored: bytes


def check_topic(topic: str) -> str:
    """The subject of a topic that MQTT clients may publish on; raises ValueError."""
    if not topic:
        raise ValueError("it is empty")
    if "+" in topic or "#" in topic:
        raise ValueError(f"{_short(topic)} has a wildcard, + or #")
    if "\0" in topic:
        raise ValueError(f"{_short(topic)} has a NUL")
    if len(topic) > MAX_TOPIC_BYTES // 4 and len(topic.encode()) > MAX_TOPIC_BYTES:
        raise ValueError(f"{_short(topic)} is longer than {MAX_TOPIC_BYTES} bytes")
    try:
        return topic_to_subject(topic)
    except ValueError as error:
        raise ValueError(f"{_short(topic)}: {error}") from None


class Encoder:
    """Makes messages of rows, and frames of messages.

    `prefix`: of the stream's subjects. `inbox`: subject with a dot at its end, below which acknowledgements come.
    `max_payload`: of the server, headers included. `topic`, `qos`, `retain`: of rows that have none.
    """

    def __init__(
        self, prefix: str, inbox: bytes, max_payload: int, topic: str | None = None, qos: int = 1, retain: bool = False
    ) -> None:
        self.max_payload = max_payload
        self._prefix = prefix
        self._inbox = inbox
        self._topic = topic
        self._qos = qos
        self._retain = retain
        self._origin = secrets.token_hex(4)  # nats-server's listeners pass over what they have written themselves
        self._targets: dict[str, Target] = {}

    def message(self, row: tuple[Any, ...]) -> Message:
        """The message of a row, whose values are in the order of the writable columns; raises Refused."""
        topic, payload, qos, retain, kind, indicator, response, correlation, expiry, users = row
        if topic is None:
            topic = self._topic
        target = self._targets.get(topic)
        if target is None:
            target = self._target(topic)
        if payload is None:
            raise Refused("payload", "it is null; an empty payload is not")
        if type(payload) is str:
            payload = payload.encode()
        if qos is None:
            qos = self._qos
        elif not 0 <= qos <= 2:
            raise Refused("qos", f"{qos} is not 0, 1 or 2")
        if retain is None:
            retain = self._retain
        properties: Properties = {}
        if kind is not None:
            properties["content_type"] = _string("content_type", kind)
        if indicator is not None:
            properties["payload_format_indicator"] = _indicator(indicator, payload)
        if response is not None:
            properties["response_topic"] = response
        if correlation is not None:
            properties["correlation_data"] = _correlation(correlation)
        if expiry is not None:
            if not 0 <= expiry <= EXPIRY_MOST:
                raise Refused("message_expiry", f"{expiry} is not between 0 and {EXPIRY_MOST} (seconds)")
            properties["message_expiry_interval"] = expiry
        if users:
            properties["user_property"] = _users(users)
        if not properties:
            return Message(target, payload, qos, retain)
        stay = ttl = reply = b""
        if response is not None:
            subject = self._answered(response)
            if qos == 0 and correlation is None and len(subject) <= REPLY_MOST:
                reply = subject + b" "
        if expiry is not None:
            stay = b"Nats-TTL:%ds\r\n" % (expiry + STAY)
            ttl = ttl_line(properties)
        return Message(target, payload, qos, retain, header_lines(properties), stay, ttl, reply)

    def _target(self, topic: str | None) -> Target:
        if topic is None:
            raise Refused("topic", "it is null, and there is no option topic")
        try:
            subject = check_topic(topic)
        except ValueError as error:
            raise Refused("topic", str(error)) from None
        target = Target(
            topic,
            subject.encode(),
            f"PUB {subject} ".encode(),
            f"HPUB {subject} ".encode(),
            b"HPUB %b %b" % (f"{self._prefix}{subject}".encode(), self._inbox),
            b"HPUB %b %b" % (retained_subject(subject).encode(), self._inbox),
        )
        if max(map(len, target[2:])) > LINE_MOST:
            raise Refused("topic", f"{_short(topic)} is too long for NATS")
        if len(self._targets) >= _TOPICS_MOST:
            self._targets.clear()
        self._targets[topic] = target
        return target

    def _answered(self, topic: str) -> bytes:
        try:
            return check_topic(topic).encode()
        except ValueError as error:
            raise Refused("response_topic", str(error)) from None

    def frames(self, message: Message, identity: bytes, token: int) -> Frames:
        """What is sent for a message; raises Refused for one that is too large.

        `identity`: 32 hex digits. The acknowledgement of the retained copy comes below the inbox under `token`, that of
        the stored one under the next number.
        """
        target, payload, qos, retain, lines, stay, _, reply = message
        if not retain and not lines and not qos:
            self._fits(len(payload))
            return Frames(b"", b"%b%d\r\n%b\r\n" % (target.plain, len(payload), payload), b"")
        retained = b""
        if retain:
            retained = self._retained(message, identity, token)
            lines += RETAIN_LINE
        first = b"%b%b" % (START, PUB_LINES[qos])
        if qos:
            first = b"%bNmqtt-Id:%b\r\nNats-Msg-Id:%b\r\n" % (first, identity, identity)
        head = b"%b%b" % (first, lines)
        stated = b"%bNmqtt-Subject:%b\r\n" % (head, target.subject) if qos else head
        size = len(stated) + 2
        total = size + len(payload)
        self._fits(max(total, len(head) + len(stay) + 2 + len(payload)))
        bare = b"%b%b%d %d\r\n%b\r\n%b\r\n" % (target.bare, reply, size, total, stated, payload)
        if not qos:
            return Frames(retained, bare, b"")
        size = len(head) + len(stay) + 2
        total = size + len(payload)
        stored = b"%b%x %d %d\r\n%b%b\r\n%b\r\n" % (target.stored, token + 1, size, total, head, stay, payload)
        return Frames(retained, bare, stored)

    def _retained(self, message: Message, identity: bytes, token: int) -> bytes:
        """The record of the retained message, or, with an empty payload, the tombstone that clears the topic."""
        target, payload, qos = message[:3]
        lines = b"Nats-Msg-Id:%b\r\n" % identity
        if payload:
            lines = b"%b%b%b" % (lines, message.lines, message.ttl)
            headers = set_block(target.topic, qos << 1 | 1, self._origin, lines)
        else:
            headers = tombstone_block(target.topic, self._origin, lines)
        size = len(headers)
        total = size + len(payload)
        self._fits(total)
        return b"%b%x %d %d\r\n%b%b\r\n" % (target.retained, token, size, total, headers, payload)

    def _fits(self, size: int) -> None:
        most = self.max_payload
        if size > most:
            raise Refused("payload", f"the message has {size} bytes with its headers; the server takes {most}")


class Identities:
    """Identifiers of the rows of one partition of one write: the same ones whenever the task is run.

    Those of `next` are made of what is in a row, and how many like it came before, not of its number: after a shuffle
    a task that is run again may have its rows in another order. Equal rows are counted in blocks, so that memory is
    bounded.
    """

    BLOCK: Final = 131_072

    def __init__(self, query: str, epoch: str, partition: int) -> None:
        self._query = blake2b(query.encode(), digest_size=16).digest()
        self._scope = f"{partition}\0{epoch}".encode()
        self._salt = b""
        self._number = 0
        self._seen: dict[bytes, int] = {}

    def next(self, message: Message) -> bytes:
        """The identifier of the next row at QoS 1 or 2, or retained: 32 hex digits."""
        if not self._number % self.BLOCK:
            block = b"%d\0%b" % (self._number // self.BLOCK, self._scope)
            self._salt = blake2b(block, digest_size=16).digest()
            self._seen.clear()
        self._number += 1
        digest = self._digest(_content(message))
        before = self._seen.get(digest, 0)
        self._seen[digest] = before + 1
        if before:
            digest = self._digest(b"\0%b%d" % (digest, before))  # no subject begins with NUL
        return digest.hex().encode()

    def of(self, message: Message, sequence: int, stored: int) -> bytes:
        """The identifier of a message of an archive, by its place there: whatever is published before it."""
        return self._digest(b"\0%d %d\0%b" % (sequence, stored, _content(message))).hex().encode()

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=16, person=self._query, salt=self._salt).digest()


def _content(message: Message) -> bytes:
    target, payload, qos, retain, lines = message[:5]
    return b"%b\0%d%d%d\0%b%b" % (target.subject, qos, retain, len(lines), lines, payload)


def _short(topic: str) -> str:
    return repr(topic if len(topic) <= 80 else topic[:77] + "...")


def _string(column: str, value: str) -> str:
    if "\0" in value:
        raise Refused(column, "it has a NUL")
    if len(value) > STRING_MOST // 4 and len(value.encode()) > STRING_MOST:
        raise Refused(column, f"it is longer than {STRING_MOST} bytes")
    return value


def _indicator(value: int, payload: bytes) -> int:
    if value not in (0, 1):
        raise Refused("payload_format", f"{value} is not 0 or 1")
    if value:
        try:
            payload.decode()
        except UnicodeDecodeError:
            raise Refused("payload_format", "it is 1, but the payload is not UTF-8 text") from None
    return value


def _correlation(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    if len(raw) > STRING_MOST:
        raise Refused("correlation_data", f"it is longer than {STRING_MOST} bytes")
    return raw


def _users(pairs: list[dict[str, str | None] | None]) -> list[tuple[str, str]]:
    column = "user_properties"
    if len(pairs) > USERS_MOST:
        raise Refused(column, f"there are {len(pairs)}, and at most {USERS_MOST} arrive")
    found = []
    for pair in pairs:
        key, value = (None, None) if pair is None else (pair["key"], pair["value"])
        if key is None or value is None:
            raise Refused(column, "an entry is null: expected a key and a value")
        found.append((_string(column, key), _string(column, value)))
    return found
