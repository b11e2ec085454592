# SPDX-License-Identifier: Apache-2.0
"""What a server adds to the headers of a message that a direct get has brought."""

from typing import Any

import pytest

from mqtt_streams.api import Reply
from mqtt_streams.stored import StoredMessage, direct_get_last

ADDED = b"Nats-Stream: s\r\nNats-Subject: a.b\r\nNats-Sequence: 7\r\nNats-Time-Stamp: 1970-01-01T00:00:01.5Z\r\n"
FORGED = b"Nats-Stream: x\r\nNats-Subject: c\r\nNats-Sequence: 9\r\nNats-Time-Stamp: 1970-01-01T00:00:09Z\r\n"
OTHERWISE = b"Nats-Time-Stamp:1970-01-01T00:00:01.5Z\r\nNats-Sequence:7\r\nNats-Subject:a.b\r\n"


class Server:
    """Answers every request with one block of headers."""

    api_prefix = "$JS.API"
    max_ack_pending = 0

    def __init__(self, lines: bytes) -> None:
        self.block = b"NATS/1.0\r\n" + lines + b"\r\n"

    async def request(self, *_: object, **__: object) -> Reply:
        return Reply("", self.block, b"x", "")


@pytest.mark.parametrize(
    ("lines", "own"),
    [
        (ADDED, b""),
        (b"A: b\r\n" + ADDED + b"Nats-Num-Pending: 0\r\n", b"NATS/1.0\r\nA: b\r\n\r\n"),
        (FORGED + ADDED, b"NATS/1.0\r\n" + FORGED + b"\r\n"),
        (b"A: b\r\n" + OTHERWISE, b"NATS/1.0\r\nA: b\r\n" + OTHERWISE + b"\r\n"),
        (FORGED + OTHERWISE, b"NATS/1.0\r\n" + FORGED + OTHERWISE + b"\r\n"),
    ],
    ids=["alone", "with others", "forged", "in another order", "in another order, forged"],
)
async def test_where_a_message_is_from(lines: bytes, own: bytes) -> None:
    server: Any = Server(lines)
    expected = StoredMessage("a.b", 7, 1_500_000_000, own, b"x")
    assert await direct_get_last(server, "s", "a.b") == expected
