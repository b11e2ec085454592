# SPDX-License-Identifier: Apache-2.0
"""One connection of a chaos client: the protocol of its socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from mqtt_nats.codec import ClientDecoder, Connack, Limits, ack_bytes

if TYPE_CHECKING:
    from tests.chaos.client import ChaosClient

_LIMITS = Limits(1 << 28, 1 << 28, 65_535, 65_535, 65_535)


@dataclass(eq=False)
class Link(asyncio.Protocol):
    """One connection."""

    client: ChaosClient
    port: int
    number: int = 0
    reason: str = "closed by the server"
    unacknowledged: set[int] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.connack: asyncio.Future[Connack] = asyncio.get_running_loop().create_future()
        self._decoder = ClientDecoder(_LIMITS, self.client.version)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The TCP connection is there."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        """Bytes of the server's."""
        for packet in self._decoder.feed(data):
            if isinstance(packet, Connack):
                if self.connack.done():
                    continue
                if not packet.code:
                    self.client.accepted(self, packet)
                self.connack.set_result(packet)
            else:
                self.client.handle(self, packet)
        if self._decoder.error is not None:
            self.reason = f"the server sent nonsense: {self._decoder.error}"
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, whoever wanted it."""
        if not self.connack.done():
            self.connack.set_exception(ConnectionError(self.reason))
            self.connack.exception()  # perhaps nobody waits any more
        self.ended.set()

    def send(self, data: bytes) -> None:
        """Send, unless the connection is ending."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def acknowledge(self, qos: int, identifier: int) -> None:
        """PUBACK or PUBREC for a message of this connection."""
        if self.ended.is_set():
            return
        self.unacknowledged.discard(identifier)
        self.send(ack_bytes(4 if qos == 1 else 5, identifier))

    def close(self) -> None:
        """End when everything is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End at once."""
        if self._transport is not None:
            self._transport.abort()
