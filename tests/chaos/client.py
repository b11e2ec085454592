# SPDX-License-Identifier: Apache-2.0
"""An MQTT client that keeps its part of a session as the standard asks, through any number of connections.

It resends what is not acknowledged (PUBLISH with DUP, or PUBREL) in order when it is back, goes to the next of several
ports when its server is gone, hands a QoS 2 message to the application when its identifier is new and not otherwise,
and writes everything down.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import ssl
from collections.abc import Callable, Sequence

from mqtt_nats.codec import (
    PINGREQ,
    Ack,
    AckRun,
    Connack,
    Connect,
    Disconnect,
    Packet,
    PingResp,
    Properties,
    Publish,
    PublishRun,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    ack_bytes,
    encode,
    encode_publish,
)
from tests.chaos.connection import Link
from tests.chaos.history import History
from tests.chaos.messages import ClientWill, Message, Outgoing, parse_payload, payload_of

_PATIENCE = 10.0  # seconds for CONNACK: a session is resumed from JetStream, perhaps in the middle of an election
_NUMBERS = itertools.count(1)  # of connections, so that those of several clients with one id can be told apart
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4)  # seconds between attempts to connect


class ChaosClient:
    """One client. All methods belong to one event loop.

    Args:
        client_id: without spaces.
        ports: of 127.0.0.1, tried in turn.
        history: where everything is written down.
        version: 4 or 5.
        clean: clean session (3.1.1) or clean start on every connection (5.0).
        expiry: session expiry interval in seconds (5.0).
        keepalive: seconds; the connection is given up when a PINGREQ is not answered within half of it.
        max_inflight: unacknowledged messages of ours at a time.
        ack_after: seconds that the application takes for a message before it is acknowledged.
        size: bytes of a payload, at least.
        will: for every connection.
        stay: connect again when a connection is lost.
        receive_maximum: of CONNECT (5.0); 0: none is given.
        restless: seconds after which the client drops its own connection, on average; 0: it never does.
        on_message: called with (publisher, number, topic) of each message for the application.
    """

    def __init__(
        self,
        client_id: str,
        ports: Sequence[int],
        history: History,
        version: int = 4,
        clean: bool = False,
        expiry: int = 86_400,
        keepalive: int = 30,
        max_inflight: int = 20,
        *,
        ack_after: float = 0.0,
        size: int = 0,
        will: ClientWill | None = None,
        stay: bool = True,
        receive_maximum: int = 0,
        restless: float = 0.0,
        on_message: Callable[[str, int, str], None] | None = None,
    ) -> None:
        self.client_id = client_id
        self.ports = list(ports)
        self.history = history
        self.version = version
        self.clean = clean
        self.expiry = expiry
        self.keepalive = keepalive
        self.max_inflight = max_inflight
        self.ack_after = ack_after
        self.size = size
        self.will = will
        self.stay = stay
        self.receive_maximum = receive_maximum
        self.restless = restless
        self.on_message = on_message
        self.tls: ssl.SSLContext | None = None
        """What TLS is spoken with; unset: none is."""
        self.connections = 0
        """How many CONNACKs have accepted."""
        self.delivered: set[Message] = set()
        """What the application has got."""
        self.owed: set[int] = set()
        """Packet identifiers that were not acknowledged as a connection was lost, and have not come since."""
        self.interrupted = 0
        """How many connections were lost with messages to us that we had not acknowledged."""
        self.acknowledged: set[Message] = set()
        """Our messages that the server has acknowledged."""
        self.connected = asyncio.Event()
        self.filters: dict[str, int] = {}
        """What was granted: filter → QoS asked for."""
        self.present = False
        """Session present of the last CONNACK."""
        self.link: Link | None = None
        self._out: dict[int, Outgoing] = {}
        self._in: dict[int, Message] = {}
        self.wills_due: set[Message] = set()
        """Wills, as a watcher gets them, of accepted connections that have ended without DISCONNECT.

        A delayed one is due when the client does not come back.
        """
        self._asked: dict[int, Subscribe | Unsubscribe] = {}
        self._answers: dict[int, asyncio.Future[tuple[int, ...]]] = {}
        self._next_id = 0
        self._turn = 0
        self._window = max_inflight
        self._room = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._room.set()
        self._closing = False
        self._pongs: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._chance = random.Random(client_id)

    # -- the connection ---------------------------------------------------------------------------

    async def connect(self, timeout: float = 60.0) -> bool:
        """Connect, and stay connected from now on; whether the session was present."""
        if self._task is None:
            self._task = asyncio.create_task(self.run())
        async with asyncio.timeout(timeout):
            await self.connected.wait()
        return self.present

    async def run(self) -> None:
        """Connect, and again whenever the connection is lost, until the end."""
        failures = 0
        while not self._closing:
            port = self.ports[self._turn % len(self.ports)]
            link = await self._open(port)
            if link is None:
                self._turn += 1
                if self._turn % len(self.ports) == 0:  # all have been tried
                    await asyncio.sleep(_PAUSES[min(failures, len(_PAUSES) - 1)])
                    failures += 1
                continue
            failures = 0
            self._close_late(link)
            pinging = asyncio.create_task(self._ping(link))
            dropping = self._drop_later(link)
            try:
                await link.ended.wait()
            finally:
                pinging.cancel()
                dropping.cancel()
                self._lost(link)
            if not self.stay:
                return
            self._turn += 1

    async def _open(self, port: int) -> Link | None:
        """A connection whose CONNECT was accepted; None when that does not come about."""
        loop = asyncio.get_running_loop()
        try:
            _, link = await loop.create_connection(lambda: Link(self, port), "127.0.0.1", port, ssl=self.tls)
        except OSError:
            return None
        link.number = next(_NUMBERS)
        will = self.will.packet(self.client_id, link.number, self.version) if self.will is not None else None
        properties: Properties | None = None
        if self.version == 5:
            properties = {"session_expiry_interval": self.expiry}
            if self.receive_maximum:
                properties["receive_maximum"] = self.receive_maximum
        connect = Connect(self.version, self.client_id, self.clean, self.keepalive, will=will, properties=properties)
        self.history.note("connect", port=port, clean=self.clean, conn=link.number)
        link.send(encode(connect, self.version))
        try:
            async with asyncio.timeout(_PATIENCE):
                connack = await link.connack
        except (TimeoutError, ConnectionError) as error:
            link.abort()
            if self.link is link:  # CONNACK came at the last moment
                self._lost(link)
            else:
                self.history.note("lost", reason=str(error) or "no CONNACK", conn=link.number, open=[])
            return None
        except asyncio.CancelledError:
            link.abort()  # nobody would end it
            raise
        if connack.code:
            self.history.note("refused", code=int(connack.code), conn=link.number)
            link.abort()
            return None
        return link

    def accepted(self, link: Link, connack: Connack) -> None:
        """CONNACK has come: restore the session before any other packet is handled."""
        self.history.note("connected", port=link.port, present=connack.session_present, conn=link.number)
        if self.will is not None:
            self.history.note("will", topic=self.will.topic, qos=self.will.qos, n=-link.number, delay=self.will.delay)
        self.link = link
        self.present = connack.session_present
        self.connections += 1
        maximum = (connack.properties or {}).get("receive_maximum", 65_535)
        self._window = min(self.max_inflight, maximum)
        if not connack.session_present:
            self._in.clear()
            for filter_, qos in self.filters.items():
                asked = (one.filters[0] for one in self._asked.values() if isinstance(one, Subscribe))
                if all(one.topic_filter != filter_ for one in asked):
                    self._ask(Subscribe(self._free_id(), (Subscription(filter_, qos),)))
            for identifier, one in list(self._out.items()):
                if one.released:
                    self.history.note("unknown", topic=one.topic, n=one.n)
                    self._done(identifier)
        for request in self._asked.values():
            link.send(encode(request, self.version))
        for identifier, one in list(self._out.items()):
            if one.released:
                link.send(ack_bytes(6, identifier))
            else:
                self._transmit(identifier, one)
        self.connected.set()
        self._make_room()

    def _lost(self, link: Link) -> None:
        self.connected.clear()
        if self.link is link:
            self.link = None
        if not self._closing:
            if self.will is not None and not self.will.delay:
                self.wills_due.add((self.client_id, -link.number))
            self.history.note("lost", reason=link.reason, conn=link.number, open=sorted(link.unacknowledged))
            self.owed |= link.unacknowledged
            self.interrupted += bool(link.unacknowledged)
        for pong in self._pongs:
            if not pong.done():
                pong.set_exception(ConnectionError("connection lost"))
        self._pongs.clear()

    def _close_late(self, link: Link) -> None:
        """The end came while this connection was being made."""
        if self._closing:
            link.close()

    def _drop_later(self, link: Link) -> asyncio.TimerHandle:
        """Have the client drop this connection by itself, where it does that."""

        def drop() -> None:
            if self.restless and not self._closing:
                link.reason = "dropped"
                link.abort()

        delay = self._chance.expovariate(1 / self.restless) if self.restless else 0.0
        return asyncio.get_running_loop().call_later(delay, drop)

    async def _ping(self, link: Link) -> None:
        half = self.keepalive / 2
        while self.keepalive:
            await asyncio.sleep(half)
            try:
                async with asyncio.timeout(half):
                    await self.ping()
            except (TimeoutError, ConnectionError):
                link.reason = "no PINGRESP"
                link.abort()
                return

    async def ping(self) -> None:
        """A PINGREQ round trip. ConnectionError when the connection ends first."""
        if self.link is None:
            raise ConnectionError("not connected")
        pong: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pongs.append(pong)
        self.link.send(PINGREQ)
        await pong

    async def close(self) -> None:
        """DISCONNECT; the session stays unless it ends with the connection."""
        await self._end(orderly=True)

    async def abandon(self) -> None:
        """End as a crash would: without DISCONNECT, and do not come back."""
        await self._end(orderly=False)

    async def _end(self, orderly: bool) -> None:
        self._closing = True
        link = self.link
        if link is not None:
            self.history.note("disconnect" if orderly else "abandoned", conn=link.number)
            if not orderly and self.will is not None:
                self.wills_due.add((self.client_id, -link.number))
            if orderly:
                link.send(encode(Disconnect(), self.version))
                link.close()
            else:
                link.abort()
        if self._task is not None:
            if link is None:
                self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self.history.flush()

    def rest(self) -> None:
        """Drop no connection by itself any more."""
        self.restless = 0.0

    def drop(self) -> None:
        """Cut the connection without DISCONNECT; a new one follows."""
        if self.link is not None:
            self.link.reason = "dropped"
            self.link.abort()

    # -- what the application does ------------------------------------------------------------------

    async def publish(
        self,
        topic: str,
        n: int,
        qos: int,
        *,
        retain: bool = False,
        properties: Properties | None = None,
        payload: bytes | None = None,
    ) -> None:
        """Hand over message number ``n``; waits for a place in the window, not for the acknowledgement."""
        while len(self._out) >= self._window:
            self._room.clear()
            await self._room.wait()
        data = payload_of(self.client_id, n, self.size) if payload is None else payload
        one = Outgoing(topic, n, qos, retain, properties, data)
        if not qos:
            await self.connected.wait()
            self._transmit(0, one)
            return
        identifier = self._free_id()
        self._out[identifier] = one
        self._idle.clear()
        if self.link is not None:
            self._transmit(identifier, one)

    def _transmit(self, identifier: int, one: Outgoing) -> None:
        link = self.link
        assert link is not None
        dup = one.sent and one.qos > 0 and self.present
        self.history.note(
            "publish", topic=one.topic, qos=one.qos, n=one.n, id=identifier, dup=one.sent, conn=link.number
        )
        one.sent = True
        key = one.topic.encode()
        key = len(key).to_bytes(2, "big") + key
        link.send(encode_publish(key, one.payload, one.qos, one.retain, dup, identifier, self.version, one.properties))

    @property
    def acked(self) -> int:
        """How many of our messages are acknowledged."""
        return len(self.acknowledged)

    @property
    def unacknowledged(self) -> int:
        """How many of our messages are not acknowledged."""
        return len(self._out)

    @property
    def unreleased(self) -> int:
        """How many messages to us at QoS 2 wait for their PUBREL."""
        return len(self._in)

    @property
    def owed_once(self) -> set[int]:
        """What is owed at QoS 2: to this client and no other, also where it is a member of a group."""
        return self.owed & self._in.keys()

    @property
    def answered(self) -> bool:
        """Whether every SUBSCRIBE and UNSUBSCRIBE has its answer."""
        return not self._asked

    async def settled(self, timeout: float) -> bool:
        """Wait until everything that was handed over is acknowledged; False when that takes longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        return self._idle.is_set()

    async def subscribe(self, filter_: str, qos: int, timeout: float = 30.0) -> int:
        """Subscribe and wait for SUBACK, also over reconnects; the granted QoS, or a code from 0x80 on."""
        request = Subscribe(self._free_id(), (Subscription(filter_, qos),))
        return (await self._request(request, timeout))[0]

    async def unsubscribe(self, filter_: str, timeout: float = 30.0) -> None:
        """Unsubscribe and wait for UNSUBACK."""
        await self._request(Unsubscribe(self._free_id(), (filter_,)), timeout)

    async def _request(self, request: Subscribe | Unsubscribe, timeout: float) -> tuple[int, ...]:
        answer: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()
        self._answers[request.packet_id] = answer
        self._ask(request)
        if self.link is not None:
            self.link.send(encode(request, self.version))
        async with asyncio.timeout(timeout):
            return await answer

    def _ask(self, request: Subscribe | Unsubscribe) -> None:
        self._asked[request.packet_id] = request
        if isinstance(request, Subscribe):
            for one in request.filters:
                self.history.note("subscribe", filter=one.topic_filter, qos=one.qos)
        else:
            for filter_ in request.filters:
                self.history.note("unsubscribe", filter=filter_)
                self.filters.pop(filter_, None)

    def _free_id(self) -> int:
        while True:
            self._next_id = self._next_id % 65_535 + 1
            if self._next_id not in self._out and self._next_id not in self._asked:
                return self._next_id

    # -- what the server sends ------------------------------------------------------------------------

    def handle(self, link: Link, packet: Packet) -> None:
        """Any packet after CONNACK."""
        if isinstance(packet, Publish):
            self._message(link, packet.key, packet.payload, packet.qos, packet.dup, packet.packet_id, packet.retain)
        elif isinstance(packet, PublishRun):
            for payload in packet.payloads():
                self._message(link, packet.key, payload, 0, False, 0, False)
        elif isinstance(packet, AckRun):
            for identifier in packet.ids:
                self._acknowledged(link, packet.kind, identifier, 0)
        elif isinstance(packet, Ack):
            self._acknowledged(link, packet.kind, packet.packet_id, packet.reason)
        elif isinstance(packet, Suback | Unsuback):
            self._answered(packet)
        elif isinstance(packet, PingResp):
            if self._pongs:
                pong = self._pongs.pop(0)
                if not pong.done():
                    pong.set_result(None)
        elif isinstance(packet, Disconnect):
            link.reason = f"DISCONNECT {int(packet.reason):#04x}"
            if packet.reason == 0x8E:
                self.history.note("taken-over", conn=link.number)

    def _message(
        self, link: Link, key: bytes, payload: bytes, qos: int, dup: bool, identifier: int, retain: bool
    ) -> None:
        topic = key[2:].decode()
        of, n = parse_payload(payload) or ("?", 0)
        self.history.note(
            "received", of=of, n=n, topic=topic, qos=qos, dup=dup, id=identifier, retain=retain, conn=link.number
        )
        if qos != 2 or identifier not in self._in:
            self.history.note("delivered", of=of, n=n, topic=topic)
            self.delivered.add((of, n))
            if self.on_message is not None:
                self.on_message(of, n, topic)
        if not qos:
            return
        if qos == 2:
            self._in[identifier] = of, n
        link.unacknowledged.add(identifier)
        self.owed.discard(identifier)
        if self.ack_after:
            asyncio.get_running_loop().call_later(self.ack_after, link.acknowledge, qos, identifier)
        else:
            link.acknowledge(qos, identifier)

    def _acknowledged(self, link: Link, kind: int, identifier: int, reason: int) -> None:
        if kind == 6:
            self.history.note("released", id=identifier)
            self._in.pop(identifier, None)
            link.send(ack_bytes(7, identifier))
            return
        one = self._out.get(identifier)
        if one is None:
            if kind == 5 and not reason:
                link.send(ack_bytes(6, identifier))
            return
        if reason >= 0x80 and kind != 7:
            self.history.note("refused", code=reason, topic=one.topic, n=one.n)
            self._done(identifier)
        elif kind == 5:
            if one.qos == 2:
                one.released = True
                link.send(ack_bytes(6, identifier))
        elif (kind == 4 and one.qos == 1) or (kind == 7 and one.released):
            self.acknowledged.add((self.client_id, one.n))
            self.history.note("acked", topic=one.topic, n=one.n, conn=link.number)
            self._done(identifier)

    def _done(self, identifier: int) -> None:
        del self._out[identifier]
        if not self._out:
            self._idle.set()
        self._make_room()

    def _make_room(self) -> None:
        if len(self._out) < self._window:
            self._room.set()

    def _answered(self, packet: Suback | Unsuback) -> None:
        request = self._asked.pop(packet.packet_id, None)
        if isinstance(request, Subscribe) and isinstance(packet, Suback):
            for one, code in zip(request.filters, packet.codes, strict=True):
                if code < 0x80:
                    self.filters[one.topic_filter] = one.qos
                    self.history.note("subscribed", filter=one.topic_filter, qos=code)
                else:
                    self.history.note("refused", code=code, filter=one.topic_filter)
        answer = self._answers.pop(packet.packet_id, None)
        if answer is not None and not answer.done():
            answer.set_result(packet.codes)
