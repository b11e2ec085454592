# SPDX-License-Identifier: Apache-2.0
"""Waiting messages in a database of mosquitto, in both byte orders; and what of them cannot be carried over."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Literal

import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import Subscription
from mqtt_nats.ctl.migration.transfer.mosquitto_db import EXPIRY_NEVER, MAGIC, Database, read_sessions

Order = Literal["little", "big"]

IN, OUT = 0, 1
WAIT_FOR_PUBACK, WAIT_FOR_PUBREC, WAIT_FOR_PUBREL, WAIT_FOR_PUBCOMP, QUEUED = 3, 5, 7, 9, 11


class Writer:
    """Writes a database as a machine of one byte order does."""

    def __init__(self, order: Order) -> None:
        self._order: Order = order
        self._data = MAGIC + struct.pack(">II", 0, 6)

    def _chunk(self, kind: int, data: bytes) -> None:
        self._data += struct.pack(">II", kind, len(data)) + data

    def _number(self, value: int) -> bytes:
        return value.to_bytes(8, self._order)

    def client(self, client_id: str, interval: int = EXPIRY_NEVER, end: int = 0) -> None:
        head = self._number(end) + struct.pack(">IHHHH4x", interval, 0, len(client_id), 1883, 0)
        self._chunk(6, head + client_id.encode())

    def subscription(self, client_id: str, topic_filter: str, identifier: int = 0, options: int = 0) -> None:
        head = struct.pack(">IHHBB2x", identifier, len(client_id), len(topic_filter), 1, options)
        self._chunk(5, head + client_id.encode() + topic_filter.encode())

    def message(self, number: int, topic: str, payload: bytes, *, expiry: int = 0, properties: bytes = b"") -> None:
        head = self._number(number) + self._number(expiry)
        head += struct.pack(">IHHHHHBB", len(payload), 9, 3, 3, len(topic), 1883, 1, 0)
        self._chunk(2, head + b"srcann" + topic.encode() + payload + properties)

    def waits(self, number: int, client_id: str, qos: int = 1, state: int = QUEUED, direction: int = OUT) -> None:
        head = self._number(number) + struct.pack(">HHBBBB", 5, len(client_id), qos, state, 0, direction)
        self._chunk(3, head + client_id.encode())

    def read(self, path: Path) -> Database:
        path.write_bytes(self._data)
        return read_sessions(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mosquitto.db"


@pytest.mark.parametrize("order", ["little", "big"])
def test_messages_and_sessions(path: Path, order: Order) -> None:
    """By the order of arrival, which is that of the ids, with the rest of what expires."""
    now = int(time.time())
    made = Writer(order)
    made.client("a")
    made.client("b", 5000, now + 100)
    made.client("c", 5000, now - 100)
    made.subscription("a", "t/#")
    made.subscription("b", "t/+", 7, 12)
    made.message(300, "t/2", b"second", properties=b"\x07\x26\0\1x\0\1y")
    made.message(260, "t/1", b"first", expiry=now + 1000)
    made.message(270, "t/1", b"expired", expiry=now - 1)
    for number in (260, 270, 300):
        made.waits(number, "a", 2 if number == 300 else 1, WAIT_FOR_PUBACK if number == 260 else QUEUED)
    made.waits(300, "b")
    found = made.read(path)
    assert [(one.message.payload, one.user, one.clients) for one in found.messages] == [
        (b"first", "ann", ["a"]),
        (b"second", "ann", ["a", "b"]),
    ]
    assert 900 < (found.messages[0].message.properties or {})["message_expiry_interval"] <= 1000
    assert found.messages[1].message.properties == {"user_property": [("x", "y")]}
    assert (found.expired, found.lost) == (1, [])
    a, b, c = (found.sessions[name] for name in "abc")
    assert (a.expiry, a.options) == (None, {})
    assert 90 < (b.expiry or 0) <= 100
    assert b.options == {"t/+": (Subscription("t/+", 1, True, True), 7)}
    assert c.expiry == 5000, "it was connected, and its former end does not count"


def test_what_is_not_carried_over(path: Path) -> None:
    """What the client has received is nothing lost; QoS 0, and its own publishes, are."""
    made = Writer("little")
    made.client("a")
    made.message(1, "t", b"x")
    made.waits(1, "a", 2, WAIT_FOR_PUBCOMP)
    made.waits(1, "a", 0)
    made.waits(1, "a", 0)
    made.waits(1, "a", 2, WAIT_FOR_PUBREL, IN)
    made.waits(2, "a")
    found = made.read(path)
    assert found.messages == []
    assert found.lost == [
        "session 'a': 2 messages at QoS 0",
        "session 'a': 1 message published at QoS 2 and not released",
        "session 'a': 1 message without its content in the database",
    ]


def test_an_exchange_without_pubrec_is_carried_over(path: Path) -> None:
    made = Writer("little")
    made.client("a")
    made.message(1, "t", b"x")
    made.waits(1, "a", 2, WAIT_FOR_PUBREC)
    assert len(made.read(path).messages) == 1


def test_damaged_messages(path: Path) -> None:
    made = Writer("little")
    made.message(1, "t", b"x", properties=b"\x7f")
    with pytest.raises(StartupError, match="is no database of mosquitto that can be read"):
        made.read(path)
