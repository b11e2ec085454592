# SPDX-License-Identifier: Apache-2.0
"""Packet order: packets of one client wait until its earlier packets have taken effect.

The packets of a client take effect in the order of their arrival. A SUBSCRIBE or UNSUBSCRIBE needs answers of NATS; a
PUBLISH whose packet identifier is being released waits for its PUBCOMP. Later packets wait here, the end of the
connection included. Acknowledgements from the client, and PINGREQ, depend on no earlier packet and do not wait. In
turn the connection handles the waiting packets, before packets that it has read later, in turns of bounded time.
See docs/internals/client.md#order-of-packets.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from mqtt_nats.codec import Ack, AckRun, MqttError, Packet, PingReq, Publish, PublishRun
from mqtt_nats.transport.connection import Handler, Hold

WAITING_BYTES_MOST: Final = 64 * 1024
"""Maximum bytes of one client's waiting packets; above it nothing is read. A single read is added as a whole."""

PACKET_BYTES: Final = 256
"""Estimated bytes of a packet besides its payload."""

PUBREL: Final = 6


class Reading(Protocol):
    """Connection whose reading can be stopped for several reasons."""

    def hold(self, why: int) -> None:
        """Stop reading for a reason."""

    def release(self, why: int) -> None:
        """Remove a reason not to read."""


def passes(packet: Packet) -> bool:
    """Return whether a packet may be handled before the waiting packets."""
    if isinstance(packet, Ack | AckRun):
        return packet.kind != PUBREL
    return isinstance(packet, PingReq)


class PacketOrder:
    """Waiting packets of one client, and the reasons to wait."""

    __slots__ = ("_bytes", "_connection", "_obeying", "_packets", "_requests", "error", "identifier", "way")

    def __init__(self, connection: Reading) -> None:
        self._connection = connection
        self._packets: deque[Packet] = deque()
        self._bytes = 0
        self._requests = 0
        """Number of SUBSCRIBE and UNSUBSCRIBE packets that have not taken effect."""
        self._obeying = False
        """Whether such a packet is being answered."""
        self.identifier = 0
        """Packet identifier of the first packet, a PUBLISH, while the identifier is being released; 0 = none."""
        self.error: MqttError | None = None
        """Protocol violation of the client, behind all waiting packets; None = no violation."""
        self.way: Handler | None = None
        """Handler for the waiting packets and the end, if the socket is closed; None = the socket is open."""

    def add(self, packets: list[Packet]) -> None:
        """Add packets behind the waiting packets; packets behind a protocol violation are dropped."""
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

    def take_packets(self) -> list[Packet]:
        """Remove and return the waiting packets."""
        packets = list(self._packets)
        self._packets.clear()
        self._connection.release(Hold.ORDER)
        return packets

    def pings(self) -> list[Packet]:
        """Remove and return the waiting PINGREQ packets."""
        pings: list[Packet] = [packet for packet in self._packets if isinstance(packet, PingReq)]
        if pings:
            self._packets = deque(packet for packet in self._packets if not isinstance(packet, PingReq))
            self._bytes -= PACKET_BYTES * len(pings)
        return pings

    def request(self) -> None:
        """Count a SUBSCRIBE or UNSUBSCRIBE that has arrived."""
        self._requests += 1

    def obey(self) -> None:
        """Note that the first SUBSCRIBE or UNSUBSCRIBE is being answered."""
        self._obeying = True

    def put_off(self) -> None:
        """Note that the first SUBSCRIBE or UNSUBSCRIBE is not being answered now, but later."""
        self._obeying = False

    def took_effect(self) -> None:
        """Note that a request has taken effect, so that later packets may follow; called again when it is answered."""
        if self._obeying:
            self._obeying = False
            self._requests -= 1

    def reuse(self, identifier: int) -> None:
        """Note that the first packet waits for its packet identifier."""
        self.identifier = identifier

    def fail(self, error: MqttError) -> None:
        """Note a protocol violation; earlier packets are handled first."""
        self.error = self.error or error

    def leave(self, way: Handler | None) -> None:
        """Note that the socket is closed; earlier packets are handled first."""
        self.way = way

    @property
    def requested(self) -> bool:
        """Whether a SUBSCRIBE or UNSUBSCRIBE has not taken effect."""
        return self._requests > 0

    @property
    def empty(self) -> bool:
        """Whether no packet waits."""
        return not self._packets

    @property
    def gone(self) -> bool:
        """Whether the socket is closed."""
        return self.way is not None
