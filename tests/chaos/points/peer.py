# SPDX-License-Identifier: Apache-2.0
"""An MQTT client that comes back: it keeps a client's session state, and sends again what MQTT has it send again.

What is asked of it is done on the connection that it has, or on the next one. At one packet it can have its gateway
killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from mqtt_nats.codec import (
    Ack,
    AckRun,
    ClientDecoder,
    Connack,
    Connect,
    Disconnect,
    Limits,
    Packet,
    Properties,
    Publish,
    PublishRun,
    ReasonCode,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    Will,
    ack_bytes,
    encode,
)
from tests.harness.rawclient import HOST, PUBACK, PUBCOMP, PUBREC, PUBREL, key_of

KINDS: Final = {PUBACK: "PUBACK", PUBREC: "PUBREC", PUBREL: "PUBREL", PUBCOMP: "PUBCOMP"}

PATIENCE: Final = 30.0
"""Seconds in which a gateway answers CONNECT."""

AGAIN: Final = 0.05
"""Seconds between two attempts to connect."""

_LIMITS: Final = Limits(
    max_packet_size=2**28, connect_packet_size=2**28, max_topic_levels=100, max_filters=100, max_user_properties=100
)

Note = Callable[..., None]
"""``note(what, **fields)`` of a history."""

_CONNECTIONS: Final = itertools.count(1)


@dataclass
class Sending:
    """A publish that is not complete."""

    topic: str
    n: int
    qos: int
    id: int
    payload: bytes
    retain: bool
    released: bool = False
    sent: bool = False


@dataclass
class Delivered:
    """A message as the application gets it."""

    topic: str
    payload: bytes
    qos: int
    dup: bool
    retain: bool


@dataclass
class PacketTrap:
    """At the nth packet of a kind from the gateway, ``kill`` is called.

    ``mode``: "lost" = the client never gets it; "unanswered" = it does, and answers nothing; "answered" = its answer
    has been written to the socket.
    """

    kind: str
    mode: str
    kill: Callable[[], None]
    nth: int = 1
    sprung: bool = False


class Peer:
    """One client.

    Args:
        client_id: its name.
        ports: where to connect, in this order, from the start again after each connection.
        note: takes down what happens.
        version: 4 or 5.
        clean: each connection begins a session that ends with it.
        will: topic and QoS of its will; its payload has the number of the connection.
    """

    def __init__(
        self,
        client_id: str,
        ports: Sequence[int],
        note: Note,
        *,
        version: int = 4,
        clean: bool = False,
        will: tuple[str, int] | None = None,
    ) -> None:
        self.client_id = client_id
        self.ports = list(ports)
        self.version = version
        self.clean = clean
        self.will = will
        self.trap: PacketTrap | None = None
        self.withheld: set[str] = set()
        """Kinds of packets that are not answered: PUBLISH, PUBREC, PUBREL."""
        self.online = asyncio.Event()
        self.port = 0
        """Where it is connected, or tries to be."""
        self.connections = 0
        self.armed: list[int] = []
        """Numbers of the connections that were accepted with a will."""
        self.sending: dict[int, Sending] = {}
        self.holding: dict[int, bytes] = {}
        """QoS 2 messages that were delivered and not released, by packet identifier."""
        self.delivered: list[Delivered] = []
        self.acked: dict[str, list[int]] = {}
        """Numbers of completed publishes by topic."""
        self.requests: dict[int, Subscribe | Unsubscribe] = {}
        self.violations: list[str] = []
        """What a history does not show."""
        self.forget = False
        """The next connection begins a new session."""
        self._note = note
        self._begun = False
        self._asked_clean = False
        self._conn = 0
        self._open: set[int] = set()
        """Identifiers of what was received and not acknowledged."""
        self._last_id = 0
        self._writer: asyncio.StreamWriter | None = None
        self._unanswered: deque[tuple[int, int]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._keep = False
        self._abandoned: list[asyncio.StreamWriter] = []

    # -- what is asked of it ------------------------------------------------------------------------

    def start(self) -> None:
        """Connect, and stay connected until :meth:`close`."""
        self._task = asyncio.get_running_loop().create_task(self._stay())

    def publish(self, topic: str, n: int, qos: int, *, retain: bool = False) -> None:
        """Publish message ``n`` of a topic."""
        sending = Sending(topic, n, qos, self._free_id(), b"%s %d" % (self.client_id.encode(), n), retain)
        self.sending[sending.id] = sending
        if self.online.is_set():
            self._send(sending)

    def subscribe(self, topic_filter: str, qos: int) -> None:
        """Subscribe."""
        identifier = self._free_id()
        self._request(Subscribe(identifier, (Subscription(topic_filter, qos),)))

    def unsubscribe(self, topic_filter: str) -> None:
        """Unsubscribe."""
        self._note("unsubscribe", filter=topic_filter)
        self._request(Unsubscribe(self._free_id(), (topic_filter,)))

    def begin_anew(self, topic_filter: str) -> None:
        """Have the next connection begin a new session; the present one has this subscription."""
        self.forget = True
        for sending in self.sending.values():
            self._note("unknown", topic=sending.topic, n=sending.n)
        self.sending.clear()
        self._note("unsubscribe", filter=topic_filter)

    def answer(self) -> None:
        """Send the answers that were withheld."""
        self.withheld.clear()
        while self._unanswered:
            self._answer(*self._unanswered.popleft())

    @property
    def unanswered(self) -> list[str]:
        """The answers that are withheld."""
        return [KINDS[kind] for kind, _ in self._unanswered]

    @property
    def settled(self) -> bool:
        """Whether everything that was asked is done."""
        return self.online.is_set() and not self.sending and not self.requests

    def drop(self) -> None:
        """Break the connection; it then connects again."""
        if self._writer is not None:
            self._writer.transport.abort()

    def leave(self) -> None:
        """Send DISCONNECT behind everything else; it then connects again."""
        if self.online.is_set():
            self._write(encode(Disconnect(), self.version))

    def abandon(self) -> None:
        """Let the connection be, unread but open, and connect again: to take the session over."""
        if self._reading is not None and self.online.is_set():
            self._keep = True
            self._reading.cancel()

    async def close(self, *, graceful: bool = False) -> None:
        """Leave for good; ``graceful``: with DISCONNECT, to be let go by the gateway."""
        writer = self._writer
        if graceful and writer is not None and self.online.is_set():
            self._write(encode(Disconnect(), self.version))
            self._note("disconnect", conn=self._conn)
            self.online.clear()
            if self._reading is not None:
                await asyncio.wait([self._reading], timeout=5)
        elif self.online.is_set():
            self._note("abandoned", conn=self._conn)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.drop()
        for writer in self._abandoned:
            writer.transport.abort()

    # -- connections --------------------------------------------------------------------------------

    async def _stay(self) -> None:
        while True:
            for port in list(self.ports):
                before = self.connections
                self._reading = asyncio.get_running_loop().create_task(self._live(port))
                try:
                    with contextlib.suppress(OSError, TimeoutError):
                        await asyncio.wait([self._reading])
                        if not self._reading.cancelled():
                            self._reading.result()
                finally:
                    self._reading.cancel()
                if self.connections != before:
                    break
            await asyncio.sleep(AGAIN)

    async def _live(self, port: int) -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        decoder = ClientDecoder(_LIMITS, self.version)
        self._writer = writer
        try:
            self._connect(port)
            async with asyncio.timeout(PATIENCE) as deadline:
                while data := await reader.read(65_536):
                    for packet in decoder.feed(data):
                        if not self._handle(packet):
                            return
                    if decoder.error is not None:
                        self.violations.append(f"{self.client_id}: {decoder.error}")
                        return
                    if self.online.is_set():
                        deadline.reschedule(None)
        finally:
            if self._writer is writer:
                self._writer = None
            if self.online.is_set():
                self._note("lost", conn=self._conn, open=sorted(self._open))
            self.online.clear()
            self._unanswered.clear()
            if self._keep:
                self._keep = False
                self._abandoned.append(writer)  # a writer that nobody has closes its connection
            else:
                writer.transport.abort()

    def _connect(self, port: int) -> None:
        self._conn = next(_CONNECTIONS)
        clean = self.clean or self.forget or (self.version == 5 and not self._begun)
        self._asked_clean = clean
        will = None
        if self.will is not None:
            topic, qos = self.will
            will = Will(topic, b"%s %d" % (self.client_id.encode(), -self._conn), qos, False)
        properties: dict[str, Any] = {} if self.clean else {"session_expiry_interval": 3600}
        connect = Connect(
            self.version,
            self.client_id,
            clean,
            0,
            will=will,
            properties=cast(Properties, properties) if self.version == 5 else None,
        )
        self.port = port
        self._note("connect", port=port, clean=self.clean or self.forget, conn=self._conn)
        self._write(encode(connect, self.version))

    def _connected(self, packet: Connack) -> bool:
        if packet.code:
            return False
        self.connections += 1
        self._note("connected", present=packet.session_present, conn=self._conn)
        self._open.clear()
        if packet.session_present and self._asked_clean:
            self.violations.append(f"{self.client_id}: a session is present after a clean start")
        if self.will is not None:
            self.armed.append(self._conn)
            self._note("will", topic=self.will[0], qos=self.will[1], n=-self._conn, delay=0)
        if not packet.session_present:
            self.holding.clear()
        self._begun, self.forget = True, False
        self.online.set()
        for sending in list(self.sending.values()):
            self._send(sending)
        for request in self.requests.values():
            self._ask(request)
        return True

    # -- packets ------------------------------------------------------------------------------------

    def _handle(self, packet: Packet) -> bool:
        """Handle one packet; False ends the connection."""
        if isinstance(packet, AckRun):
            return all(self._one(KINDS[packet.kind], Ack(packet.kind, identifier, 0)) for identifier in packet.ids)
        if isinstance(packet, PublishRun):
            publishes = [Publish(0, False, False, packet.key, 0, payload) for payload in packet.payloads()]
            return all(self._one("PUBLISH", publish) for publish in publishes)
        name = KINDS[packet.kind] if isinstance(packet, Ack) else type(packet).__name__.upper()
        return self._one(name, packet)

    def _one(self, name: str, packet: Packet) -> bool:
        trap = self.trap
        if trap is not None and trap.kind == name:
            trap.nth -= 1
            if not trap.nth:
                return self._caught(trap, packet)
        return self._react(packet)

    def _caught(self, trap: PacketTrap, packet: Packet) -> bool:
        self.trap = None
        trap.sprung = True
        if trap.mode != "lost":
            writer = self._writer
            if trap.mode == "unanswered":
                self._writer = None
            self._react(packet)
            self._writer = writer
        trap.kill()
        return False

    def _react(self, packet: Packet) -> bool:
        match packet:
            case Connack():
                return self._connected(packet)
            case Publish():
                self._received(packet)
            case Ack():
                self._acknowledged(packet)
            case Suback() | Unsuback():
                request = self.requests.pop(packet.packet_id, None)
                if any(code >= 0x80 for code in packet.codes):
                    self.violations.append(f"{self.client_id}: {request} was refused: {packet}")
                if isinstance(request, Subscribe):
                    self._note("subscribed", filter=request.filters[0].topic_filter, qos=request.filters[0].qos)
            case Disconnect() if packet.reason == ReasonCode.SESSION_TAKEN_OVER:
                self._note("taken-over", conn=self._conn)
            case _:
                pass
        return True

    def _received(self, packet: Publish) -> None:
        identifier, qos = packet.packet_id, packet.qos
        topic = packet.key[2:].decode()
        of, _, number = packet.payload.decode().partition(" ")
        message = {"of": of, "n": int(number), "topic": topic}
        self._note("received", qos=qos, dup=packet.dup, id=identifier, conn=self._conn, **message)
        if qos != 2 or identifier not in self.holding:
            self.delivered.append(Delivered(topic, packet.payload, qos, packet.dup, packet.retain))
            self._note("delivered", **message)
        if qos == 2:
            self.holding[identifier] = packet.payload
        if qos:
            self._open.add(identifier)
            self._reply("PUBLISH", PUBACK if qos == 1 else PUBREC, identifier)

    def _reply(self, kind: str, answer: int, identifier: int) -> None:
        if kind in self.withheld:
            self._unanswered.append((answer, identifier))
        else:
            self._answer(answer, identifier)

    def _answer(self, kind: int, identifier: int) -> None:
        self._write(ack_bytes(kind, identifier))
        if kind == PUBCOMP:
            if self.holding.pop(identifier, None) is not None:
                self._note("released", id=identifier)
        elif self._writer is not None:
            self._open.discard(identifier)

    def _acknowledged(self, packet: Ack) -> None:
        identifier = packet.packet_id
        if packet.kind == PUBREL:
            self._reply("PUBREL", PUBCOMP, identifier)
            return
        sending = self.sending.get(identifier)
        if sending is None:
            return
        if packet.kind == PUBREC and packet.reason < 0x80:
            sending.released = True
            if "PUBREC" in self.withheld:
                self._unanswered.append((PUBREL, identifier))
            else:
                self._write(ack_bytes(PUBREL, identifier))
            return
        del self.sending[identifier]
        if packet.reason >= 0x80:
            self.violations.append(f"{self.client_id}: publish {sending.n} was refused: {packet}")
            return
        self.acked.setdefault(sending.topic, []).append(sending.n)
        self._note("acked", topic=sending.topic, n=sending.n, conn=self._conn)

    def _send(self, sending: Sending) -> None:
        if sending.released:
            self._write(ack_bytes(PUBREL, sending.id))
            return
        dup, sending.sent = sending.sent, True
        publish = Publish(sending.qos, sending.retain, dup, key_of(sending.topic), sending.id, sending.payload)
        self._note(
            "publish", topic=sending.topic, qos=sending.qos, n=sending.n, id=sending.id, dup=dup, conn=self._conn
        )
        self._write(encode(publish, self.version))

    def _request(self, request: Subscribe | Unsubscribe) -> None:
        self.requests[request.packet_id] = request
        if self.online.is_set():
            self._ask(request)

    def _ask(self, request: Subscribe | Unsubscribe) -> None:
        if isinstance(request, Subscribe):
            self._note("subscribe", filter=request.filters[0].topic_filter, qos=request.filters[0].qos)
        self._write(encode(request, self.version))

    def _write(self, data: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():  # else it is sent again after the reconnect
            with contextlib.suppress(OSError):
                self._writer.write(data)

    def _free_id(self) -> int:
        while True:
            self._last_id = self._last_id % 65_535 + 1
            if self._last_id not in self.sending and self._last_id not in self.requests:
                return self._last_id
