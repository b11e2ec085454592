# SPDX-License-Identifier: Apache-2.0
"""A small MQTT client that carries messages and sessions over: one connection, its packets in their order."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import (
    MAX_REMAINING_LENGTH,
    Ack,
    AckRun,
    ClientDecoder,
    Connack,
    Connect,
    Disconnect,
    EncodeError,
    Limits,
    MqttError,
    Packet,
    PacketKind,
    Properties,
    Publish,
    Suback,
    Subscribe,
    Subscription,
    ack_bytes,
    encode,
)
from mqtt_nats.mqtt_clients.errors import reason_text, return_text
from mqtt_streams.headers import FOR

ANSWER_S: Final = 30.0
"""Seconds in which a broker must accept a connection and answer a packet."""

_NOT_AUTHORIZED: Final = (4, 5, 0x86, 0x87)
_READ: Final = 65_536
_LIMITS: Final = Limits(MAX_REMAINING_LENGTH + 5, MAX_REMAINING_LENGTH + 5, 65_535, 65_535, 65_535)


@dataclass(frozen=True, slots=True)
class Broker:
    """Address of a broker, and the credentials for it."""

    host: str
    port: int
    user: str | None
    password: bytes | None
    tls: ssl.SSLContext | None

    def __str__(self) -> str:
        """Return the address without credentials."""
        return f"{self.host}:{self.port}"


def parse_broker(url: str, password_file: Path | None, ca: Path | None) -> Broker:
    """Return the broker of ``mqtt://[USER@]HOST[:PORT]``, or ``mqtts://`` for TLS.

    Raises:
        StartupError: the URL or a file cannot be used.
    """
    try:
        parts = urlsplit(url)
        secure = parts.scheme == "mqtts"
        if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname or parts.password is not None:
            raise ValueError
        port = parts.port or (8883 if secure else 1883)
    except ValueError:
        raise StartupError("expected mqtt://[USER@]HOST[:PORT] or mqtts://..., without a password") from None
    try:
        password = None if password_file is None else password_file.read_bytes().removesuffix(b"\n")
    except OSError as error:
        raise StartupError(f"cannot read {password_file}: {error.strerror}") from None
    try:
        tls = ssl.create_default_context(cafile=None if ca is None else str(ca)) if secure else None
    except OSError as error:  # an error of TLS is one, too
        raise StartupError(f"cannot use {ca} as authorities: {error.strerror or error}") from None
    user = None if parts.username is None else unquote(parts.username)
    return Broker(parts.hostname, port, user, password, tls)


def _named(client_id: str) -> str:
    return f"the client {client_id!r}" if client_id else "the client"


class MqttConnection:
    """An open connection; :func:`connected` opens it.

    Args:
        version: 4 (MQTT 3.1.1) or 5.
    """

    def __init__(
        self, broker: Broker, version: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.broker = broker
        self.version = version
        self.present = False
        """Session Present of CONNACK."""
        self.max_packet = MAX_REMAINING_LENGTH + 5
        """Bytes of the largest packet that the broker accepts (5.0)."""
        self.carries = False
        """Whether the gateway stores messages for some sessions only (`carried_messages`)."""
        self._reader = reader
        self._writer = writer
        self._decoder = ClientDecoder(_LIMITS, version)
        self._packets: list[Packet] = []

    async def open(self, client_id: str, clean: bool, expiry: int | None) -> None:
        """Send CONNECT and wait for CONNACK; raises StartupError when the broker refuses or does not answer."""
        broker = self.broker
        given: Properties | None = None if expiry is None else {"session_expiry_interval": expiry}
        try:
            connect = Connect(self.version, client_id, clean, 0, broker.user, broker.password, properties=given)
            await self.send(connect)
            answer = await self.receive()
        except (MqttError, EncodeError) as error:
            raise StartupError(f"{broker}: {error}") from None
        except TimeoutError:
            raise StartupError(f"{broker} does not answer CONNECT") from None
        if not isinstance(answer, Connack) or answer.code:
            raise StartupError(f"{broker} refuses {_named(client_id)}: {self._refusal(answer)}")
        self.present = answer.session_present
        properties = answer.properties or {}
        self.max_packet = properties.get("maximum_packet_size", self.max_packet)
        self.carries = any(name == FOR for name, _ in properties.get("user_property", []))

    def _refusal(self, answer: Packet) -> str:
        """Return why CONNECT was refused, and for a client without a user how to name one."""
        if not isinstance(answer, Connack):
            return "no CONNACK"
        text = reason_text(answer.code, answer.properties) if self.version == 5 else return_text(answer.code)
        if self.broker.user is None and answer.code in _NOT_AUTHORIZED:
            text += "; name the user in the URL, as in mqtt://USER@HOST, and give the file with the password"
        return text

    async def send(self, packet: Packet) -> None:
        """Write a packet; raises StartupError when the connection is lost."""
        await self.write(encode(packet, self.version))

    async def write(self, data: bytes) -> None:
        """Write an encoded packet; raises StartupError when the connection is lost."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise StartupError(f"{self.broker}: the connection is lost: {error.strerror or error}") from None

    async def receive(self, seconds: float = ANSWER_S) -> Packet:
        """Return the next packet.

        Raises:
            StartupError: the connection is lost, or the broker sends what MQTT does not allow.
            TimeoutError: no packet came in time.
        """
        while not self._packets:
            try:
                async with asyncio.timeout(seconds):
                    data = await self._reader.read(_READ)
            except OSError as error:
                if isinstance(error, TimeoutError):
                    raise
                raise StartupError(f"{self.broker}: the connection is lost: {error.strerror or error}") from None
            if not data:
                raise StartupError(f"{self.broker} has closed the connection")
            self._packets += self._decoder.feed(data)
            if self._decoder.error is not None:
                raise StartupError(f"{self.broker}: {self._decoder.error}")
        packet = self._packets.pop(0)
        if isinstance(packet, Disconnect):
            raise StartupError(f"{self.broker} has ended the connection: reason code {packet.reason:#04x}")
        return packet

    async def subscribe(self, filters: Sequence[Subscription], identifier: int = 0) -> tuple[int, ...]:
        """Subscribe filters, with an identifier (5.0; 0: none), and return the codes of SUBACK; raises StartupError."""
        given: Properties | None = {"subscription_identifier": [identifier]} if identifier else None
        await self.send(Subscribe(1, tuple(filters), given))
        earlier = []
        try:
            while not isinstance(packet := await self.receive(), Suback):
                earlier.append(packet)  # retained messages may come first
        except TimeoutError:
            raise StartupError(f"{self.broker} does not answer SUBSCRIBE") from None
        self._packets[:0] = earlier
        return packet.codes

    async def acknowledged(self, seconds: float) -> Packet:
        """Return the next packet, and acknowledge it if it is of a message at QoS 1 or 2.

        Raises:
            StartupError, TimeoutError: as of :meth:`receive`.
        """
        packet = await self.receive(seconds)
        if isinstance(packet, Publish) and packet.qos:
            kind = PacketKind.PUBACK if packet.qos == 1 else PacketKind.PUBREC
            await self.write(ack_bytes(kind, packet.packet_id))
        elif isinstance(packet, AckRun) and packet.kind == PacketKind.PUBREL:
            for packet_id in packet.ids:
                await self.write(ack_bytes(PacketKind.PUBCOMP, packet_id))
        elif isinstance(packet, Ack) and packet.kind == PacketKind.PUBREL:
            await self.write(ack_bytes(PacketKind.PUBCOMP, packet.packet_id))
        return packet


@asynccontextmanager
async def connected(
    broker: Broker, version: int, client_id: str = "", *, clean: bool = True, expiry: int | None = None
) -> AsyncIterator[MqttConnection]:
    """Open a connection, and end it with DISCONNECT.

    Args:
        expiry: session expiry interval in seconds (5.0); None: none is requested.

    Raises:
        StartupError: the broker cannot be reached, refuses, or does not answer.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(broker.host, broker.port, ssl=broker.tls)
    except (OSError, TimeoutError) as error:
        raise StartupError(f"cannot connect to {broker}: {error.strerror or 'no answer'}") from None
    try:
        made = MqttConnection(broker, version, reader, writer)
        await made.open(client_id, clean, expiry)
        yield made
        await made.write(b"\xe0\x00")
    finally:
        writer.close()


@asynccontextmanager
async def connected_newest(broker: Broker) -> AsyncIterator[MqttConnection]:
    """Open a connection with MQTT 5.0, or with 3.1.1 where the broker does not speak 5.0; raises StartupError."""
    async with AsyncExitStack() as stack:
        try:
            connection = await stack.enter_async_context(connected(broker, 5))
        except StartupError:
            connection = await stack.enter_async_context(connected(broker, 4))
        yield connection
