# SPDX-License-Identifier: Apache-2.0
"""Packets of one client that wait until those before them have taken effect.

What a client sends takes effect in the order in which it came. A SUBSCRIBE or UNSUBSCRIBE needs answers of NATS; a
PUBLISH whose packet identifier is being released waits for its PUBCOMP. What is behind them waits here, the end of the
connection included. Acknowledgements of what the client was sent, and PINGREQ, depend on nothing and do not wait.
When it is their turn the connection hands them on again, before what it has read after them, in turns of bounded time.
See docs/internals/rules.md#order-of-packets.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from mqtt_nats.codec import Ack, AckRun, MqttError, Packet, PingReq, Publish, PublishRun
from mqtt_nats.transport.connection import Handler, Hold

WAITING_BYTES_MOST: Final = 64 * 1024
"""Of one client; beyond this nothing is read from it. What a single read has brought is added as a whole."""

PACKET_BYTES: Final = 256
"""A packet takes about as much, besides its payload."""

PUBREL: Final = 6


class Reading(Protocol):
    """A connection that can be kept from reading, for reasons of its own."""

    def hold(self, why: int) -> None:
        """Read nothing, for this reason."""

    def release(self, why: int) -> None:
        """This reason is gone."""


def passes(packet: Packet) -> bool:
    """Whether a packet may be handled before those that wait."""
    if isinstance(packet, Ack | AckRun):
        return packet.kind != PUBREL
    return isinstance(packet, PingReq)


class PacketOrder:
    """The packets of one client that wait, and what they wait for."""

    __slots__ = ("_bytes", "_connection", "_obeying", "_packets", "_requests", "error", "identifier", "way")

    def __init__(self, connection: Reading) -> None:
        self._connection = connection
        self._packets: deque[Packet] = deque()
        self._bytes = 0
        self._requests = 0
        """SUBSCRIBE and UNSUBSCRIBE packets that have not taken effect."""
        self._obeying = False
        """One of them is being answered."""
        self.identifier = 0
        """The first packet is a PUBLISH with this identifier, which is still being released; 0: it is not."""
        self.error: MqttError | None = None
        """The client has violated the protocol, behind all that waits."""
        self.way: Handler | None = None
        """The socket is closed: what was read goes this way, then the client is lost."""

    def add(self, packets: list[Packet]) -> None:
        """Have packets wait, behind those that do; behind a violation nothing is handled."""
        if self.error is not None:
            return
        self._packets.extend(packets)
        for packet in packets:
            self._bytes += PACKET_BYTES
            if isinstance(packet, PublishRun):
                self._bytes += len(packet.raw)
            elif isinstance(packet, Publish):
                self._bytes += len(packet.payload)
        if self._bytes > WAITING_BYTES_MOST:
            self._connection.hold(Hold.ORDER)

    def take(self) -> list[Packet]:
        """The packets, which do not wait any more."""
        packets = list(self._packets)
        self._packets.clear()
        self._connection.release(Hold.ORDER)
        return packets

    def pings(self) -> list[Packet]:
        """The PINGREQ packets among them, which do not wait any more."""
        pings: list[Packet] = [packet for packet in self._packets if isinstance(packet, PingReq)]
        if pings:
            self._packets = deque(packet for packet in self._packets if not isinstance(packet, PingReq))
            self._bytes -= PACKET_BYTES * len(pings)
        return pings

    def request(self) -> None:
        """A SUBSCRIBE or UNSUBSCRIBE has come."""
        self._requests += 1

    def obey(self) -> None:
        """The first of them is being answered."""
        self._obeying = True

    def put_off(self) -> None:
        """It is not, but later."""
        self._obeying = False

    def took_effect(self) -> None:
        """What came behind it may follow; called once more when it is answered."""
        if self._obeying:
            self._obeying = False
            self._requests -= 1

    def reuse(self, identifier: int) -> None:
        """The first packet waits for its identifier."""
        self.identifier = identifier

    def fail(self, error: MqttError) -> None:
        """The client has violated the protocol; what came before that is served first."""
        self.error = self.error or error

    def leave(self, way: Handler | None) -> None:
        """The socket is closed; what came before that is served first."""
        self.way = way

    @property
    def requested(self) -> bool:
        """True while a request has not taken effect."""
        return self._requests > 0

    @property
    def empty(self) -> bool:
        """True when no packet waits."""
        return not self._packets

    @property
    def gone(self) -> bool:
        """True when the socket is closed."""
        return self.way is not None
