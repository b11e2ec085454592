# SPDX-License-Identifier: Apache-2.0
"""Messages of chaos clients: their payloads, wills, and those that are not acknowledged yet."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mqtt_nats.codec import Properties, Will

Message = tuple[str, int]
"""Publisher, and number; the negative number of its connection for a will."""


@dataclass(slots=True)
class Outgoing:
    """A message that is not acknowledged."""

    topic: str
    n: int
    qos: int
    retain: bool
    properties: Properties | None
    payload: bytes
    released: bool = False
    sent: bool = False


@dataclass
class ClientWill:
    """The will that every connection of a client has; its payload names the connection."""

    topic: str
    qos: int = 1
    retain: bool = False
    delay: int = 0
    """Seconds (5.0)."""

    def packet(self, client_id: str, connection: int, version: int) -> Will:
        """The will for CONNECT of one connection."""
        delay: Properties | None = {"will_delay_interval": self.delay} if version == 5 else None
        return Will(self.topic, payload_of(client_id, -connection), self.qos, self.retain, delay)


def payload_of(publisher: str, n: int, size: int = 0) -> bytes:
    """The payload of a message: who, number, time in ns; filled up to ``size`` bytes."""
    return (b"%b %d %d " % (publisher.encode(), n, time.monotonic_ns())).ljust(size, b".")


def parse_payload(payload: bytes) -> tuple[str, int] | None:
    """(publisher, number) of a payload; None when it is not one of ours."""
    parts = payload.split(b" ", 3)
    if len(parts) != 4:
        return None
    try:
        return parts[0].decode(), int(parts[1])
    except ValueError:
        return None
