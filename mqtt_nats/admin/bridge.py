# SPDX-License-Identifier: Apache-2.0
"""Publish and subscribe from the dashboard: JSON messages over a WebSocket, an MQTT client of the gateway behind them.

The page sends ``{"do": "subscribe", "filter": ..., "qos": ...}``, ``unsubscribe`` with a filter, or ``publish`` with a
``topic``, ``payload`` (text), ``qos`` and ``retain``. It gets ``{"is": "message", ...}``, what became of what it has
sent, and ``{"is": "error", "text": ...}``.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from mqtt_nats.access.authenticator import ADMINISTRATOR, Allow, Credentials, Denied, Exchange
from mqtt_nats.admin.access.guard import SUBPROTOCOL, administrator_of, begin_action
from mqtt_nats.client.client import Client
from mqtt_nats.client.message_hooks import entered
from mqtt_nats.codec import (
    Ack,
    AckRun,
    ClientDecoder,
    Connack,
    Connect,
    MqttError,
    Publish,
    PublishRun,
    ReasonCode,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    ack_bytes,
    encode,
    validate_topic_filter,
    validate_topic_name,
)
from mqtt_nats.control.audit import DONE, Action
from mqtt_nats.transport.connection import Connection, Handler
from mqtt_nats.transport.listener import decoder_limits

if TYPE_CHECKING:
    from mqtt_nats.admin.listener import AdminListener

log = logging.getLogger("mqtt_nats.admin")

PAYLOAD_SHOWN_BYTES: Final = 4096
"""Bytes of a payload that the page is given."""

UNREAD: Final = 500
"""Messages that wait for the page; beyond that the gateway is told that the client does not read."""

LARGEST: Final = 268_435_460
"""Bytes of the largest packet that MQTT has."""

BRIDGES: Final = 20
"""Pages at a time."""


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Subscribing(_Asked):
    """Have messages sent."""

    do: Literal["subscribe"]
    filter: str = Field(min_length=1, max_length=65_535)
    qos: int = Field(default=0, ge=0, le=2)


class Unsubscribing(_Asked):
    """Have no more messages sent."""

    do: Literal["unsubscribe"]
    filter: str = Field(min_length=1, max_length=65_535)


class Publishing(_Asked):
    """Publish one message."""

    do: Literal["publish"]
    topic: str = Field(min_length=1, max_length=65_535)
    payload: str = ""
    qos: int = Field(default=0, ge=0, le=2)
    retain: bool = False


ASKED: Final[TypeAdapter[Subscribing | Unsubscribing | Publishing]] = TypeAdapter(
    Annotated[Subscribing | Unsubscribing | Publishing, Field(discriminator="do")]
)


class OpenDoor:
    """Authenticator of administrators, whose token was checked already."""

    immediate = True
    methods: Collection[str] = ()

    async def authenticate(self, credentials: Credentials) -> Allow | Denied:
        """Admit the page as an administrator."""
        return ADMINISTRATOR

    async def begin(self, method: str, client_id: str, connection: Connection) -> Exchange:
        """Refuse enhanced authentication: pages of the dashboard have no method.

        Raises:
            MqttError: always.
        """
        raise MqttError("the authentication method is not supported", ReasonCode.BAD_AUTHENTICATION_METHOD)


class Bridge:
    """Server of the MQTT clients of dashboard pages."""

    def __init__(self, listener: AdminListener) -> None:
        self._listener = listener
        self._count = 0

    async def serve(self, socket: WebSocket) -> None:
        """Serve one page until it goes."""
        account = self._listener.gateway.account
        if administrator_of(socket.scope).role != "administrator":
            await socket.close()  # before it is accepted: status 403
            return
        chosen = SUBPROTOCOL if SUBPROTOCOL in socket.scope["subprotocols"] else None
        await socket.accept(chosen)
        if account is None or self._listener.obstacle or self._count >= BRIDGES:
            await socket.close(1013, self._listener.obstacle[:100] or f"more than {BRIDGES} pages are here")
            return
        self._count += 1
        try:
            await Page(self._listener, socket).serve()
        except WebSocketDisconnect:
            pass
        finally:
            self._count -= 1


class Page:
    """Transport of the MQTT client of one page: a connection without a socket."""

    def __init__(self, listener: AdminListener, socket: WebSocket) -> None:
        account = listener.gateway.account
        assert account is not None
        settings = listener.settings
        self._socket = socket
        self._audit_trail = listener.gateway.audit_trail
        self._waiting: deque[dict[str, Any]] = deque()
        self._more = asyncio.Event()
        self._readable = asyncio.Event()
        self._readable.set()
        self._clogged = self._closed = False
        self._identifier = 0
        self._asked: dict[int, tuple[str, str]] = {}
        """Packets that wait for an acknowledgement, by packet identifier: kind, and topic or filter."""
        limits = decoder_limits(settings)
        self._decoder = ClientDecoder(replace(limits, max_packet_size=LARGEST), 4)

        def made(connection: Connection) -> Handler | None:
            client = Client(account, connection, OpenDoor())
            account.registry.enter(client)
            return entered(client)

        client = socket.client
        self._connection = Connection(limits, account.services.path.round, settings, account.services.clock, made)
        if client is not None:
            self._connection.name_source((client.host, client.port))
        self._name = f"dashboard-{secrets.token_hex(6)}"

    async def serve(self) -> None:
        """Pass on what comes from either side."""
        self._connection.connection_made(cast(asyncio.Transport, self))
        self._send(encode(Connect(4, self._name, True, 0), 4))
        sending = asyncio.create_task(self._deliver(), name=self._name)
        try:
            while not self._closed:
                await self._readable.wait()
                message = await self._socket.receive()
                if message["type"] != "websocket.receive":
                    return
                self._take(message.get("text") or message.get("bytes") or "")
        finally:
            sending.cancel()
            self.close()

    async def _deliver(self) -> None:
        while True:
            while self._waiting:
                await self._socket.send_text(orjson.dumps(self._waiting.popleft()).decode())
                if self._clogged and len(self._waiting) < UNREAD // 2:
                    self._clogged = False
                    self._connection.resume_writing()
            if self._closed:
                await self._socket.close(1000, "the gateway has ended the connection")
                return
            self._more.clear()
            await self._more.wait()

    def _tell(self, **found: Any) -> None:
        self._waiting.append(found)
        self._more.set()
        if len(self._waiting) > UNREAD and not self._clogged:
            self._clogged = True
            self._connection.pause_writing()

    # -- from the page --------------------------------------------------------------------------

    def _take(self, text: str | bytes) -> None:
        try:
            asked = ASKED.validate_json(text)
            action = self._noted(asked)
            try:
                self._do(asked)
            except (MqttError, ValueError) as error:
                action.end(" ".join(str(error).split()))
                raise
            action.end(DONE)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            self._tell(**{"is": "error", "text": f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}"})
        except (MqttError, ValueError) as error:
            self._tell(**{"is": "error", "text": " ".join(str(error).split())})

    def _noted(self, asked: Subscribing | Unsubscribing | Publishing) -> Action:
        """Note for the audit trail what is asked for; the page is told whether the gateway has done it."""
        return begin_action(
            self._audit_trail, self._socket.scope, f"dashboard.{asked.do}", asked.model_dump(exclude={"do"})
        )

    def _do(self, asked: Subscribing | Unsubscribing | Publishing) -> None:
        levels = self._connection.settings.max_topic_levels
        match asked:
            case Subscribing():
                validate_topic_filter(asked.filter, levels)
                identifier = self._next("subscribed", asked.filter)
                self._send(encode(Subscribe(identifier, (Subscription(asked.filter, asked.qos),)), 4))
            case Unsubscribing():
                identifier = self._next("unsubscribed", asked.filter)
                self._send(encode(Unsubscribe(identifier, (asked.filter,)), 4))
            case Publishing():
                key = _key(asked.topic)
                validate_topic_name(key, levels)
                identifier = self._next("published", asked.topic) if asked.qos else 0
                packet = Publish(asked.qos, asked.retain, False, key, identifier, asked.payload.encode())
                self._send(encode(packet, 4))
                if not asked.qos:
                    self._tell(**{"is": "published", "topic": asked.topic, "qos": 0})

    def _next(self, what: str, topic: str) -> int:
        self._identifier = self._identifier % 65_535 + 1
        self._asked[self._identifier] = (what, topic)
        return self._identifier

    def _send(self, data: bytes) -> None:
        self._connection.data_received(data)

    # -- from the gateway -----------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send bytes to the page."""
        answers = b""
        for packet in self._decoder.feed(bytes(data)):
            match packet:
                case PublishRun():
                    for payload in packet.payloads():
                        self._message(packet.key, payload, 0, False)
                case Publish():
                    self._message(packet.key, packet.payload, packet.qos, packet.retain)
                    if packet.qos:
                        answers += ack_bytes(3 + packet.qos, packet.packet_id)
                case AckRun() | Ack():
                    ids = packet.ids if isinstance(packet, AckRun) else [packet.packet_id]
                    for identifier in ids:
                        answers += self._acknowledged(packet.kind, identifier)
                case Suback():
                    _, text = self._asked.pop(packet.packet_id, ("", ""))
                    granted = packet.codes[0]
                    if granted < 0x80:
                        self._tell(**{"is": "subscribed", "filter": text, "qos": granted})
                    else:
                        self._tell(**{"is": "error", "text": f"{text} cannot be subscribed"})
                case Connack() if packet.code:
                    self._tell(**{"is": "error", "text": f"the gateway refuses the connection (code {packet.code})"})
                case Connack():
                    self._tell(**{"is": "connected", "client": self._name})
                case Unsuback():
                    _, text = self._asked.pop(packet.packet_id, ("", ""))
                    self._tell(**{"is": "unsubscribed", "filter": text})
                case _:
                    pass
        if answers:
            asyncio.get_running_loop().call_soon(self._send, answers)

    def _message(self, key: bytes, payload: bytes, qos: int, retain: bool) -> None:
        shown = payload[:PAYLOAD_SHOWN_BYTES]
        found: dict[str, Any] = {"is": "message", "topic": key[2:].decode(), "qos": qos, "retain": retain}
        try:
            found["text"] = shown.decode()
        except UnicodeDecodeError as error:
            if len(payload) > PAYLOAD_SHOWN_BYTES and error.start > PAYLOAD_SHOWN_BYTES - 4:  # a character was cut
                found["text"] = shown[: error.start].decode()
            else:
                found["base64"] = base64.b64encode(shown).decode()
        self._tell(**found, bytes=len(payload))

    def _acknowledged(self, kind: int, identifier: int) -> bytes:
        if kind == 5:  # PUBREC
            return ack_bytes(6, identifier)
        if kind == 6:  # PUBREL
            return ack_bytes(7, identifier)
        what, topic = self._asked.pop(identifier, ("", ""))
        if what:
            self._tell(**{"is": what, "topic": topic, "qos": 1 if kind == 4 else 2})
        return b""

    # -- a transport ----------------------------------------------------------------------------

    def close(self) -> None:
        """The connection has ended, from either side."""
        if not self._closed:
            self._closed = True
            self._more.set()
            self._readable.set()
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        """Whether the transport has ended."""
        return self._closed

    def pause_reading(self) -> None:
        """Take nothing more from the page."""
        self._readable.clear()

    def resume_reading(self) -> None:
        """Take messages from the page again."""
        self._readable.set()

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        """Do nothing: the messages that wait for the page have a limit of their own."""

    def get_write_buffer_size(self) -> int:
        """Return 0: written bytes are passed on at once."""
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the default: a page has no socket of its own."""
        return default


def _key(topic: str) -> bytes:
    """A topic as it stands in a packet.

    Raises:
        ValueError: it has too many bytes, or is no text.
    """
    encoded = topic.encode()
    if len(encoded) > 65_535:
        raise ValueError("the topic has more than 65,535 bytes")
    return len(encoded).to_bytes(2) + encoded
