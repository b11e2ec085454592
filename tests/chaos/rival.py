# SPDX-License-Identifier: Apache-2.0
"""Connections of one client that fight for its session, and the state that such a client has beside them."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from mqtt_nats.codec import (
    PINGREQ,
    Ack,
    AckRun,
    Connack,
    Connect,
    Disconnect,
    PingResp,
    Properties,
    Publish,
    PublishRun,
    Suback,
    Subscribe,
    Subscription,
    Will,
)
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.rawclient5 import RawClient5

OWN_FIRST = 20_000
"""Packet identifiers from here on are for what a connection publishes for itself."""


class Rival:
    """One connection. It reads by itself, and answers nothing: see :class:`Device`.

    Attributes:
        accepted: when CONNACK came (`time.monotonic()`); 0 before that.
        sent: its own QoS 1 publishes: when each was written, by their number from 0.
        acked: those of them that were acknowledged.
        inbox: what else has come and was not looked at.
        closed: the gateway has ended the connection, or refused it.
        reason: the reason code that it gave; None without one.
    """

    def __init__(self, port: int, client_id: str, version: int, topic: str) -> None:
        self.port = port
        self.client_id = client_id
        self.version = version
        self.topic = topic
        self.accepted = 0.0
        self.present = False
        self.sent: list[float] = []
        self.acked: set[int] = set()
        self.inbox: deque[Publish | Ack | Suback] = deque()
        self.closed = False
        self.reason: int | None = None
        self.came = asyncio.Event()
        self._pongs = 0
        self._raw: RawClient | None = None
        self._reading: asyncio.Task[None] | None = None

    async def connect(
        self, *, clean: bool = False, expiry: int = 3600, keepalive: int = 0, will: Will | None = None
    ) -> None:
        """Open the connection and send CONNECT; the answer is not awaited."""
        try:
            raw = await (RawClient5 if self.version == 5 else RawClient).open(self.port)
        except OSError:
            self.closed = True
            self.came.set()
            return
        self._raw = raw
        properties: Properties | None = {"session_expiry_interval": expiry} if self.version == 5 else None
        raw.send(Connect(self.version, self.client_id, clean, keepalive, None, None, will, properties))
        self._reading = asyncio.create_task(self._read(raw))

    async def entered(self, patience: float = 30.0) -> bool:
        """Wait for the answer to CONNECT; whether it was accepted."""
        async with asyncio.timeout(patience):
            while not self.closed and not self.accepted:
                self.came.clear()
                await self.came.wait()
        return bool(self.accepted)

    @property
    def _live(self) -> RawClient | None:
        """The connection, if there is anybody to write to."""
        raw = self._raw
        return None if raw is None or raw._writer.transport.is_closing() else raw

    def write(self, data: bytes) -> None:
        """Send bytes."""
        if (raw := self._live) is not None:
            raw.write(data)

    def publish(self, qos: int, packet_id: int, topic: str, payload: bytes, *, dup: bool = False) -> None:
        """Send a PUBLISH."""
        if (raw := self._live) is not None:
            raw.publish(topic, payload, qos, packet_id=packet_id, dup=dup)

    def publish_own(self) -> None:
        """Send a PUBLISH that is this connection's alone: QoS 1, never repeated."""
        number = len(self.sent)
        self.sent.append(time.monotonic())
        self.publish(1, OWN_FIRST + number, self.topic, b"%d" % number)

    def ack(self, kind: int, packet_id: int) -> None:
        """Send an acknowledgement."""
        if (raw := self._live) is not None:
            raw.ack(kind, packet_id)

    async def subscribe(self, topic_filter: str, qos: int) -> None:
        """Subscribe and wait for SUBACK; what comes before it is kept."""
        assert self._raw is not None
        self._raw.send(Subscribe(1, (Subscription(topic_filter, qos),)))
        async with asyncio.timeout(30):
            while not any(isinstance(one, Suback) for one in self.inbox):
                self.came.clear()
                assert not self.closed, "closed while subscribing"
                await self.came.wait()
        self.inbox = deque(one for one in self.inbox if not isinstance(one, Suback))

    async def answers(self, patience: float) -> bool:
        """Whether a ping is answered: everything that was sent before has been read by the gateway."""
        pongs = self._pongs
        self.write(PINGREQ)
        try:
            async with asyncio.timeout(patience):
                while self._pongs == pongs and not self.closed:
                    self.came.clear()
                    await self.came.wait()
        except TimeoutError:
            return False
        return not self.closed

    def disconnect(self, reason: int = 0) -> None:
        """Send DISCONNECT."""
        if (raw := self._live) is not None:
            raw.send(Disconnect(reason))

    async def drop(self) -> None:
        """Break the connection."""
        if self._raw is not None:
            self._raw.drop()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self.closed = True

    async def _read(self, raw: RawClient) -> None:
        try:
            while await raw._read():
                while raw._inbox:
                    self._take(raw._inbox.popleft())
                self.came.set()
        finally:
            self.closed = True
            self.came.set()

    def _take(self, packet: object) -> None:
        match packet:
            case Connack():
                if packet.code:
                    self.reason = packet.code
                else:
                    self.accepted = time.monotonic()
                    self.present = packet.session_present
            case Ack() if packet.kind == PUBACK and packet.packet_id >= OWN_FIRST:
                if packet.reason < 0x80:
                    self.acked.add(packet.packet_id - OWN_FIRST)
            case PingResp():
                self._pongs += 1
            case Disconnect():
                self.reason = packet.reason
            case Publish() | Ack() | Suback():
                self.inbox.append(packet)
            case AckRun() | PublishRun():
                raise AssertionError("the raw client takes runs apart")


