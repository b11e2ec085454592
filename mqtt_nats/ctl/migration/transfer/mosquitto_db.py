# SPDX-License-Identifier: Apache-2.0
"""Sessions in the database of a mosquitto (`mosquitto.db`, format 5 and 6), or in a list of sessions.

The database has a header, and chunks behind it: kind and length, a structure with the lengths of texts, the texts. The
numbers that are read here are big endian (persist.h of mosquitto).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mqtt_nats.base.errors import StartupError
from mqtt_nats.ctl.migration.findings import read_lines

MAGIC: Final = b"\x00\xb5\x00mosquitto db"
VERSIONS: Final = (5, 6)

_SUBSCRIPTION: Final = 5
_CLIENT: Final = 6
_HEADER: Final = struct.Struct(">II")  # kind of the chunk, and its bytes behind this header
_CLIENT_5: Final = struct.Struct(">8xIHH")  # session expiry interval, last packet identifier, bytes of the client id
_CLIENT_6: Final = struct.Struct(">8xIHHHH4x")  # the same, port of the listener, bytes of the user name
_SUBSCRIPTION_HEAD: Final = struct.Struct(">IHHBB2x")  # identifier, bytes of client id and filter, QoS, options


@dataclass(slots=True)
class Session:
    """A durable session: its user (None: anonymous), and the QoS of each filter."""

    user: str | None = None
    subscriptions: dict[str, int] = field(default_factory=dict)


def read_sessions(path: Path) -> dict[str, Session]:
    """Return durable sessions by client id, from a database of mosquitto or from a text file.

    A line of a text file has the client id, the user (`-`: anonymous), QoS and filter, with tabs between them.

    Raises:
        StartupError: the file cannot be read, or is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    if not data.startswith(MAGIC):
        return _listed(path)
    try:
        return _sessions(data)
    except (struct.error, ValueError) as error:
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


def _sessions(data: bytes) -> dict[str, Session]:
    at = len(MAGIC)
    _, version = struct.unpack_from(">II", data, at)  # a checksum that is always 0
    if version not in VERSIONS:
        raise ValueError(f"its format is {version}, and {VERSIONS[0]} and {VERSIONS[1]} are known")
    found: dict[str, Session] = {}
    subscriptions: list[tuple[str, str, int]] = []
    for kind, chunk in _chunks(data, at + 8):
        if kind == _CLIENT:
            client_id, user = _client(chunk, version)
            found[client_id] = Session(user)
        elif kind == _SUBSCRIPTION:
            subscriptions.append(_subscription(chunk))
    for client_id, topic_filter, qos in subscriptions:
        if client_id in found:
            found[client_id].subscriptions[topic_filter] = qos
    return found


def _chunks(data: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    while at < len(data):
        kind, length = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        if at + length > len(data):
            raise ValueError("it ends within a chunk")
        yield kind, data[at : at + length]
        at += length


def _client(chunk: bytes, version: int) -> tuple[str, str | None]:
    if version == 5:
        _, _, size = _CLIENT_5.unpack_from(chunk)
        return _text(chunk, _CLIENT_5.size, size), None
    _, _, size, _, user_size = _CLIENT_6.unpack_from(chunk)
    return _text(chunk, _CLIENT_6.size, size), _user(chunk[_CLIENT_6.size + size :][:user_size])


def _user(data: bytes) -> str | None:
    """Return a user name. mosquitto 2.0.11 writes bytes of its memory as the user of a client that has none."""
    try:
        user = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return user if user and user.isprintable() else None


def _subscription(chunk: bytes) -> tuple[str, str, int]:
    _, size, filter_size, qos, _ = _SUBSCRIPTION_HEAD.unpack_from(chunk)
    at = _SUBSCRIPTION_HEAD.size
    if qos > 2:
        raise ValueError(f"QoS is {qos}")
    return _text(chunk, at, size), _text(chunk, at + size, filter_size), qos


def _text(chunk: bytes, at: int, size: int) -> str:
    if at + size > len(chunk):
        raise ValueError("a text is longer than its chunk")
    return chunk[at : at + size].decode("utf-8")
