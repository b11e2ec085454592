# SPDX-License-Identifier: Apache-2.0
"""MQTT connection of a client: CONNECT, packets both ways, keep alive, DISCONNECT."""

from __future__ import annotations

import select
import time
from typing import Final, NamedTuple

from mqtt_nats.codec import (
    MAX_REMAINING_LENGTH,
    PINGREQ,
    ClientDecoder,
    Connack,
    Connect,
    Disconnect,
    EncodeError,
    Limits,
    MqttError,
    Packet,
    PingResp,
    encode,
)
from mqtt_nats.mqtt_clients.errors import ClientError, Interrupted, reason_text, return_text
from mqtt_nats.mqtt_clients.stream import Stream

ANSWER_WAIT_S: Final = 10.0
"""Seconds in which a server must accept a connection, answer CONNECT and answer SUBSCRIBE."""

CLOSE_WAIT_S: Final = 2.0
"""Seconds in which a server should close the connection after DISCONNECT."""

PING_PART: Final = 0.75
"""Part of the keep alive after whose silence PINGREQ is sent. [MQTT-3.1.2-20] (5.0)"""

LIMITS: Final = Limits(
    max_packet_size=MAX_REMAINING_LENGTH + 5,
    connect_packet_size=MAX_REMAINING_LENGTH + 5,
    max_topic_levels=65_535,
    max_filters=65_535,
    max_user_properties=65_535,
)
"""Limits of packets from the server: those of the protocol."""


class Arrival(NamedTuple):
    """Packets that have arrived, and which of the other descriptors are readable."""

    packets: list[Packet]
    readable: list[int]


class Connection:
    """An MQTT connection over a stream.

    Args:
        version: 4 (MQTT 3.1.1) or 5.
        wake: descriptor that becomes readable on a signal that ends the client; None = none.
    """

    def __init__(self, stream: Stream, version: int, wake: int | None = None) -> None:
        self.version = version
        self._stream = stream
        self._wake = wake
        self._decoder = ClientDecoder(LIMITS, version)
        self._accepted = False
        """Whether CONNACK has come."""
        self._early: list[Packet] = []
        """Packets that have arrived together with CONNACK: a session's messages may follow it at once."""
        self._keep_alive = 0.0
        """Seconds; 0 = none."""
        self._sent_at = time.monotonic()
        self._pinged_at: float | None = None
        """Time of a PINGREQ that is not answered."""

    def open(self, connect: Connect) -> Connack:
        """Send CONNECT and return a CONNACK that accepts. ClientError when the server refuses or does not answer."""
        self.send(connect)
        deadline = time.monotonic() + ANSWER_WAIT_S
        packets: list[Packet] = []
        while not packets:
            if time.monotonic() >= deadline:
                raise ClientError(f"no CONNACK within {ANSWER_WAIT_S:.0f} s")
            packets = self.receive(deadline).packets
        self._accepted = True
        connack, *self._early = packets
        if not isinstance(connack, Connack):
            raise ClientError(f"the server has sent {type(connack).__name__} before CONNACK")
        if connack.code:
            v5 = self.version == 5
            text = reason_text(connack.code, connack.properties) if v5 else return_text(connack.code)
            raise ClientError(f"connection refused: {text}")
        self._keep_alive = (connack.properties or {}).get("server_keep_alive", connect.keepalive)
        return connack

    def send(self, packet: Packet) -> None:
        """Send a packet. ClientError when it has no legal encoding, or the connection is lost."""
        try:
            data = encode(packet, self.version)
        except EncodeError as error:
            raise ClientError(str(error)) from None
        self.send_encoded(data)

    def send_encoded(self, data: bytes) -> None:
        """Send encoded packets."""
        self._stream.send(data)
        self._sent_at = time.monotonic()

    def receive(self, deadline: float | None, *others: int) -> Arrival:
        """Wait for packets, for one of the other descriptors, or until ``deadline`` (of `time.monotonic`).

        Raises:
            ClientError: the server has ended the connection, is silent, or has sent no MQTT packet.
            Interrupted: SIGINT or SIGTERM has arrived.
        """
        if self._early:
            packets, self._early = self._early, []
            return Arrival(packets, [])
        if self._decoder.error is not None:  # behind the packets of the last call
            raise self._wrong_packet(self._decoder.error)
        while True:
            readable = self._wait(deadline, others)
            if self._wake in readable:
                raise Interrupted
            packets = self._read() if self._stream.fileno() in readable else []
            ready = [one for one in others if one in readable]
            if packets or ready or (deadline is not None and time.monotonic() >= deadline):
                return Arrival(packets, ready)

    def close(self) -> None:
        """Send DISCONNECT, wait until the server has closed the connection, and close the socket.

        A socket that is closed with unread bytes resets the connection, and the server may lose the last packets.
        """
        try:
            self.send(Disconnect())
            deadline = time.monotonic() + CLOSE_WAIT_S
            while (left := deadline - time.monotonic()) > 0:
                if not self._stream.pending():
                    select.select([self._stream], [], [], left)
                if self._stream.receive() == b"":
                    break
        except ClientError:
            pass  # the server was faster
        finally:
            self._stream.close()

    def abandon(self) -> None:
        """Close the socket without DISCONNECT."""
        self._stream.close()

    def _wait(self, deadline: float | None, others: tuple[int, ...]) -> list[int]:
        """Return the readable descriptors; send PINGREQ when it is due."""
        stream = self._stream.fileno()
        if self._stream.pending():
            return [stream]
        due = self._keep_alive_due()
        times = [one - time.monotonic() for one in (deadline, due) if one is not None]
        watched = [stream, *others, *([] if self._wake is None else [self._wake])]
        readable = select.select(watched, [], [], max(0.0, min(times)) if times else None)[0]
        if due is not None and time.monotonic() >= due and stream not in readable:
            self._keep_alive_passed()
        return readable

    def _keep_alive_due(self) -> float | None:
        """Return when PINGREQ is due, or when its answer is overdue."""
        if not self._keep_alive:
            return None
        if self._pinged_at is not None:
            return self._pinged_at + self._keep_alive
        return self._sent_at + self._keep_alive * PING_PART

    def _keep_alive_passed(self) -> None:
        if self._pinged_at is not None:
            raise ClientError(f"connection lost: no answer to PINGREQ within {self._keep_alive:.0f} s")
        self.send_encoded(PINGREQ)
        self._pinged_at = time.monotonic()

    def _wrong_packet(self, error: MqttError) -> ClientError:
        hint = "; a server of MQTT 3.1.1 needs -V 3.1.1" if self.version == 5 else ""
        return ClientError(f"the server has sent a wrong packet: {error}{hint}")

    def _read(self) -> list[Packet]:
        data = self._stream.receive()
        if data is None:
            return []
        if not data:
            early = "" if self._accepted else " before CONNACK; a listener for TLS needs --cafile or --tls"
            raise ClientError(f"the server has ended the connection{early}")
        packets = self._decoder.feed(data)
        self._pinged_at = None
        if self._decoder.error is not None and not packets:
            raise self._wrong_packet(self._decoder.error)
        for packet in packets:
            if isinstance(packet, Disconnect):
                raise ClientError(f"the server has disconnected: {reason_text(packet.reason, packet.properties)}")
        return [packet for packet in packets if not isinstance(packet, PingResp)]
