# SPDX-License-Identifier: Apache-2.0
"""Carrying over what a running broker stores: retained messages by a subscription, sessions by a list of clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import Ack, AckRun, EncodeError, PacketKind, Properties, Publish, ack_bytes
from mqtt_nats.ctl.migration.transfer.mosquitto_db import Session
from mqtt_nats.ctl.migration.transfer.mqtt_client import Broker, MqttConnection, connected
from mqtt_nats.mqtt_clients.errors import reason_text

QUIET_S: Final = 3.0
"""Seconds without a message after which all retained messages have come."""

WINDOW: Final = 100
"""Most messages that the gateway has not acknowledged."""

SESSIONS_AT_ONCE: Final = 20

FILTERS_AT_ONCE: Final = 100
"""Most filters in one SUBSCRIBE."""

AUDIENCE: Final = "mqtt-nats migrate"
TOKEN_S: Final = 600
"""Seconds for which a token is valid."""

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
    lost: list[str] = field(default_factory=list)

    def done(self) -> None:
        """Count one message or session that was carried over."""
        self.count += 1

    def kept(self, number: int) -> None:
        """Count messages or sessions that the gateway had already."""
        self.there += number


# -- retained messages ------------------------------------------------------------------------------


async def carry_retained(old: Broker, new: Broker, filters: Iterable[str], *, replace_all: bool) -> Carried:
    """Publish the retained messages of one broker at another; those that are there already stay.

    Args:
        filters: filters whose retained messages are carried over; `#` has no topics that begin with `$`.
        replace_all: replace retained messages that are there.

    Raises:
        StartupError: a broker cannot be reached, refuses, or closes the connection.
    """
    wanted = list(filters)
    messages = await _retained(old, wanted)
    there = {} if replace_all else await _retained(new, wanted)
    carried = Carried()
    carried.kept(len(messages.keys() & there.keys()))
    async with connected(new, 5) as connection:
        await _Publisher(connection, carried).run([one for key, one in messages.items() if key not in there])
    return carried


async def _retained(broker: Broker, filters: list[str]) -> dict[bytes, Publish]:
    """Return the retained messages by topic as it is encoded in a packet."""
    found: dict[bytes, Publish] = {}
    async with _Newest(broker) as connection:
        codes = await connection.subscribe([(one, 2) for one in filters])
        for one, code in zip(filters, codes, strict=False):
            if code >= 0x80:
                raise StartupError(f"{broker} refuses the subscription {one!r}: {reason_text(code)}")
        async for message in connection.messages(QUIET_S):
            if message.retain:
                found[message.key] = message
    return found


class _Newest:
    """Connection by MQTT 5.0, or by 3.1.1 where the broker does not speak 5.0."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def __aenter__(self) -> MqttConnection:
        self._open = connected(self._broker, 5)
        try:
            return await self._open.__aenter__()
        except StartupError:
            self._open = connected(self._broker, 4)
            return await self._open.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._open.__aexit__(*error)


class _Publisher:
    """Publishes messages, so many at the same time as `WINDOW` says."""

    def __init__(self, connection: MqttConnection, carried: Carried) -> None:
        self._connection = connection
        self._carried = carried
        self._waiting: dict[int, str] = {}
        """Topic by packet identifier."""

    async def run(self, messages: list[Publish]) -> None:
        """Publish the messages and wait until all of them are acknowledged."""
        for number, message in enumerate(messages):
            while len(self._waiting) >= WINDOW:
                await self._answer()
            packet_id = number % 0xFFFF + 1 if message.qos else 0
            topic = message.key[2:].decode("utf-8", "replace")
            made = Publish(message.qos, True, False, message.key, packet_id, message.payload, _kept(message.properties))
            try:
                await self._connection.send(made)
            except EncodeError as error:
                self._carried.lost.append(f"{topic}: {error}")
                continue
            if packet_id:
                self._waiting[packet_id] = topic
            else:
                self._carried.done()
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
            self._carried.lost.append(f"{topic}: refused: {reason_text(reason)}")
        else:
            self._carried.done()


def _kept(properties: Properties | None) -> Properties:
    found: Properties = {}
    for name in _KEPT:
        if properties is not None and name in properties:
            found[name] = properties[name]
    return found


# -- sessions ---------------------------------------------------------------------------------------


def read_key(path: Path) -> bytes:
    """Return the secret of a file that :func:`make_key` has made; raises StartupError."""
    from jwt import PyJWKSet, PyJWTError  # not needed for other commands

    try:
        (key,) = PyJWKSet.from_json(path.read_text(encoding="ascii")).keys
        secret = key.key
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    except (PyJWTError, ValueError, UnicodeDecodeError):
        secret = None
    if not isinstance(secret, bytes):
        raise StartupError(f"{path} has not the one key that `mqtt-nats migrate key` writes")
    return secret


def make_key(secret: bytes) -> str:
    """Return the text of a key file (JWKS) for tokens that are signed with ``secret``."""
    from base64 import urlsafe_b64encode

    coded = urlsafe_b64encode(secret).decode().rstrip("=")
    return json.dumps({"keys": [{"kty": "oct", "alg": "HS256", "kid": "migration", "k": coded}]}) + "\n"


def key_settings(path: Path) -> str:
    """Return the part of a `gateway.toml` that accepts tokens of the key, on a listener for this machine only."""
    return f"""[[authenticators]]
type = "jwt"
name = "migration"
keys = {json.dumps(str(path))}
algorithms = "HS256"
audience = {json.dumps(AUDIENCE)}

[[listeners]]
listen = "127.0.0.1:18830"
authenticators = ["migration"]
allow_anonymous = true
"""


def credentials(secret: bytes | None, broker: Broker) -> Callable[[Session], Broker]:
    """Return a function that returns the broker with the credentials of a session's user.

    Args:
        secret: key of the tokens; None: every session is made without credentials.
    """

    def of(session: Session) -> Broker:
        if secret is None or session.user is None:
            return broker
        import jwt

        claims = {"sub": session.user, "aud": AUDIENCE, "exp": int(time.time()) + TOKEN_S}
        token = jwt.encode(claims, secret, "HS256", {"kid": "migration"})
        return replace(broker, user=session.user, password=token.encode())

    return of


async def carry_sessions(sessions: Mapping[str, Session], broker: Callable[[Session], Broker]) -> Carried:
    """Make durable sessions with their subscriptions at a gateway; a session that is there stays as it is.

    Raises:
        StartupError: the gateway cannot be reached.
    """
    carried = Carried()
    free = asyncio.Semaphore(SESSIONS_AT_ONCE)

    async def carry(client_id: str, session: Session) -> None:
        async with free:
            try:
                await _session(client_id, session, broker(session), carried)
            except StartupError as error:
                carried.lost.append(f"session {client_id!r}: {error}")

    async with asyncio.TaskGroup() as group:
        for client_id, session in sessions.items():
            group.create_task(carry(client_id, session))
    return carried


async def _session(client_id: str, session: Session, broker: Broker, carried: Carried) -> None:
    async with connected(broker, 4, client_id, clean=False) as connection:
        if connection.present:
            carried.kept(1)
            return
        filters = list(session.subscriptions.items())
        for at in range(0, len(filters), FILTERS_AT_ONCE):
            part = filters[at : at + FILTERS_AT_ONCE]
            for (topic_filter, _), code in zip(part, await connection.subscribe(part), strict=False):
                if code >= 0x80:
                    carried.lost.append(f"session {client_id!r}: the subscription {topic_filter!r} is refused")
    carried.done()