class Device:
    """What a client keeps when its connection breaks: QoS 2 in both directions, and what its application was given.

    One connection at a time is its own; whatever another one has received is as if it had never arrived.

    Attributes:
        given: payloads that the application has got, in order.
        undeclared: payloads that came again at QoS 1 without DUP.
        finished: how many of its own messages, numbered from 0, have been published completely.
    """

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.given: list[bytes] = []
        self.undeclared: list[bytes] = []
        self.finished = 0
        self._known: set[bytes] = set()
        self._received: set[int] = set()
        self._outgoing: dict[int, bytes | None] = {}  # by identifier; None: PUBREC has come
        self._made = 0
        self._last = 0

    def resume(self, rival: Rival) -> None:
        """Go on with another connection."""
        for identifier, payload in self._outgoing.items():
            if payload is None:
                rival.ack(PUBREL, identifier)
            else:
                rival.publish(2, identifier, self.topic, payload, dup=True)

    @property
    def made(self) -> int:
        """How many messages it has begun to publish."""
        return self._made

    @property
    def unfinished(self) -> int:
        """How many of them are not complete."""
        return len(self._outgoing)

    def publish(self, rival: Rival) -> None:
        """Publish the next message at QoS 2; its payload is its number."""
        payload = b"%d" % self._made
        self._made += 1
        self._last = self._last % 500 + 1
        assert self._last not in self._outgoing
        self._outgoing[self._last] = payload
        rival.publish(2, self._last, self.topic, payload)

    def work(self, rival: Rival, most: int) -> int:
        """Do what up to ``most`` packets of the connection ask for; returns how many there were."""
        done = 0
        while rival.inbox and done < most:
            done += 1
            self._handle(rival, rival.inbox.popleft())
        return done

    def _handle(self, rival: Rival, packet: Publish | Ack | Suback) -> None:
        if isinstance(packet, Publish):
            self._publish(rival, packet)
        elif isinstance(packet, Ack) and packet.kind == PUBREL:
            self._received.discard(packet.packet_id)
            rival.ack(PUBCOMP, packet.packet_id)
        elif isinstance(packet, Ack) and packet.kind == PUBREC:
            if packet.packet_id in self._outgoing:
                self._outgoing[packet.packet_id] = None
            rival.ack(PUBREL, packet.packet_id)
        elif isinstance(packet, Ack) and packet.kind == PUBCOMP and self._outgoing.pop(packet.packet_id, b"") is None:
            self.finished += 1

    def _publish(self, rival: Rival, packet: Publish) -> None:
        if packet.qos == 2:
            if packet.packet_id not in self._received:
                self._received.add(packet.packet_id)
                self.given.append(packet.payload)
            rival.ack(PUBREC, packet.packet_id)
            return
        if packet.payload in self._known and not packet.dup:
            self.undeclared.append(packet.payload)
        self._known.add(packet.payload)
        self.given.append(packet.payload)
        if packet.qos == 1:
            rival.ack(PUBACK, packet.packet_id)
