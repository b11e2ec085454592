# SPDX-License-Identifier: Apache-2.0
"""Sessions and waiting messages in the database of a mosquitto (`mosquitto.db`, format 5 and 6), or a list of sessions.

The database has a header, and chunks behind it: kind and length, a structure with the lengths of texts, the texts. The
numbers that are read here are big endian (persist.h of mosquitto), except times and ids of messages, which have the
order of the machine that has written them.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import MqttError, PacketKind, Properties, Publish, Subscription
from mqtt_nats.codec.properties import place, read_properties
from mqtt_nats.codec.wire import Reader, put_string
from mqtt_nats.ctl.migration.findings import read_lines

MAGIC: Final = b"\x00\xb5\x00mosquitto db"
VERSIONS: Final = (5, 6)

EXPIRY_NEVER: Final = 0xFFFF_FFFF
"""Session expiry interval of a session that does not end; 3.1.1 clients have it."""

_STORED: Final = 2
_WAITING: Final = 3
_SUBSCRIPTION: Final = 5
_CLIENT: Final = 6
_HEADER: Final = struct.Struct(">II")  # kind of the chunk, and its bytes behind this header
_CLIENT_5: Final = struct.Struct(">8sIHH")  # time of its end, session expiry interval, last packet id, bytes of its id
_CLIENT_6: Final = struct.Struct(">8sIHHHH4x")  # the same, port of the listener, bytes of the user name
_SUBSCRIPTION_HEAD: Final = struct.Struct(">IHHBB2x")  # identifier, bytes of client id and filter, QoS, options
_STORED_HEAD: Final = struct.Struct(">8s8sI2xHHH2xBx")  # id, expiry, bytes of payload, source, its user, topic; QoS
_WAITING_HEAD: Final = struct.Struct(">8s2xHBBxB")  # id of the message, bytes of the client id, QoS, state, direction

_OUT: Final = 1
"""Direction of messages for the client; 0: the client has published them at QoS 2, and PUBREL has not come."""

_RECEIVED: Final = (6, 8, 9)
"""States in which the client has the message: its PUBREC has come."""

_NO_LOCAL: Final = 4
_AS_PUBLISHED: Final = 8
_PUBLISH: Final = place(PacketKind.PUBLISH)

Order = Literal["little", "big"]


@dataclass(slots=True)
class Session:
    """A durable session: its user (None: anonymous), and its subscriptions."""

    user: str | None = None
    subscriptions: dict[str, int] = field(default_factory=dict)
    """QoS by filter."""
    options: dict[str, tuple[Subscription, int]] = field(default_factory=dict)
    """Subscriptions with options of 5.0, with their identifier (0: none), by filter."""
    expiry: int | None = None
    """Seconds after which the session ends; None: it is the session of a 3.1.1 client, or never ends."""

    def end_after(self, seconds: int) -> None:
        """Set the seconds after which the session ends."""
        self.expiry = seconds


@dataclass(slots=True)
class Waiting:
    """A message that waits for absent clients."""

    message: Publish
    """As it was published; its message expiry interval is the rest of it."""
    user: str | None
    """User of its publisher; None: anonymous."""
    clients: list[str]


@dataclass(slots=True)
class Database:
    """Sessions by client id, and messages that wait for them in the order of their arrival."""

    sessions: dict[str, Session] = field(default_factory=dict)
    messages: list[Waiting] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """One line for each kind of message of a session that cannot be carried over."""
    expired: int = 0
    """Number of messages whose expiry has passed."""

    def expire(self) -> None:
        """Count a message whose expiry has passed."""
        self.expired += 1


def read_sessions(path: Path) -> Database:
    """Return durable sessions and their messages from a database of mosquitto, or sessions from a text file.

    A line of a text file has the client id, the user (`-`: anonymous), QoS and filter, with tabs between them.

    Raises:
        StartupError: the file cannot be read, or is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    if not data.startswith(MAGIC):
        return Database(_listed(path))
    try:
        return _Reading(data, time.time()).database()
    except (struct.error, ValueError, MqttError) as error:
        raise StartupError(f"{path} is no database of mosquitto that can be read: {error}") from None


def _listed(path: Path) -> dict[str, Session]:
    found: dict[str, Session] = {}
    for number, line in enumerate(read_lines(path), 1):
        if not line or line.startswith("#"):
            continue
        parts = line.split("\t")
        if len(parts) != 4 or parts[2] not in ("0", "1", "2"):
            raise StartupError(f"{path}, line {number}: expected client id, user or -, QoS and filter, with tabs")
        client_id, user, qos, topic_filter = parts
        session = found.setdefault(client_id, Session(None if user == "-" else user))
        session.subscriptions[topic_filter] = int(qos)
    return found


@dataclass(slots=True)
class _Stored:
    message: Publish
    user: str | None
    expiry: bytes
    """Unix time in seconds as it was written; 0: none."""


