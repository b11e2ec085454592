# SPDX-License-Identifier: Apache-2.0
"""Publishing: messages at QoS 0, 1 and 2, at most a window of them unacknowledged."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from mqtt_nats.codec import (
    Ack,
    AckRun,
    Connack,
    EncodeError,
    Packet,
    PacketKind,
    Properties,
    ack_bytes,
    encode_publish,
)
from mqtt_nats.mqtt_clients.connection import Connection
from mqtt_nats.mqtt_clients.errors import Refused, TimeoutReached, reason_text

UNACKNOWLEDGED_MOST: Final = 20
"""Maximum number of unacknowledged messages, if the server allows as many.

A server of MQTT 3.1.1 cannot tell its limit. mosquitto drops messages at QoS 2 beyond 20 and acknowledges them.
"""

REFUSED: Final = 0x80
"""Lowest reason code of a refusal."""


@dataclass(frozen=True)
class Outgoing:
    """Topic, QoS, RETAIN and properties of the messages that are published."""

    topic: str
    qos: int = 0
    retain: bool = False
    properties: Properties | None = None


class Publisher:
    """The sender of PUBLISH on one connection. [MQTT-4.3.1-1] [MQTT-4.3.2-1] [MQTT-4.3.3-1] (5.0)

    Args:
        deadline: end of the work in `time.monotonic`; None = none.
    """

    def __init__(self, connection: Connection, connack: Connack, deadline: float | None) -> None:
        granted = connack.properties or {}
        self.deadline = deadline
        self._connection = connection
        self._window = min(UNACKNOWLEDGED_MOST, granted.get("receive_maximum", UNACKNOWLEDGED_MOST))
        self._packet_size = granted.get("maximum_packet_size", 0)
        self._maximum_qos = granted.get("maximum_qos", 2)
        self._retain = granted.get("retain_available", 1)
        self._unanswered: dict[int, int] = {}
        """Kind of the packet that is to come next, by packet identifier."""
        self._next = 0

    @property
    def overdue(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def publish(self, message: Outgoing, payload: bytes) -> None:
        """Send one message, after there is room in the window.

        Raises:
            Refused: the server does not accept such a message.
            TimeoutReached: there is no room until the deadline.
        """
        if message.qos > self._maximum_qos:
            raise Refused(f"the server accepts QoS {self._maximum_qos} at most")
        if message.retain and not self._retain:
            raise Refused("the server has no retained messages")
        while len(self._unanswered) >= self._window:
            self._pump()
        packet_id = self._free_id() if message.qos else 0
        data = self._encoded(message, payload, packet_id)
        if message.qos:
            self._unanswered[packet_id] = PacketKind.PUBACK if message.qos == 1 else PacketKind.PUBREC
        self._connection.send_encoded(data)

    def finish(self) -> None:
        """Wait until every message is acknowledged. TimeoutReached at the deadline."""
        while self._unanswered:
            self._pump()

    def handle(self, packet: Packet) -> None:
        """Handle an acknowledgement; other packets are ignored. Refused when it is a refusal."""
        if isinstance(packet, AckRun):
            for packet_id in packet.ids:
                self._acknowledged(packet.kind, packet_id)
        elif isinstance(packet, Ack):
            if packet.reason >= REFUSED:
                raise Refused(f"message refused: {reason_text(packet.reason, packet.properties)}")
            self._acknowledged(packet.kind, packet.packet_id)

    def _pump(self) -> None:
        if self.overdue:
            raise TimeoutReached(f"{len(self._unanswered)} messages are not acknowledged in time")
        for packet in self._connection.receive(self.deadline).packets:
            self.handle(packet)

    def _acknowledged(self, kind: int, packet_id: int) -> None:
        if kind == PacketKind.PUBREL or self._unanswered.get(packet_id) != kind:
            return  # of a message that an earlier connection of the session has published
        if kind == PacketKind.PUBREC:
            self._unanswered[packet_id] = PacketKind.PUBCOMP
            self._connection.send_encoded(ack_bytes(PacketKind.PUBREL, packet_id))
        else:
            del self._unanswered[packet_id]

    def _free_id(self) -> int:
        self._next = self._next % 0xFFFF + 1
        while self._next in self._unanswered:
            self._next = self._next % 0xFFFF + 1
        return self._next

    def _encoded(self, message: Outgoing, payload: bytes, packet_id: int) -> bytes:
        version = self._connection.version
        try:
            raw = message.topic.encode()
            key = len(raw).to_bytes(2, "big") + raw
            options = (message.qos, message.retain, False, packet_id, version, message.properties)
            data = encode_publish(key, payload, *options)
        except (EncodeError, OverflowError, UnicodeEncodeError) as error:
            raise Refused(f"the message cannot be published: {error}") from None
        if self._packet_size and len(data) > self._packet_size:
            raise Refused(f"the message has {len(data)} bytes, the server accepts {self._packet_size} at most")
        return data
