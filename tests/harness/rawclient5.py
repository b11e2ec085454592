# SPDX-License-Identifier: Apache-2.0
"""An MQTT 5.0 client that does nothing by itself."""

from __future__ import annotations

from typing import Any, Self, cast

from mqtt_nats.codec import (
    Ack,
    Connack,
    Connect,
    Disconnect,
    Properties,
    Publish,
    ReasonCode,
    Suback,
    Subscribe,
    Subscription,
    Will,
)
from tests.harness.rawclient import DEADLINE, RawClient, key_of


class RawClient5(RawClient):
    """A connection of MQTT 5.0; ``connack`` is what :meth:`connect5` was answered."""

    version = 5
    connack: Connack

    @classmethod
    async def connect5(
        cls,
        port: int,
        client_id: str,
        *,
        clean: bool = True,
        keepalive: int = 0,
        will: Will | None = None,
        username: str | None = None,
        password: bytes | None = None,
        code: int = 0,
        **properties: Any,
    ) -> Self:
        """A connection whose CONNECT, with these properties, was answered with ``code``."""
        client = await cls.open(port)
        try:
            given = cast(Properties, properties) or None
            client.send(Connect(5, client_id, clean, keepalive, username, password, will, given))
            client.connack = await client.expect(Connack, code=code)
            client.session_present = client.connack.session_present
        except BaseException:
            client.drop()
            raise
        return client

    def publish5(
        self,
        topic: str,
        payload: bytes,
        qos: int = 0,
        *,
        retain: bool = False,
        packet_id: int | None = None,
        dup: bool = False,
        **properties: Any,
    ) -> int:
        """Send PUBLISH with properties; returns its packet identifier, 0 at QoS 0."""
        if not qos:
            packet_id = 0
        elif packet_id is None:
            packet_id = self.next_id()
        given = cast(Properties, properties) or None
        self.send(Publish(qos, retain, dup, key_of(topic), packet_id, payload, given))
        return packet_id

    async def subscribe5(self, *wanted: Subscription, **properties: Any) -> tuple[int, ...]:
        """Send one SUBSCRIBE; the reason codes of its SUBACK, which must be the next packet."""
        packet_id = self.next_id()
        self.send(Subscribe(packet_id, wanted, cast(Properties, properties) or None))
        return (await self.expect(Suback, packet_id=packet_id)).codes

    async def expect_refusal(self, kind: int, packet_id: int, reason: int) -> None:
        """The next packet must be this acknowledgement with this reason code."""
        packet = await self.expect(Ack, packet_id=packet_id)
        assert (packet.kind, packet.reason) == (kind, reason), packet

    async def expect_disconnect(self, reason: int, timeout: float = DEADLINE) -> Disconnect:
        """The next packet must be DISCONNECT with this reason code, and then the connection must end."""
        packet = await self.expect(Disconnect, timeout)
        assert packet.reason == reason, f"{ReasonCode(reason).name} was expected, not {packet}"
        await self.expect_closed()
        return packet

    async def disconnect5(self, reason: int = 0, **properties: Any) -> None:
        """Send DISCONNECT and wait until the gateway has closed the connection."""
        self.send(Disconnect(reason, cast(Properties, properties) or None))
        await self.expect_closed()
        self.drop()
