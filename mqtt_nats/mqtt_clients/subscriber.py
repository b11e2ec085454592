# SPDX-License-Identifier: Apache-2.0
"""Subscribing: SUBSCRIBE, and messages that are shown before they are acknowledged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from mqtt_nats.codec import (
    Ack,
    AckRun,
    Packet,
    PacketKind,
    Properties,
    Publish,
    PublishRun,
    Suback,
    Subscribe,
    Subscription,
    ack_bytes,
)
from mqtt_nats.mqtt_clients.connection import ANSWER_WAIT_S, Connection
from mqtt_nats.mqtt_clients.errors import ClientError, Refused, TimeoutReached, reason_text
from mqtt_nats.protocol.qos2_receiver import Action, InboundQos2

SUBSCRIBE_ID: Final = 1
"""Packet identifier of the only SUBSCRIBE."""

REFUSED: Final = 0x80


class Message(NamedTuple):
    """A message that has arrived. ``packet_id`` is 0 at QoS 0."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    packet_id: int
    properties: Properties


class Subscriber:
    """The receiver of PUBLISH on one connection.

    Args:
        show: called for each message before its acknowledgement; False: the message does not count.
        most: number of messages after which no more are taken; None = no limit. Messages that are not taken are not
            acknowledged, so that a session gets them later.
    """

    def __init__(self, connection: Connection, show: Callable[[Message], bool], most: int | None = None) -> None:
        self._connection = connection
        self._show = show
        self._left = most
        self._receiver = InboundQos2()
        self._suback: Suback | None = None

    @property
    def done(self) -> bool:
        """Whether all messages were taken, and those of QoS 2 are complete."""
        return self._left == 0 and not self._receiver.states

    def subscribe(self, filters: Sequence[Subscription]) -> None:
        """Subscribe, and wait for SUBACK. Refused when the server refuses one of the filters."""
        self._connection.send(Subscribe(SUBSCRIBE_ID, tuple(filters)))
        deadline = time.monotonic() + ANSWER_WAIT_S
        while self._suback is None:
            if time.monotonic() >= deadline:
                raise ClientError(f"no SUBACK within {ANSWER_WAIT_S:.0f} s")
            self.handle_packets(self._connection.receive(deadline).packets)
        for one, code in zip(filters, self._suback.codes, strict=False):
            if code >= REFUSED:
                why = reason_text(code, self._suback.properties) if self._connection.version == 5 else "failure"
                raise Refused(f"subscription to {one.topic_filter!r} refused: {why}")

    def run(self, deadline: float | None) -> None:
        """Take messages until there are enough. TimeoutReached at ``deadline`` (of `time.monotonic`; None: never)."""
        while not self.done:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutReached("the time of --timeout is over")
            self.handle_packets(self._connection.receive(deadline).packets)

    def handle_packets(self, packets: Sequence[Packet]) -> None:
        """Handle packets in order."""
        for packet in packets:
            if isinstance(packet, PublishRun):
                for payload in packet.payloads():
                    self._deliver(Publish(0, False, False, packet.key, 0, payload))
            elif isinstance(packet, Publish):
                self._deliver(packet)
            elif isinstance(packet, AckRun | Ack) and packet.kind == PacketKind.PUBREL:
                for packet_id in packet.ids if isinstance(packet, AckRun) else [packet.packet_id]:
                    self._receiver.pubrel(packet_id)
                    self._receiver.released(packet_id)
                    self._connection.send_encoded(ack_bytes(PacketKind.PUBCOMP, packet_id))
            elif isinstance(packet, Suback):
                self._suback = packet

    def _deliver(self, packet: Publish) -> None:
        if packet.qos == 2 and packet.packet_id in self._receiver.states:
            self._receiver.publish(packet.packet_id)
            self._connection.send_encoded(ack_bytes(PacketKind.PUBREC, packet.packet_id))
            return
        if self._left == 0:
            return
        shown = self._show(
            Message(
                packet.key[2:].decode(errors="replace"),
                packet.payload,
                packet.qos,
                packet.retain,
                packet.packet_id,
                packet.properties or Properties(),
            )
        )
        if self._left is not None and shown:
            self._left -= 1
        if packet.qos == 1:
            self._connection.send_encoded(ack_bytes(PacketKind.PUBACK, packet.packet_id))
        elif packet.qos == 2 and self._receiver.publish(packet.packet_id) is Action.HOLD:
            self._receiver.stored(packet.packet_id)
            self._connection.send_encoded(ack_bytes(PacketKind.PUBREC, packet.packet_id))
