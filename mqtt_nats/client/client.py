# SPDX-License-Identifier: Apache-2.0
"""A connected client: how its packets are handled.

The message path is plain function calls. Work that has to wait for NATS (CONNECT, SUBSCRIBE, UNSUBSCRIBE, repairs) is
a job: the jobs of a client run one after the other, in a task that exists while there are jobs.

Packets behind a SUBSCRIBE or UNSUBSCRIBE wait until that packet has taken effect at this gateway. Packets behind a
PUBLISH whose packet identifier is being released wait for PUBCOMP. The end of the connection waits for all these
packets. See :mod:`mqtt_nats.transport.packet_order`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.access.acl import of_presence
from mqtt_nats.base.logs import FAILURES, log_failure, once, shorten
from mqtt_nats.client.authentication import begin
from mqtt_nats.client.connect import handle_connect, refusal, refuse, terms
from mqtt_nats.client.disconnect import fall_silent, goodbye, handle_disconnect, leave
from mqtt_nats.client.subscribe import begin_subscribing, subscribe, unsubscribe
from mqtt_nats.codec import (
    PINGRESP,
    Ack,
    AckRun,
    Auth,
    Connect,
    Disconnect,
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
)
from mqtt_nats.codec.wire import PUBREL
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.delivery.receiver import Receiver
from mqtt_nats.ingress.carried import publish_carried
from mqtt_nats.ingress.publish import publish, publish5, publish_run, route_for
from mqtt_nats.ingress.qos2 import Inbound
from mqtt_nats.lifecycle.will import publish_or_delay_will
from mqtt_nats.messages.message import Message
from mqtt_nats.messages.publish_encoder import Aliases, encode_for_subscriber
from mqtt_nats.messages.terms import UNLIMITED
from mqtt_nats.protocol.transient_sender import Late, TransientSender
from mqtt_nats.pubsub.routing_table import Choice
from mqtt_nats.sessions.groups.subscribe import acknowledged
from mqtt_nats.sessions.guard import hears_presence
from mqtt_nats.sessions.session import State
from mqtt_nats.transport.connection import Connection, Handler, Hold
from mqtt_nats.transport.packet_order import passes
from mqtt_streams.api import ApiError

if TYPE_CHECKING:
    from mqtt_nats.access.authenticator import Allow, Door
    from mqtt_nats.client.account import Account
    from mqtt_nats.client.authentication import Authentication
    from mqtt_nats.sessions.guard import Guard
    from mqtt_streams.sessions import SessionRecord

log = logging.getLogger("mqtt_nats.broker")

# Bytes that a client has not read; beyond this nothing is read from the client: its packets would add more answers.
UNREAD_MOST: Final = 1024 * 1024


class Client(Receiver):
    """A connected client and the state of its session in this gateway."""

    __slots__ = (
        "__weakref__",
        "access",
        "account",
        "asked",
        "authentication",
        "tenant_served",
        "waiting_since",
        "warned",
    )

    def __init__(self, account: Account, connection: Connection, access: Door, tenant_served: bool = True) -> None:
        super().__init__(connection, account.ingress, account.delivery)
        self.account = account
        self.authentication: Authentication | None = None
        """Enhanced authentication; None = CONNECT names no authentication method."""
        self.asked = ""
        """Client id in CONNECT, for the log: the client may have it, as ``client_id``, after its authentication."""
        self.warned = False
        """The log has a warning that limits refuse filters of this client."""
        self.access = access
        """The authentication of the listener."""
        self.tenant_served = tenant_served
        """Whether the tenant of the listener is served; otherwise CONNECT is refused."""
        self.waiting_since = 0.0
        """Loop time in seconds since which CONNECT waits for NATS or a place; 0 = the beginning, infinite = neither."""

    # -- CONNECT --------------------------------------------------------------------------------

    def move(self, account: Account) -> None:
        """Belong to another account from now on."""
        self.account, self.services, self.path = account, account.services, account.services.path
        self.ingress, self.delivery = account.ingress, account.delivery

    def admit(self, granted: Allow) -> None:
        """Set the decision of the authentication."""
        self.granted, self.user = granted, granted.user

    def begin_waiting(self, since: float = inf) -> None:
        """Note that CONNECT waits: for `connect_rate`, authenticators or a place; the client's end cancels the wait.

        Args:
            since: present loop time in seconds, for a place; infinite = the wait does not depend on NATS.
        """
        self._wait_since(since, True)

    def end_waiting(self) -> None:
        """Note that CONNECT does not wait any more: `connect_timeout` begins."""
        self._wait_since(asyncio.get_running_loop().time(), False)

    def _wait_since(self, since: float, idle: bool) -> None:
        self.waiting_since = since
        if self._jobs is not None:
            self._jobs.note_idle(idle)

    def guard_by(self, guard: Guard | None) -> None:
        """Set the permissions of the client; None = no rules and no hooks apply to it."""
        self.guarded = guard

    def negotiate(self, expiry: int | None, *, bridge: bool) -> None:
        """Set what CONNECT, with its terms, and the settings agree upon; ``expiry``: session expiry interval."""
        self.expiry = expiry
        if self.terms.topic_alias_maximum:
            self.outgoing = Aliases(self.terms.topic_alias_maximum)
        limited = self.outgoing is not None or self.terms.maximum_packet_size < UNLIMITED
        self.checks_each = limited or self.services.settings.acl_subscribe == "deliver"
        if self.connection.settings.publish_client_id:
            self.name_in_publishes()
        if bridge:
            self.bridge = True
            self.mark()

    def begin_regular(self, record: SessionRecord) -> None:
        """Take the record that claims a session which ends with its connection."""
        settings = self.connection.settings
        self.record, self.durable, self.durable_side = record, False, None
        self.regular_side = TransientSender(
            min(settings.max_inflight, self.terms.receive_maximum),  # [MQTT-3.3.4-9] [MQTT-4.9.0-1] (5.0)
            settings.max_queued,
            self.write_buffer.write,
            settings.max_outbound_bytes,
            self.version,
            self.write_buffer.round.holding,
        )

    def begin_durable(self, record: SessionRecord, former: int, *, continued: bool) -> None:
        """Take the record that claims a durable session."""
        self.record, self.durable, self.regular_side = record, True, None
        self.durable_side = side = DurableDelivery(self, former)
        if continued:
            side.adapt_consumers()
        else:
            side.begin()

    def __str__(self) -> str:
        """Return the client's name for logs."""
        name = self.client_id or self.asked
        return f"client {shorten(name)!r}" if name else "a client without an id"

    def log_fields(self) -> dict[str, Any]:
        """Return the ids for a log record about the client."""
        return {
            "gateway": self.services.identity.id,
            "client": self.client_id or self.asked,
            "connection": self.connection.number,
        }

    def packets(self, packets: list[Packet]) -> None:
        """Handle the packets of one read, in order."""
        if self.state is not State.LIVE or self._order is not None or self.sent_disconnect:
            self._before(packets)
            return
        path = self.path
        table = path.table
        carries = self.connection.settings.carried_messages
        for at, packet in enumerate(packets):
            if isinstance(packet, PublishRun):
                publish_run(self, packet)
            elif isinstance(packet, AckRun):
                self.acknowledged(packet.kind, packet.ids, False)
            elif isinstance(packet, Publish):
                if packet.qos == 2 and self.reuses(packet):
                    self.wait(packets[at:])
                    break
                if self.version == 5:
                    if not (carries and publish_carried(self, packet)):
                        publish5(self, packet)
                    continue
                route = table.routes.get(packet.key)
                if route is None or route.version != table.version:
                    route = route_for(self, packet.key)
                publish(self, route, packet.payload, packet.qos, packet.retain, packet.packet_id)
            else:
                self.handle(packet)
                if self.ended:
                    break
                if self.waits:
                    self.wait(packets[at + 1 :])
                    break
        if path.blocked:
            path.hold(self.connection)
        if self.write_buffer.held > UNREAD_MOST:
            self._hold_unread()
        path.leave()

    def _before(self, packets: list[Packet]) -> None:
        """Handle CONNECT, and queue packets that have to wait for it or for a packet before them.

        [MQTT-3.1.4-5] (3.1.1), [MQTT-3.1.4-6] (5.0), [MQTT-3.2.0-1] (3.1.1, 5.0).
        """
        if self.state is State.NEW:
            connect, *packets = packets
            assert isinstance(connect, Connect)  # the decoder lets nothing else come first
            self.state, self.asked = State.OPENING, connect.client_id
            self.connection.hold(Hold.HANDSHAKE)
            self.version, self.terms = max(connect.protocol_level, 4), terms(connect)
            self.authentication = begin(self, connect)
            self.do(handle_connect(self, connect))
        if self.authentication is not None and self.state is State.OPENING:
            self.authentication.early(packets)
        elif not self.ended and packets:
            self.wait(packets)
            if self.write_buffer.held > UNREAD_MOST:
                self._hold_unread()
            self.path.leave()

    def _hold_unread(self) -> None:
        """Read nothing from a client that does not read; it is alive while it takes bytes, which is checked often."""
        self.connection.hold(Hold.OUTBOUND)
        self.services.registry.checks.put(self, 0.0)

    def opened(self) -> None:
        """Handle the packets that came behind CONNECT, then read on: the session is open."""
        if self.state is State.ENDED:
            return
        self.state = State.LIVE
        self.proceed()
        self.connection.release(Hold.HANDSHAKE)

    def handle(self, packet: Packet) -> None:
        """Handle a packet other than PUBLISH."""
        match packet:
            case PingReq():
                self.write_buffer.write(PINGRESP)  # [MQTT-3.12.4-1] (3.1.1, 5.0)
            case Subscribe():
                self.request(partial(subscribe, self, packet, begin_subscribing(self, packet)))
            case Unsubscribe():
                self.request(partial(unsubscribe, self, packet))
            case Disconnect():
                handle_disconnect(self, packet)
            case Ack():
                self.acknowledged(packet.kind, [packet.packet_id], packet.reason >= 0x80)
            case AckRun():
                self.acknowledged(packet.kind, packet.ids, False)
            case Auth() if self.authentication is not None:
                self.authentication.received(packet)
            case _:
                raise ProtocolError(f"unexpected {type(packet).__name__}")  # [MQTT-4.12.0-7] (5.0)

    def acknowledged(self, kind: int, ids: list[int], failed: bool) -> None:
        """Handle PUBACK, PUBREC, PUBREL or PUBCOMP; ``kind`` is the packet type."""
        if kind == PUBREL:
            for identifier in ids:
                self.inbound.pubrel(self, identifier)
        elif self.regular_side is not None:
            self.regular_side.acknowledged(kind, ids, failed)
        elif self.durable_side is not None:
            self.durable_side.machine.acknowledged(kind, ids, failed)
        if self.shares and kind != PUBREL:
            acknowledged(self)

    def refused(self, error: ApiError) -> None:
        """End the connection without an acknowledgement: JetStream refuses a message [MQTT-4.8.0-2]."""
        text = "%s: a message was not stored: %s"
        log_failure(log, logging.WARNING, "store", text, self, error, extra=once(str(error)))
        self.end_connection(QuotaExceeded(str(error)))

    def refuse_filters(self, limits: Mapping[str, int], why: str = "") -> None:
        """Count filters of a SUBSCRIBE packet that limits refuse, by limit; only the first refusal is a warning."""
        for limit, count in limits.items():
            self.services.counters.refuse_filters(limit, count)
        level, self.warned = logging.DEBUG if self.warned else logging.WARNING, True
        what = ", ".join(f"{limit} {count}" for limit, count in limits.items())
        text = "%s: %d filters are refused by limits (%s)%s; more of this connection are counted only"
        extra = once(f"filters of {self.hash}")  # also for a client that reconnects again and again
        log_failure(log, level, "filters", text, self, sum(limits.values()), what, why, extra=extra)

    def refuse_surplus(self, filters: set[str]) -> set[str]:
        """Count and return filters of a SUBSCRIBE packet for which the gateway has no room."""
        if filters:
            self.refuse_filters({"max_subscriptions_per_gateway": len(filters)})
        return filters

    def send_or_queue(self, message: Message, qos: int, late: Late | None = None) -> None:
        """Send or queue a QoS 1 or 2 message of a regular session; ``late`` encodes its packet when it is sent."""
        side = self.regular_side
        if side is None:
            return
        try:
            if message.expiry >= 0 or late is not None:  # encoded when it is sent: it may wait in the queue
                late = late or encode_for_subscriber(self, message, qos, qos)
                side.publish(qos, b"", b"", late, size=message.size)
            elif self.version == 5:
                side.publish(qos, message.head5(qos), message.tail5())
            else:
                side.publish(qos, message.head(qos), message.payload)
        except QuotaExceeded as error:
            self.end_connection(error)

    def guard(self, choice: Choice, message: Message, known: bytes = b"") -> None:
        """Deliver a message after the checks for No Local, stream delivery and gates."""
        if choice.own is not choice and message.sender == self.client_id:
            if choice.own is None:
                return
            choice = choice.own
        if self.durable and choice.qos and message.qos:
            return  # a reader brings it from the stream
        gate = self.gates.get(choice.found) if self.gates else None
        if gate is None:
            self.deliver(choice, message)
        elif self._withheld(choice, message):
            return
        elif not gate.keep_back(choice, message, known):
            self.end_connection(QuotaExceeded("too many messages while retained messages are being sent"))

    def deliver(self, choice: Choice, message: Message) -> None:
        """Send a message that core NATS or local dispatch has brought."""
        if self._withheld(choice, message):
            return
        aged = message.retain and message.expiry >= 0
        plain = not (self.checks_each or choice.ids or aged or (choice.kept and message.kept))
        qos = min(choice.qos, message.qos)
        if qos and self.durable:
            return
        self.services.counters.send(qos, len(message.payload))
        if qos:
            self.send_or_queue(message, qos, None if plain else self._encoded(choice, message, qos))
            return
        if plain:
            data = message.zero5() if self.version == 5 else message.zero()
        else:
            data = self._encoded(choice, message, 0)(0)
        if data and self.write_buffer.clogged:
            self.write_buffer.offer(data, 1)
        elif data:
            self.write_buffer.write(data)

    def _withheld(self, choice: Choice, message: Message) -> bool:
        """Whether the rules withhold a message; presence is counted only where each message is checked."""
        if self.checks_each and self.withheld(message.key, choice.qos, message.identity):
            return True
        return of_presence(message.key) and not hears_presence(self, choice.found.text, message.key, choice.qos)

    def _encoded(self, choice: Choice, message: Message, qos: int) -> Callable[[int], bytes]:
        return encode_for_subscriber(self, message, qos, choice.qos, choice.ids, kept=choice.kept)

    @property
    def unanswered(self) -> bool:
        """True while the CONNECT waits and the session is not claimed yet."""
        return self.state is State.OPENING and not self.epoch

    @property
    def unanswered_since(self) -> float:
        """Loop time in seconds since which NATS has answered neither CONNECT nor, during a wait, others before it."""
        since = self.waiting_since or self.connection.opened
        idle = self._jobs is not None and self._jobs.idle
        return max(since, self.delivery.claimed) if idle else since

    # -- the order of packets -------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """True when no further packets are handled: the connection has ended, or DISCONNECT has come."""
        return self.state is State.ENDED or self.sent_disconnect

    @property
    def inbound(self) -> Inbound:
        """QoS 2 publishes of the client; made with the first one, since most clients have none."""
        if self.qos2 is None:
            self.qos2 = Inbound()
        return self.qos2

    def wait(self, packets: list[Packet]) -> None:
        """Queue packets until the packets before them have taken effect; handle at once those that need not wait."""
        self.order.add([one for one in packets if not self._passes(one)])
        for packet in packets:
            if self._passes(packet):
                self.handle(packet)

    def _passes(self, packet: Packet) -> bool:
        """Whether a packet is handled before the waiting packets."""
        if self.state is State.RESUMING:
            return isinstance(packet, PingReq)
        return self.state is State.LIVE and passes(packet)

    def resuming(self) -> None:
        """Read from the client after CONNACK, while its session is resumed: PINGREQ is answered, other packets wait."""
        if self.state is not State.OPENING:
            return
        self.state = State.RESUMING
        for packet in self._order.pings() if self._order is not None else ():
            self.handle(packet)
        self.connection.release(Hold.HANDSHAKE)

    def reuses(self, packet: Publish) -> bool:
        """Whether a PUBLISH at QoS 2 has to wait for the PUBCOMP of the one before it [MQTT-4.3.3-12] (5.0)."""
        if self.qos2 is None or not self.qos2.machine.releasing(packet.packet_id):
            return False
        self.order.reuse(packet.packet_id)
        return True

    def holds_up(self, packet: Packet) -> bool:
        """Whether a packet has to wait, with all packets behind it, or is not handled any more."""
        return self.ended or self.waits or (isinstance(packet, Publish) and packet.qos == 2 and self.reuses(packet))

    def request(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Queue the job of a SUBSCRIBE or UNSUBSCRIBE; packets behind it wait until :meth:`in_force`."""
        self.order.request()
        self.do(self.obey(work))

    async def obey(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the job of the oldest SUBSCRIBE or UNSUBSCRIBE."""
        if self._order is not None:
            self._order.obey()
        try:
            await work()
        finally:
            self.in_force()

    def in_force(self) -> None:
        """Let the packets behind the running request go on: it has taken effect at this gateway."""
        if self._order is not None:
            self._order.took_effect()
            self.proceed()

    def proceed(self) -> None:
        """Handle the waiting packets, unless a packet before them has not taken effect yet."""
        order = self._order
        if order is None or order.requested or self.state is not State.LIVE:
            return
        if order.identifier and self.inbound.machine.releasing(order.identifier):
            return
        self._order = None
        packets = order.take_packets()
        if packets or order.error is not None or order.gone:
            self.connection.handle_again(packets, order.way, order.error)
        if not self.unserved:
            self.account.claims.served(self.hash)

    def outlasts(self, way: Handler | None) -> bool:
        """Whether packets before the end of the connection are still to be handled; the end then waits for them."""
        if self.taken or not self.services.nats.online.is_set() or self.gone:
            return False
        if self.state is State.OPENING and self.authentication is not None:
            return False
        # No packet waits; a running job goes on without the connection.
        if (self._order is None or self._order.empty) and not (self.sent_disconnect and self.busy):
            return False
        self.order.leave(way or self.connection.inner(self))
        self.fall_silent()
        return True

    # -- the end --------------------------------------------------------------------------------

    def broken(self, error: MqttError) -> None:
        """End the connection: the client violated the protocol [MQTT-4.8.0-1] (3.1.1), [MQTT-4.13.1-1] (5.0)."""
        behind = self._order is not None or self.state in (State.OPENING, State.RESUMING)
        if behind and self.alive:
            if self.authentication is None or self.state is not State.OPENING:
                self.order.fail(error)  # the packets before the violation are handled first
            else:
                refuse(self, error)
                self.lost()
            return
        if self.state is State.NEW:
            self.services.counters.refuse(error.reason.name.lower())
            self.write_buffer.write(refusal(self.connection.decoder.version, error))
        self.end_connection(error)

    def end_connection(self, error: MqttError) -> None:
        """Close the connection because of an error; a will is published."""
        if self.state is State.ENDED:
            return
        kind = error.reason.name.lower()
        if self.greeted:  # the end of an accepted connection has a record of its own: `disconnected`
            FAILURES[kind] += 1
            if isinstance(error, PacketTooLarge):
                self._tell_of_limits(error)
        else:
            level = logging.DEBUG if self.state is State.NEW else logging.INFO
            log_failure(log, level, kind, "%s from %s is refused: %s", self, self.connection.peer, error)
        self.why = error
        self.say_goodbye(error)
        self.close()

    def _tell_of_limits(self, error: PacketTooLarge) -> None:
        """Log which settings refuse a packet: a 3.1.1 client learns nothing, and sends it at each connection."""
        log.warning(
            "%s is disconnected: %s. Limits in bytes: max_packet_size %d of the gateway, max_payload %d of nats-server",
            self,
            error,
            self.connection.settings.max_packet_size,
            self.path.store.max_payload,
            extra=once(f"too large {self.client_id}"),
        )

    def say_goodbye(self, error: MqttError) -> None:
        """Send a 5.0 client DISCONNECT with the reason [MQTT-3.14.0-1] [MQTT-3.14.4-1] [MQTT-3.14.4-2] (5.0)."""
        if self.version == 5 and self.greeted and not self.sent_disconnect and self.state is not State.ENDED:
            self.write_buffer.write(goodbye(error, self.terms))

    def close(self) -> None:
        """Close the connection; the session is left in :meth:`lost`."""
        self.connection.close()
        self.fall_silent()
        gone, self._order = self.gone, None
        if gone:
            self.lost()

    def taken_over(self) -> None:
        """End at once and change nothing that is stored: another connection has claimed the session."""
        self.taken = True
        if self._jobs is not None:
            self._jobs.stop()
        if self.durable_side is not None:
            self.durable_side.detach()
        self.say_goodbye(MqttError("another connection has claimed the session", ReasonCode.SESSION_TAKEN_OVER))
        self.connection.close()
        self.lost()

    def lost(self, way: Handler | None = None) -> None:
        """End the client; its socket is closed or about to be. May be called again; ``way`` gets waiting packets.

        A running job goes on, unless it waits for NATS or the session has moved: the session is left as the job
        records it.
        """
        if self.state is State.ENDED or self.outlasts(way):
            return
        self.state = State.ENDED
        if self.authentication is not None:
            self.authentication.lost()
        if self.expires is not None:
            self.expires.cancel()
        publish_or_delay_will(self.account.wills, self)
        if self._jobs is None:
            self.leave()
            return
        self.fall_silent()
        self._jobs.stop_idle()

    def fall_silent(self) -> None:
        """Stop the deliveries of the session: no message reaches the client any more."""
        fall_silent(self)

    def leave(self) -> None:
        """Forget the client's state in this gateway and leave its session; the last step."""
        leave(self)
