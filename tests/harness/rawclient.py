# SPDX-License-Identifier: Apache-2.0
"""An MQTT 3.1.1 client that does nothing by itself: what is sent, acknowledged and read is up to the test.

It reads from its socket only while a test expects something, so a client that is not asked is a slow reader.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from mqtt_nats.codec import (
    PINGREQ,
    Ack,
    AckRun,
    ClientDecoder,
    Connack,
    Connect,
    Disconnect,
    Limits,
    Packet,
    PingResp,
    Publish,
    PublishRun,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    Will,
    ack_bytes,
    encode,
)

HOST: Final = "127.0.0.1"
DEADLINE: Final = 30.0
"""Seconds in which something expected must have come."""

PUBACK: Final = 4
PUBREC: Final = 5
PUBREL: Final = 6
PUBCOMP: Final = 7

_NAMES: Final = {PUBACK: "PUBACK", PUBREC: "PUBREC", PUBREL: "PUBREL", PUBCOMP: "PUBCOMP"}
_LIMITS: Final = Limits(
    max_packet_size=2**28,
    connect_packet_size=2**28,
    max_topic_levels=1000,
    max_filters=10_000,
    max_user_properties=1000,
)

P = TypeVar("P")


def key_of(topic: str) -> bytes:
    """A topic as it stands in a PUBLISH packet."""
    encoded = topic.encode()
    return len(encoded).to_bytes(2, "big") + encoded


def topic_of(publish: Publish) -> str:
    """The topic of a PUBLISH packet."""
    return publish.key[2:].decode()


class RawClient:
    """A connection; :meth:`connect` opens one and sends CONNECT."""

    version = 4

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.session_present = False
        self._reader = reader
        self._writer = writer
        self._decoder = ClientDecoder(_LIMITS, self.version)
        self._inbox: deque[Packet] = deque()
        self._eof = False
        self._last_id = 0

    @classmethod
    async def open(cls, port: int) -> Self:
        """A connection on which nothing has been sent."""
        return cls(*await asyncio.open_connection(HOST, port))

    @classmethod
    async def connect(
        cls,
        port: int,
        client_id: str,
        *,
        clean: bool = True,
        keepalive: int = 0,
        will: Will | None = None,
        username: str | None = None,
        password: bytes | None = None,
    ) -> Self:
        """A connection whose CONNECT was accepted."""
        client = await cls.open(port)
        try:
            client.send(Connect(4, client_id, clean, keepalive, username, password, will))
            client.session_present = (await client.expect(Connack, code=0)).session_present
        except BaseException:
            client.drop()
            raise
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    # -- sending --------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)

    def send(self, *packets: Packet) -> None:
        """Send packets, in one write."""
        self.write(b"".join(encode(packet, self.version) for packet in packets))

    def next_id(self) -> int:
        """A packet identifier that was not used before (up to 65,535 of them)."""
        self._last_id += 1
        return self._last_id

    def publish(
        self,
        topic: str,
        payload: bytes,
        qos: int = 0,
        *,
        retain: bool = False,
        packet_id: int | None = None,
        dup: bool = False,
    ) -> int:
        """Send PUBLISH; returns its packet identifier, 0 at QoS 0."""
        if not qos:
            packet_id = 0
        elif packet_id is None:
            packet_id = self.next_id()
        self.send(Publish(qos, retain, dup, key_of(topic), packet_id, payload))
        return packet_id

    def ack(self, kind: int, *packet_ids: int) -> None:
        """Send acknowledgements of one kind."""
        self.write(b"".join(ack_bytes(kind, packet_id) for packet_id in packet_ids))

    # -- receiving ------------------------------------------------------------------------------

    async def packet(self, timeout: float = DEADLINE) -> Packet:
        """The next packet; acknowledgements and publishes come one by one. AssertionError after ``timeout`` s."""
        await self._await(lambda: bool(self._inbox), timeout, "packet")
        return self._inbox.popleft()

    async def _await(self, condition: Callable[[], bool], timeout: float, what: object) -> None:
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    if not await self._read():
                        raise AssertionError(f"the connection was closed, {what} was expected")
        except TimeoutError:
            raise AssertionError(f"no {what} within {timeout} s") from None

    async def _read(self) -> bool:
        if self._eof:
            return False
        try:
            data = await self._reader.read(65536)
        except ConnectionError:
            data = b""
        if not data:
            self._eof = True
            return False
        for packet in self._decoder.feed(data):
            if isinstance(packet, AckRun):
                self._inbox.extend(Ack(packet.kind, packet_id, 0) for packet_id in packet.ids)
            elif isinstance(packet, PublishRun):
                self._inbox.extend(Publish(0, False, False, packet.key, 0, body) for body in packet.payloads())
            else:
                self._inbox.append(packet)
        assert self._decoder.error is None, self._decoder.error
        return True

    async def expect(self, kind: type[P], timeout: float = DEADLINE, **fields: Any) -> P:
        """The next packet, which must be of ``kind`` and have ``fields``."""
        packet = await self.packet(timeout)
        assert isinstance(packet, kind), f"{kind.__name__} {fields} was expected, not {packet}"
        found = {name: getattr(packet, name) for name in fields}
        assert found == fields, packet
        return packet

    async def expect_ack(self, kind: int, *packet_ids: int, timeout: float = DEADLINE) -> None:
        """The next packets must be these acknowledgements, in this order."""
        for packet_id in packet_ids:
            packet = await self.packet(timeout)
            assert packet == Ack(kind, packet_id, 0), f"{_NAMES[kind]} {packet_id} was expected, not {packet}"

    async def message(self, topic: str, payload: bytes, timeout: float = DEADLINE, **fields: Any) -> Publish:
        """The next packet, which must be this PUBLISH."""
        return await self.expect(Publish, timeout, key=key_of(topic), payload=payload, **fields)

    async def messages(self, count: int, timeout: float = DEADLINE) -> list[Publish]:
        """The next ``count`` packets, which must be PUBLISH."""
        return [await self.expect(Publish, timeout) for _ in range(count)]

    async def quiet(self) -> None:
        """Nothing but the answer to a ping may come: everything sent to us before it has been read."""
        self.write(PINGREQ)
        await self.expect(PingResp)

    async def expect_closed(self, timeout: float = DEADLINE) -> None:
        """The gateway must close the connection, without sending anything before."""
        try:
            async with asyncio.timeout(timeout):
                while not self._inbox and await self._read():
                    pass
        except TimeoutError:
            raise AssertionError(f"still connected after {timeout} s") from None
        assert not self._inbox, f"the end was expected, not {list(self._inbox)[:10]}"

    # -- whole exchanges ------------------------------------------------------------------------

    async def subscribe(self, *filters: str, qos: int = 0) -> tuple[int, ...]:
        """Send one SUBSCRIBE; the return codes of its SUBACK, which must be the next packet."""
        packet_id = self.next_id()
        self.send(Subscribe(packet_id, tuple(Subscription(one, qos) for one in filters)))
        return (await self.expect(Suback, packet_id=packet_id)).codes

    async def unsubscribe(self, *filters: str) -> None:
        """Send one UNSUBSCRIBE; its UNSUBACK must be the next packet."""
        packet_id = self.next_id()
        self.send(Unsubscribe(packet_id, filters))
        await self.expect(Unsuback, packet_id=packet_id)

    async def deliver(self, topic: str, payload: bytes, qos: int = 0, *, retain: bool = False) -> None:
        """Publish and see it acknowledged, by whole handshakes and nothing else."""
        packet_id = self.publish(topic, payload, qos, retain=retain)
        if qos == 0:
            await self.quiet()
        elif qos == 1:
            await self.expect_ack(PUBACK, packet_id)
        else:
            await self.expect_ack(PUBREC, packet_id)
            self.ack(PUBREL, packet_id)
            await self.expect_ack(PUBCOMP, packet_id)

    async def deliver_all(self, topic: str, payloads: Iterable[bytes], qos: int, *, retain: bool = False) -> None:
        """Publish many messages at once and see all acknowledged, in order."""
        ids = [self.publish(topic, payload, qos, retain=retain) for payload in payloads]
        if qos == 1:
            await self.expect_ack(PUBACK, *ids)
        elif qos == 2:
            await self.expect_ack(PUBREC, *ids)
            self.ack(PUBREL, *ids)
            await self.expect_ack(PUBCOMP, *ids)
        else:
            await self.quiet()

    async def complete(self, publish: Publish) -> None:
        """Acknowledge a PUBLISH that was received. What comes before its PUBREL stays to be expected."""
        if publish.qos == 1:
            self.ack(PUBACK, publish.packet_id)
        elif publish.qos == 2:
            self.ack(PUBREC, publish.packet_id)
            await self.released(publish.packet_id)

    async def released(self, packet_id: int, *, answer: bool = True) -> None:
        """Wait for a PUBREL, whatever comes before it, and answer it."""
        release = Ack(PUBREL, packet_id, 0)
        await self._await(lambda: release in self._inbox, DEADLINE, release)
        self._inbox.remove(release)
        if answer:
            self.ack(PUBCOMP, packet_id)

    async def receive(self, topic: str, payload: bytes, **fields: Any) -> Publish:
        """``message`` and ``complete``."""
        publish = await self.message(topic, payload, **fields)
        await self.complete(publish)
        return publish

    # -- the end --------------------------------------------------------------------------------

    async def disconnect(self) -> None:
        """Send DISCONNECT and wait until the gateway has closed the connection [MQTT-3.14.4-1]."""
        self.send(Disconnect())
        await self.expect_closed()
        self.drop()

    def half_close(self) -> None:
        """End our direction of the connection."""
        self._writer.write_eof()

    def drop(self) -> None:
        """Break the connection, as a crash would."""
        with contextlib.suppress(Exception):
            self._writer.transport.abort()
        self._eof = True
