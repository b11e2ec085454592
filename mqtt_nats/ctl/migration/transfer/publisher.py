# SPDX-License-Identifier: Apache-2.0
"""Publishing what is carried over, and the result of a command that carries something over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import Ack, AckRun, EncodeError, PacketKind, Properties, Publish, ack_bytes, encode
from mqtt_nats.ctl.migration.transfer.mqtt_client import MqttConnection
from mqtt_nats.mqtt_clients.errors import reason_text
from mqtt_streams.headers import FOR, PUB

UNACKNOWLEDGED_MOST: Final = 100
"""Most messages that the gateway has not acknowledged."""

_KEPT: Final = (
    "payload_format_indicator", "message_expiry_interval", "content_type", "response_topic", "correlation_data",
    "user_property",
)  # fmt: skip
"""Properties that belong to a message, and not to one delivery."""


@dataclass(slots=True)
class Carried:
    """Result: how much was carried over, and one line for each thing that was not."""

    count: int = 0
    there: int = 0
    """Number of topics or sessions that the gateway had already; they stay as they are."""
    gone: int = 0
    """Number of retained messages that the old broker had no longer when they were read."""
    lost: list[str] = field(default_factory=list)
    total: int = 0
    """Number to carry over; 0: not known yet."""
    progress: Callable[[int, int | None], None] | None = None
    """Is called with the numbers done and to do."""

    def done(self) -> None:
        """Count one message or session that was carried over."""
        self.count += 1
        self._show()

    def kept(self, number: int) -> None:
        """Count messages or sessions that the gateway had already."""
        self.there += number

    def removed(self, number: int) -> None:
        """Count retained messages that the old broker has no longer."""
        self.gone += number

    def lose(self, line: str) -> None:
        """Note something that was not carried over."""
        self.lost.append(line)
        self._show()

    def expect(self, total: int) -> None:
        """Set the number to carry over."""
        self.total = total

    def _show(self) -> None:
        if self.progress is not None:
            self.progress(self.count + len(self.lost), self.total or None)


class Publisher:
    """Publishes messages, so many at the same time as `UNACKNOWLEDGED_MOST` says."""

    def __init__(self, connection: MqttConnection, carried: Carried) -> None:
        self._connection = connection
        self._carried = carried
        self._waiting: dict[int, str] = {}
        """Topic by packet identifier."""
        self._last = 0
        """Packet identifier of the last message."""

    async def publish_for(self, message: Publish, clients: Sequence[str]) -> None:
        """Have a message at QoS 1 or 2 stored for the sessions of these clients only; raises StartupError."""
        given = _kept(message.properties)
        pairs = [(FOR, one) for one in clients]
        given["user_property"] = [*given.get("user_property", []), *pairs, (PUB, str(message.qos))]
        await self.publish(Publish(1, False, False, message.key, 0, message.payload, given), retain=False)

    async def publish(self, message: Publish, retain: bool) -> None:
        """Publish a message with its QoS and properties when fewer than `UNACKNOWLEDGED_MOST` wait.

        Raises:
            StartupError: the connection has ended.
        """
        while len(self._waiting) >= UNACKNOWLEDGED_MOST:
            await self._answer()
        topic = message.key[2:].decode("utf-8", "replace")
        packet_id = 0
        if message.qos:
            packet_id = self._last = self._last % 0xFFFF + 1
        made = Publish(message.qos, retain, False, message.key, packet_id, message.payload, _kept(message.properties))
        try:
            data = encode(made, self._connection.version)
        except EncodeError as error:
            self._carried.lose(f"{topic}: {error}")
            return
        if len(data) > self._connection.max_packet:
            most = self._connection.max_packet
            text = f"a packet of {len(data):,} bytes, and the gateway accepts {most:,} (max_packet_size)"
            self._carried.lose(f"{topic}: {text}")
            return
        await self._connection.write(data)
        if packet_id:
            self._waiting[packet_id] = topic
        else:
            self._carried.done()

    async def finish(self) -> None:
        """Wait until all messages are acknowledged; raises StartupError."""
        while self._waiting:
            await self._answer()

    async def _answer(self) -> None:
        try:
            packet = await self._connection.receive()
        except TimeoutError:
            raise StartupError(f"{self._connection.broker} does not acknowledge messages") from None
        if isinstance(packet, AckRun):
            for packet_id in packet.ids:
                await self._acknowledged(packet.kind, packet_id, 0)
        elif isinstance(packet, Ack):
            await self._acknowledged(packet.kind, packet.packet_id, packet.reason)

    async def _acknowledged(self, kind: int, packet_id: int, reason: int) -> None:
        if packet_id not in self._waiting:
            return
        if kind == PacketKind.PUBREC and reason < 0x80:
            await self._connection.write(ack_bytes(PacketKind.PUBREL, packet_id))
            return
        topic = self._waiting.pop(packet_id)
        if reason >= 0x80:
            self._carried.lose(f"{topic}: refused: {reason_text(reason)}")
        else:
            self._carried.done()


def _kept(properties: Properties | None) -> Properties:
    found: Properties = {}
    for name in _KEPT:
        if properties is not None and name in properties:
            found[name] = properties[name]
    return found
