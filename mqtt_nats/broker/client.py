# SPDX-License-Identifier: Apache-2.0
"""One client: what its packets do.

Everything on the message path is a plain function call. What has to wait for NATS (CONNECT, SUBSCRIBE,
UNSUBSCRIBE, repairs) is a job: a client's jobs run one after the other, in a task that lives while there
are any.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.backbone.store import TooLarge
from mqtt_nats.broker.closing import close_session
from mqtt_nats.broker.inbound import Inbound
from mqtt_nats.broker.opening import open_session
from mqtt_nats.broker.operations import Receipt, RetainedOp
from mqtt_nats.broker.retaining import store_retained
from mqtt_nats.broker.subscribing import subscribe, unsubscribe
from mqtt_nats.broker.will import HEADERS, publish_will
from mqtt_nats.codec import (
    PINGRESP,
    Ack,
    AckRun,
    Connack,
    Connect,
    Disconnect,
    InvalidClientId,
    MqttError,
    Packet,
    PacketTooLarge,
    PingReq,
    ProtocolError,
    Publish,
    PublishRun,
    QuotaExceeded,
    ReasonCode,
    Subscribe,
    Unsubscribe,
    UnsupportedProtocolVersion,
    Will,
    connack_code,
    encode,
)
from mqtt_nats.connection.connection import Connection, Hold
from mqtt_nats.pubsub.message import Message
from mqtt_nats.pubsub.table import Filter, Member, Route
from mqtt_nats.session.regular import RegularOutbound
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.subjects import filter_to_subjects

if TYPE_CHECKING:
    from mqtt_nats.broker.context import Broker
    from mqtt_nats.broker.durable import DurableSide
    from mqtt_streams.sessions import SessionRecord

log = logging.getLogger("mqtt_nats.broker")

# A client's publishes that wait for JetStream; beyond this nothing is read from it.
RECEIPTS_MOST: Final = 1024
RECEIPTS_LOW: Final = 512

# Bytes that a client has not read; beyond this nothing is read from it, since answers would only be added.
UNREAD_MOST: Final = 1024 * 1024

# SUBSCRIBE and UNSUBSCRIBE packets, and repairs, that wait for NATS; beyond this nothing is read from the client.
JOBS_MOST: Final = 100
JOBS_LOW: Final = 50


class State(Enum):
    """Where a connection is in its life."""

    NEW = auto()
    OPENING = auto()
    LIVE = auto()
    ENDED = auto()


class Client(Member):
    """A connected client and its session, as far as this gateway holds it."""

    __slots__ = (
        "__weakref__",
        "_early",
        "_error",
        "_idle",
        "_jobs",
        "_task",
        "broker",
        "client_id",
        "connection",
        "durable_side",
        "epoch",
        "foreign",
        "graceful",
        "hash",
        "inbound",
        "receipts",
        "record",
        "regular_side",
        "sender_header",
        "state",
        "taken",
        "takeover_sid",
        "takeover_subject",
        "token",
        "version",
        "will",
    )

    def __init__(self, broker: Broker, connection: Connection) -> None:
        super().__init__(connection.outlet, False, "")
        self.broker = broker
        self.connection = connection
        self.state = State.NEW
        self.version = 4
        self.client_id = ""
        self.hash = ""
        self.token = ""
        self.epoch = 0
        """Stream sequence of this session's last record write; the first of them claimed it."""
        self.foreign = 0
        """Highest sequence of somebody else's write of the session record that was heard of."""
        self.record: SessionRecord | None = None
        self.will: Will | None = None
        self.graceful = False
        """The client has sent DISCONNECT."""
        self.taken = False
        """The session belongs to another connection now: leave what is stored alone."""
        self.sender_header = b""
        """The header line that names this client to receivers, or empty."""
        self.takeover_sid = b""
        self.takeover_subject = b""
        self.receipts: deque[Receipt] = deque()
        self.inbound: Inbound = Inbound(self)
        self.regular_side: RegularOutbound | None = None
        self.durable_side: DurableSide | None = None
        self._early: list[Packet] = []
        self._error: MqttError | None = None
        self._idle = False
        """The jobs wait for NATS to be connected."""
        self._jobs: deque[Coroutine[Any, Any, None]] | None = None
        self._task: asyncio.Task[None] | None = None

    # -- packets --------------------------------------------------------------------------------

    def packets(self, packets: list[Packet]) -> None:
        """Handle the packets of one read, in order."""
        if self.state is not State.LIVE:
            self._before(packets)
            return
        broker = self.broker
        table = broker.table
        for packet in packets:
            if isinstance(packet, PublishRun):
                route = table.routes.get(packet.key)
                if route is None or route.version != table.version:
                    route = table.route(packet.key)
                if packet.step - packet.head > broker.store.max_payload:
                    raise PacketTooLarge(f"nats-server takes messages of {broker.store.max_payload} bytes")
                if self.no_local:
                    for payload in packet.payloads():
                        self.publish(route, payload, 0, False, 0)
                else:
                    broker.fanout.run(route, packet, self)
            elif isinstance(packet, AckRun):
                self.acknowledged(packet.kind, packet.ids, False)
            elif isinstance(packet, Publish):
                route = table.routes.get(packet.key)
                if route is None or route.version != table.version:
                    route = table.route(packet.key)
                self.publish(route, packet.payload, packet.qos, packet.retain, packet.packet_id)
            else:
                self._other(packet)
                if self.ended:
                    break
        if broker.blocked:
            broker.block(self)
        if self.outlet.held > UNREAD_MOST:
            self.connection.hold(Hold.OUTBOUND)
        broker.link.kick()
        broker.round.start()

    def _before(self, packets: list[Packet]) -> None:
        """Packets before the session is open: CONNECT, and what came with it [MQTT-3.1.4-5] [MQTT-3.2.0-1]."""
        if self.state is State.NEW:
            connect = packets[0]
            assert isinstance(connect, Connect)  # the decoder lets nothing else come first
            self.state = State.OPENING
            self.connection.hold(Hold.HANDSHAKE)
            self._early += packets[1:]
            self.do(open_session(self, connect))
        elif self.state is State.OPENING:
            self._early += packets

    def opened(self) -> None:
        """The session is open: handle what came with CONNECT, then read on."""
        if self.state is State.ENDED:
            return
        self.state = State.LIVE
        early, self._early = self._early, []
        try:
            if early:
                self.packets(early)
            if self._error is not None:
                raise self._error
        except MqttError as error:
            self.end(error)
        self.connection.release(Hold.HANDSHAKE)

    def _other(self, packet: Packet) -> None:
        match packet:
            case PingReq():
                self.outlet.write(PINGRESP)  # [MQTT-3.12.4-1]
            case Subscribe():
                self.do(subscribe(self, packet))
            case Unsubscribe():
                self.do(unsubscribe(self, packet))
            case Disconnect():
                self.graceful = True
                self.will = None  # [MQTT-3.14.4-3]
                self.close()
            case Ack():
                self.acknowledged(packet.kind, [packet.packet_id], packet.reason >= 0x80)
            case _:
                raise ProtocolError(f"unexpected {type(packet).__name__}")

    def acknowledged(self, kind: int, ids: list[int], failed: bool) -> None:
        """PUBACK, PUBREC, PUBREL or PUBCOMP."""
        if kind == 6:
            for identifier in ids:
                self.inbound.pubrel(identifier)
        elif self.regular_side is not None:
            self.regular_side.acknowledged(kind, ids, failed)
        elif self.durable_side is not None:
            self.durable_side.machine.acknowledged(kind, ids, failed)

    # -- publishing -----------------------------------------------------------------------------

    def publish(self, route: Route, payload: bytes, qos: int, retain: bool, packet_id: int) -> None:
        """A PUBLISH of this client: what it is answered with, follows from its QoS [MQTT-3.3.4-1].

        Raises:
            PacketTooLarge: NATS would not take the message.
        """
        broker = self.broker
        size = len(payload)
        if qos or retain or self.no_local:
            size += HEADERS + len(self.sender_header) + len(route.hpub)
        if size > broker.store.max_payload:
            raise PacketTooLarge(f"nats-server takes messages of {broker.store.max_payload} bytes, headers included")
        try:
            if qos == 0:
                if retain:
                    store_retained(self, route, payload, 0, RetainedOp(self, None, not payload), b"")
                if self.no_local:
                    self.bare(route, b"NATS/1.0\r\nNmqtt-Pub:0\r\n%b\r\n" % self.sender_header, payload)
                else:
                    broker.link.out.append(b"%b%d\r\n%b\r\n" % (route.pub, len(payload), payload))
                broker.fanout.local(route, Message(route.key, payload, 0, self.no_local))
            elif qos == 1:
                receipt = Receipt(self, 4, packet_id, 2 if retain else 1)  # [MQTT-3.3.1-12] [MQTT-4.3.2-2]
                self.receipts.append(receipt)
                headers = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:%b\r\n%b\r\n" % (broker.next_id(), self.sender_header)
                if retain:
                    store_retained(self, route, payload, 1, RetainedOp(self, receipt, not payload), b"")
                self.bare(route, headers, payload)
                broker.store.put(route.msgs, headers, payload, receipt)
                if route.local:
                    broker.fanout.group(route.local, Message(route.key, payload, 1, self.client_id))
            else:
                self.inbound.publish(route.key, route, packet_id, payload, retain)
        except TooLarge as error:
            raise PacketTooLarge(str(error)) from None
        if len(self.receipts) > RECEIPTS_MOST:
            self.connection.hold(Hold.WINDOW)

    def bare(self, route: Route, headers: bytes, payload: bytes) -> None:
        """Publish to NATS clients and other gateways: the copy that is not stored."""
        size = len(headers)
        self.broker.link.out.append(b"%b%d %d\r\n%b%b\r\n" % (route.hpub, size, size + len(payload), headers, payload))

    def settle(self) -> None:
        """Send every acknowledgement that is due, in order [MQTT-4.6.0-2] [MQTT-4.6.0-3]."""
        receipts = self.receipts
        data = b""
        while receipts and not receipts[0].left:
            data += receipts.popleft().packet()
        if data:
            self.outlet.write(data)
        if len(receipts) < RECEIPTS_LOW:
            self.connection.release(Hold.WINDOW)

    def refused(self, error: ApiError) -> None:
        """JetStream does not take a message: no acknowledgement, the client has to reconnect [MQTT-4.8.0-2]."""
        log.warning("client %r: a message was not stored: %s", self.client_id, error)
        self.end(QuotaExceeded(str(error)))

    # -- receiving ------------------------------------------------------------------------------

    def take(self, message: Message, qos: int) -> None:
        """A QoS 1 or 2 message for a regular session."""
        side = self.regular_side
        if side is None:
            return
        try:
            side.publish(qos, message.head(qos), message.payload)
        except QuotaExceeded as error:
            log.warning("client %r: %s", self.client_id, error)
            self.end(error)

    def guard(self, found: Filter, message: Message, qos: int) -> None:
        """A message that needs a look before it may be sent: no_local, or retained messages still on the way."""
        if self.no_local and message.sender == self.no_local:
            return
        if self.durable and qos and message.qos:
            return  # comes from the stream
        gate = self.gates.get(found) if self.gates else None
        if gate is None:
            self.deliver(message, qos)
        elif not gate.keep(message, qos):
            self.end(QuotaExceeded("too many messages while retained messages are being sent"))

    def deliver(self, message: Message, qos: int) -> None:
        """Send a message that core NATS or local dispatch has brought."""
        if message.qos == 0 or qos == 0:
            if self.outlet.clogged:
                self.outlet.offer(message.zero(), 1)
            else:
                self.outlet.write(message.zero())
        elif not self.durable:
            self.take(message, min(qos, message.qos))

    @property
    def alive(self) -> bool:
        """True until the connection has ended."""
        return self.state is not State.ENDED

    @property
    def ended(self) -> bool:
        """True when nothing more is to be handled."""
        return self.state is State.ENDED or self.graceful

    @property
    def unanswered(self) -> bool:
        """True while CONNECT waits for its session."""
        return self.state is State.OPENING and not self.epoch

    def join(self, topic_filter: str, qos: int) -> Filter:
        """Put the client into the subscription table."""
        broker = self.broker
        link = broker.wild if topic_filter[0] in "#+" else broker.link
        subjects = filter_to_subjects(topic_filter)
        return broker.table.subscribe(self, topic_filter, qos, subjects, link, broker.fanout.arrival)

    async def fence(self) -> None:
        """Wait until NATS has taken this client's subscriptions.

        Raises:
            TimeoutError: it does not answer.
        """
        await self.broker.link.fence()
        await self.fence_wild()

    async def fence_wild(self) -> None:
        """Wait until NATS has taken the subscriptions on the connection for wildcards, where there are any.

        Raises:
            TimeoutError: it does not answer.
        """
        wild = self.broker.wild
        if any(found.link is wild for found in self.filters):
            await wild.fence()

    # -- jobs -----------------------------------------------------------------------------------

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a job after the jobs before it."""
        if self.state is State.ENDED:
            work.close()
            return
        if self._jobs is None:
            self._jobs = deque()
        self._jobs.append(work)
        if len(self._jobs) > JOBS_MOST:
            self.connection.hold(Hold.JOBS)
        if self._task is None:
            self._task = self.broker.spawn_safe(self._work(), self.client_id or "a client")

    async def _work(self) -> None:
        jobs = self._jobs
        assert jobs is not None
        try:
            while jobs and self.alive:
                try:
                    await self.connected()
                    await jobs.popleft()
                except MqttError as error:
                    self.broken(error)
                except (ApiError, RequestTimeout, NoResponders, TimeoutError) as error:
                    self.broken(MqttError(str(error), ReasonCode.SERVER_UNAVAILABLE))
                except Exception:
                    if self.alive:
                        log.exception("client %r: a job failed", self.client_id)
                        self.broken(MqttError("internal error", ReasonCode.UNSPECIFIED_ERROR))
                if len(jobs) < JOBS_LOW:
                    self.connection.release(Hold.JOBS)
        finally:
            self._task = None
            for job in jobs:
                job.close()
            jobs.clear()
            if not self.alive:
                self._leave()

    async def connected(self) -> None:
        """Wait, in a job, until NATS is connected; the job ends here when the client does."""
        online = self.broker.online
        if not online.is_set():
            self._idle = True
            try:
                await online.wait()
            finally:
                self._idle = False

    # -- the end --------------------------------------------------------------------------------

    def broken(self, error: MqttError) -> None:
        """The client violated the protocol [MQTT-4.8.0-1]."""
        if self.state is State.OPENING and self._task is not asyncio.current_task() and self._error is None:
            self._error = error  # what came before the violation is served first
            return
        if self.state is State.NEW and isinstance(error, (UnsupportedProtocolVersion, InvalidClientId)):
            # [MQTT-3.1.2-2], [MQTT-3.1.3-8]; any other bad CONNECT gets no answer [MQTT-3.1.4-1] [MQTT-3.2.2-6]
            self.outlet.write(encode(Connack(False, connack_code(error.reason)), 4))
        self.end(error)

    def end(self, error: MqttError) -> None:
        """Close the connection because of an error; the will, where there is one, is published."""
        if self.state is State.ENDED:
            return
        level = logging.DEBUG if self.state is State.NEW else logging.INFO
        log.log(level, "client %r from %s: %s", self.client_id, self.connection.peer, error)
        self.close()

    def close(self) -> None:
        """Close the connection; :meth:`lost` does the rest."""
        self.connection.close()

    def taken_over(self) -> None:
        """Another connection has claimed the session: end at once, and touch nothing of what is stored."""
        self.taken = True
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if self.durable_side is not None:
            self.durable_side.detach()
        self.connection.close()
        self.lost()

    def lost(self) -> None:
        """The socket is closed, or is about to be. Called more than once.

        A job that is running is not interrupted, unless it waits for NATS or the session has gone to somebody else:
        a write of the session record that is under way decides what there is to be left in order.
        """
        if self.state is State.ENDED:
            return
        self.state = State.ENDED
        if self.epoch:
            publish_will(self)
        if self._task is None:
            self._leave()
        elif self._idle:
            self._task.cancel()

    def _leave(self) -> None:
        """Leave everything in order; the last thing that a client does."""
        broker = self.broker
        broker.connections.discard(self)
        broker.left.set()
        if self.takeover_sid:
            broker.link.unsubscribe_raw(self.takeover_sid)
        broker.table.leave(self)
        self.receipts.clear()
        side = self.durable_side
        if side is not None:
            side.detach()
            if side.close():
                self.durable_side = None
        if broker.clients.get(self.client_id) is self:
            del broker.clients[self.client_id]
        if self.epoch and not self.taken:
            close_session(self)