class _Reading:
    """Reading of a database at a Unix time in seconds."""

    def __init__(self, data: bytes, now: float) -> None:
        self._data = data
        self._now = int(now)
        self._found = Database()
        self._stored: dict[bytes, _Stored] = {}
        """Messages by id as it was written."""
        self._waiting: dict[bytes, list[str]] = {}
        """Client ids by id of the message."""
        self._refused: dict[tuple[str, str], int] = {}
        """Number of messages by client id and why they are not carried over."""
        self._ends: dict[str, tuple[bytes, int]] = {}
        """Time at which a session ends, as it was written, and its expiry interval, by client id."""

    def database(self) -> Database:
        """Return what the database has; raises ValueError, struct.error or MqttError."""
        at = len(MAGIC)
        _, version = struct.unpack_from(">II", self._data, at)  # a checksum that is always 0
        if version not in VERSIONS:
            raise ValueError(f"its format is {version}, and {VERSIONS[0]} and {VERSIONS[1]} are known")
        subscriptions: list[tuple[str, Subscription, int]] = []
        for kind, chunk in _chunks(self._data, at + 8):
            if kind == _CLIENT:
                self._client(chunk, version)
            elif kind == _SUBSCRIPTION:
                subscriptions.append(_subscription(chunk))
            elif kind == _STORED:
                self._message(chunk)
            elif kind == _WAITING:
                self._wait(chunk)
        for client_id, one, identifier in subscriptions:
            session = self._found.sessions.get(client_id)
            if session is not None:
                session.subscriptions[one.topic_filter] = one.qos
                if identifier or one.no_local or one.retain_as_published:
                    session.options[one.topic_filter] = one, identifier
        self._finish(_order(self._waiting))
        return self._found

    def _client(self, chunk: bytes, version: int) -> None:
        if version == 5:
            end, interval, _, size = _CLIENT_5.unpack_from(chunk)
            client_id, user = _text(chunk, _CLIENT_5.size, size), None
        else:
            end, interval, _, size, _, user_size = _CLIENT_6.unpack_from(chunk)
            client_id = _text(chunk, _CLIENT_6.size, size)
            user = _user(chunk[_CLIENT_6.size + size :][:user_size])
        self._found.sessions[client_id] = Session(user)
        self._ends[client_id] = end, interval

    def _message(self, chunk: bytes) -> None:
        identity, expiry, size, source, user_size, topic_size, qos = _STORED_HEAD.unpack_from(chunk)
        if qos > 2:
            raise ValueError(f"QoS is {qos}")
        at = _STORED_HEAD.size + source
        user, at = _user(chunk[at:][:user_size]), at + user_size
        topic, at = _text(chunk, at, topic_size), at + topic_size
        if at + size > len(chunk):
            raise ValueError("a payload is longer than its chunk")
        payload, rest = chunk[at : at + size], chunk[at + size :]
        properties: Properties | None = None
        if rest:
            properties = read_properties(Reader(rest, 0, len(rest)), _PUBLISH, 65_535)
        message = Publish(qos, False, False, put_string(topic), 0, payload, properties)
        self._stored[identity] = _Stored(message, user, expiry)

    def _wait(self, chunk: bytes) -> None:
        identity, size, qos, state, direction = _WAITING_HEAD.unpack_from(chunk)
        client_id = _text(chunk, _WAITING_HEAD.size, size)
        if direction != _OUT:
            self._refuse(client_id, "published at QoS 2 and not released")
        elif state in _RECEIVED:
            return
        elif not qos:
            self._refuse(client_id, "at QoS 0")
        else:
            self._waiting.setdefault(identity, []).append(client_id)

    def _refuse(self, client_id: str, why: str) -> None:
        self._refused[client_id, why] = self._refused.get((client_id, why), 0) + 1

    def _finish(self, order: Order) -> None:
        """Put together what the chunks have; ``order``: that of the machine that has written them."""
        for identity in sorted(self._waiting, key=lambda one: int.from_bytes(one, order)):
            stored = self._stored.get(identity)
            if stored is None:
                for client_id in self._waiting[identity]:
                    self._refuse(client_id, "without its content in the database")
                continue
            message, left = stored.message, int.from_bytes(stored.expiry, order) - self._now
            if any(stored.expiry):
                if left <= 0:
                    self._found.expire()
                    continue
                message = _expiring(message, min(left, EXPIRY_NEVER))
            self._found.messages.append(Waiting(message, stored.user, self._waiting[identity]))
        for client_id, (end, interval) in self._ends.items():
            if interval != EXPIRY_NEVER:
                left = int.from_bytes(end, order) - self._now
                self._found.sessions[client_id].end_after(left if 0 < left < interval else interval)
        for (client_id, why), count in self._refused.items():
            noun = "message" if count == 1 else "messages"
            self._found.lost.append(f"session {client_id!r}: {count} {noun} {why}")


def _expiring(message: Publish, seconds: int) -> Publish:
    properties: Properties = {**(message.properties or {}), "message_expiry_interval": seconds}
    return Publish(message.qos, False, False, message.key, 0, message.payload, properties)


def _order(identities: dict[bytes, list[str]]) -> Order:
    """Return the byte order of ids of messages, which are small in one of both; without any, that of this machine."""
    if not identities:
        return sys.byteorder
    little, big = (max(int.from_bytes(one, order) for one in identities) for order in ("little", "big"))
    return "little" if little <= big else "big"


def _chunks(data: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    while at < len(data):
        kind, length = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        if at + length > len(data):
            raise ValueError("it ends within a chunk")
        yield kind, data[at : at + length]
        at += length


def _user(data: bytes) -> str | None:
    """Return a user name. mosquitto 2.0.11 writes bytes of its memory as the user of a client that has none."""
    try:
        user = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return user if user and user.isprintable() else None


def _subscription(chunk: bytes) -> tuple[str, Subscription, int]:
    identifier, size, filter_size, qos, options = _SUBSCRIPTION_HEAD.unpack_from(chunk)
    at = _SUBSCRIPTION_HEAD.size
    if qos > 2:
        raise ValueError(f"QoS is {qos}")
    topic_filter = _text(chunk, at + size, filter_size)
    one = Subscription(topic_filter, qos, bool(options & _NO_LOCAL), bool(options & _AS_PUBLISHED))
    return _text(chunk, at, size), one, identifier


def _text(chunk: bytes, at: int, size: int) -> str:
    if at + size > len(chunk):
        raise ValueError("a text is longer than its chunk")
    return chunk[at : at + size].decode("utf-8")
