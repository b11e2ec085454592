# SPDX-License-Identifier: Apache-2.0
"""Message hooks: the handlers between a connection and its client while hooks for messages are registered.

Without such hooks a connection hands its packets to the client itself, and the client's bytes go to the socket as they
are. With the first hook a :class:`MessageHooks` is the connection's handler, and :class:`DeliveryHooks`
is in place of the socket's ``write``. With the last hook both are removed, while clients stay connected.

`MessageHooks` handles one packet after the other. While an async hook handles a packet, the packets behind it wait, and
nothing more is read from this client; so all packets of the client stay in their order.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from mqtt_nats.backbone.pending_stores import CountedStore, TooLarge
from mqtt_nats.base.errors import ends_task
from mqtt_nats.client.authorization import look_again
from mqtt_nats.client.client import Client
from mqtt_nats.codec import (
    Ack,
    AckRun,
    MqttError,
    NotAuthorized,
    Packet,
    PacketTooLarge,
    Properties,
    Publish,
    PublishRun,
    ReasonCode,
    Subscribe,
    Unsubscribe,
    validate_topic_name,
)
from mqtt_nats.codec.wire import PUBACK, PUBCOMP, PUBREC
from mqtt_nats.hooks.chain import DecisionChain, HookFailed, Point
from mqtt_nats.hooks.events import Acked, ClientView, Drop, Published, Publishing
from mqtt_nats.hooks.points import CLIENT_AUTHORIZE, MESSAGE_ACKED, MESSAGE_DROPPED, MESSAGE_PUBLISH
from mqtt_nats.ingress.interceptors import Taken, Taker
from mqtt_nats.ingress.publish import (
    ANSWERED,
    Acknowledgement,
    bound,
    count,
    is_answer,
    publish,
    refuse_publish,
    route_for,
)
from mqtt_nats.ingress.publish_properties import described, extras, unalias
from mqtt_nats.ingress.retained.store import may_retain
from mqtt_nats.ingress.server_publish import LoggedStore, check_size, inject
from mqtt_nats.messages.delivery_hooks import DeliveryHooks, lost, set_delivery_hooks
from mqtt_nats.sessions.session import State
from mqtt_nats.transport.connection import Handler, Hold
from mqtt_nats.transport.packet_order import passes
from mqtt_nats.transport.rate_limited import Counting

if TYPE_CHECKING:
    from mqtt_nats.client.account import Account
    from mqtt_nats.messages.message import Stored

log = logging.getLogger("mqtt_nats.broker")

Chain = DecisionChain[Publishing, "Published | Drop"]


class HookError(MqttError):
    """A hook that decides about a message has failed."""

    reason = ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR


def changed(account: Account, point: Point) -> None:
    """Adapt the connections after a hook was added to a point or removed from it."""
    if point is CLIENT_AUTHORIZE:
        look_again(account)
    else:
        arrange(account)


def arrange(account: Account) -> None:
    """Insert or remove the handlers for hooks of all connections, as the present hooks require."""
    account.services.path.round.call_on_lost(lost if account.services.hooks.noticing(MESSAGE_DROPPED) else None)
    for client in account.registry.connections:
        fit(client)


def entered(client: Client) -> Handler:
    """Return the packet handler of a new connection: the client, or its `MessageHooks`."""
    if client.services.hooks.in_use:
        _set_delivery_hooks(client)
    return MessageHooks(client) if _has_hooks(client.account) else client


def _has_hooks(account: Account) -> bool:
    hooks, takers = account.services.hooks, account.ingress.takers
    return bool(takers) or (hooks.in_use and bool(hooks.deciding(MESSAGE_PUBLISH) or hooks.noticing(MESSAGE_ACKED)))


def fit(client: Client) -> None:
    """Insert or remove the handlers for hooks of one connection, as the present hooks require."""
    connection = client.connection
    place = connection.handler if isinstance(connection.handler, Counting) else connection
    handler = place.handler
    wanted = _has_hooks(client.account)
    if wanted and handler is client:
        place.hand_to(MessageHooks(client))
    elif not wanted and isinstance(handler, MessageHooks) and handler.idle:
        place.hand_to(client)
    _set_delivery_hooks(client)


def _set_delivery_hooks(client: Client) -> None:
    set_delivery_hooks(client, client.services.hooks, partial(message_id, client))


def message_id(client: Client, identifier: int) -> str:
    """Return the id of the message in flight with a packet identifier; empty where it does not come from a stream."""
    delivery = client.durable_side.machine.inflight.get(identifier) if client.durable_side is not None else None
    if delivery is None:
        return ""
    found: Stored | None = delivery.body or client.path.recent.messages.get(delivery.sequence)
    return found.identity if found is not None else ""


# -- from clients -------------------------------------------------------------------------------------


class MessageHooks:
    """Packet handler of a connection that asks the hooks before the client handles a packet."""

    __slots__ = ("_error", "_event", "_gone", "_waiting", "client")

    def __init__(self, client: Client) -> None:
        self.client = client
        self._event = Publishing(ClientView(client))
        self._waiting: deque[Packet] | None = None
        """Packets behind the packet that an async hook handles; None = no async hook is running."""
        self._error: MqttError | None = None
        self._gone = False

    @property
    def idle(self) -> bool:
        """True when no packet waits for a hook."""
        return self._waiting is None

    def packets(self, packets: list[Packet]) -> None:
        """Handle the packets of one read, in order."""
        if self._waiting is not None:
            self._waiting.extend(packets)
        elif self.client.state is not State.LIVE or self.client.waits:
            for packet in filter(passes, packets if self.client.state is State.LIVE else ()):
                self._acknowledged(packet)
            self.client.packets(packets)
        else:
            self._go(deque(packets))

    def broken(self, error: MqttError) -> None:
        """Report a protocol violation to the client after the packets before the violation are handled."""
        if self._waiting is not None:
            self._error = error
        else:
            self.client.broken(error)

    def lost(self) -> None:
        """Report the closed socket to the client after the packets before the end are handled."""
        if self._waiting is not None and self.client.alive:
            self._gone = True
        else:
            self.client.lost()

    def _go(self, packets: deque[Packet]) -> None:
        client = self.client
        chain = client.services.hooks.deciding(MESSAGE_PUBLISH)
        ready: list[Packet] = []
        while packets and not self._held_up(packets, ready):
            packet = packets.popleft()
            if isinstance(packet, PublishRun):
                if chain is not None or _is_taken(client, packet.key):
                    singles = [Publish(0, False, False, packet.key, 0, one) for one in packet.payloads()]
                    packets.extendleft(reversed(singles))
                    continue
            elif isinstance(packet, Publish):
                if chain is not None and chain.waits:
                    packets.appendleft(packet)
                    self._wait(packets)
                    break
                key, before = self._before(packet)
                if before is not None:
                    self._pass(packet, key, before, self._decided(chain, before), ready)
                    continue
            else:
                self._acknowledged(packet)
            ready.append(packet)
        try:
            if ready:
                client.packets(ready)
        except MqttError:
            if self._waiting is not None:  # packets after the violation are not handled
                self._waiting.clear()
            raise

    def _held_up(self, packets: deque[Packet], ready: list[Packet]) -> bool:
        """Whether the next packets wait until the ``ready`` packets have taken effect: no hook sees them yet."""
        client = self.client
        if ready and (isinstance(ready[-1], Subscribe | Unsubscribe) or getattr(packets[0], "qos", 0) == 2):
            client.packets(ready)
            ready.clear()
        if not client.holds_up(packets[0]):
            return False
        rest = list(packets)
        packets.clear()
        if not client.ended:
            self._waiting = None
            self.packets(rest)
        return True

    def _wait(self, packets: deque[Packet]) -> None:
        client = self.client
        self._waiting = packets
        client.connection.hold(Hold.HOOKS)
        client.services.tasks.spawn(self._serve(packets), f"hooks for {client.client_id}")

    async def _serve(self, waiting: deque[Packet]) -> None:
        """Handle the waiting packets one after the other, and packets that come meanwhile."""
        client = self.client
        try:
            while waiting and not client.ended and not self._held_up(waiting, []):
                await self._one(waiting.popleft())
        except MqttError as error:
            client.broken(error)
        except (Exception, asyncio.CancelledError) as error:
            if ends_task(error):
                raise
            log.exception("a client's packet could not be handled")
            client.broken(MqttError("internal error", ReasonCode.UNSPECIFIED_ERROR))
        finally:
            self._waiting = None
            client.connection.release(Hold.HOOKS)
            if self._error is not None:
                client.broken(self._error)
            if self._gone:
                client.lost(self)
            else:
                fit(client)

    async def _one(self, packet: Packet) -> None:
        client = self.client
        if isinstance(packet, PublishRun):
            singles = [Publish(0, False, False, packet.key, 0, one) for one in packet.payloads()]
        elif isinstance(packet, Publish):
            singles = [packet]
        else:
            self._acknowledged(packet)
            client.packets([packet])
            return
        for single in singles:
            key, before = self._before(single)
            ready: list[Packet] = []
            if before is None:
                ready.append(single)
            else:
                chain = client.services.hooks.deciding(MESSAGE_PUBLISH)
                after: Published | Drop | None = before
                if chain is not None:
                    try:
                        after = await chain.decide_later(self._event, before)
                    except HookFailed:
                        after = None
                if client.ended:
                    return
                self._pass(single, key, before, after, ready)
            client.packets(ready)

    def _before(self, packet: Publish) -> tuple[bytes, Published | None]:
        """Return the topic as it stands in a PUBLISH, and the message for the hooks; None: hooks do not see the packet.

        Hooks do not see a repeated QoS 2 publish, about which they have decided, nor an invalid one: `Client` answers.
        """
        client = self.client
        key = packet.key
        properties = packet.properties
        try:
            if properties is not None and "topic_alias" in properties:
                key = unalias(client, key, properties["topic_alias"])
            if packet.qos == 2 and packet.packet_id in client.inbound.machine.states:
                return key, None
            topic = validate_topic_name(key, client.services.settings.max_topic_levels)
        except MqttError:
            return key, None
        shown: Properties = {}
        if properties:
            shown = properties.copy()
            shown.pop("topic_alias", None)
        identity = client.path.ids.next().decode() if packet.qos else ""
        return key, Published(topic, packet.payload, packet.qos, packet.retain, shown, identity, packet.packet_id)

    def _decided(self, chain: Chain | None, before: Published) -> Published | Drop | None:
        """Return the decision of the hooks about a message; None: a hook has failed."""
        if chain is None:
            return before
        try:
            return chain.decide(self._event, before)
        except HookFailed:
            return None

    def _pass(
        self, packet: Publish, key: bytes, before: Published, after: Published | Drop | None, ready: list[Packet]
    ) -> None:
        """Apply the decision of the hooks: append the packet to ``ready``, or publish, drop or refuse it here.

        Raises:
            MqttError: the connection has to end.
        """
        if not before.message_id:
            self._go_on(packet, key, before, after, ready)
            return
        client = self.client
        if ready:  # the message id given below is for this packet only
            client.packets(ready)
            ready.clear()
            if client.ended:
                return
        client.path.ids.give(before.message_id.encode())
        try:
            self._go_on(packet, key, before, after, ready)
            if ready:
                client.packets(ready)
                ready.clear()
        finally:
            client.path.ids.give(b"")

    def _go_on(
        self, packet: Publish, key: bytes, before: Published, after: Published | Drop | None, ready: list[Packet]
    ) -> None:
        client = self.client
        taker = client.ingress.takers.of(after.topic) if isinstance(after, Published) else None
        if after is before and taker is None:
            ready.append(packet)
            return
        plain = client.version == 5 or not (isinstance(after, Published) and after.properties)
        if isinstance(after, Published) and taker is None and after.qos == packet.qos and plain:
            topic = key if after.topic == before.topic else _key(after.topic)
            properties = after.properties or None
            ready.append(
                Publish(packet.qos, after.retain, packet.dup, topic, packet.packet_id, after.payload, properties)
            )
            return
        if ready:  # the packets before this one take effect first
            client.packets(ready)
            ready.clear()
            if client.ended:
                return
        try:
            if client.version == 5 and packet.qos and not isinstance(after, Drop | None):
                count(client, packet)
            if isinstance(after, Published):
                self._publish(packet, after, taker)
            elif after is None:
                raise HookError("a hook has failed")
            else:
                self._drop(packet, key, after, identity=before.message_id)
        except TooLarge as error:
            raise PacketTooLarge(str(error)) from None
        except MqttError as error:
            if isinstance(error, HookError) and not packet.qos:
                client.drop(before.topic, 0, "hook")
            elif client.version == 5 and packet.qos and error.reason in ANSWERED:
                self._uncounted(packet, error)
            else:
                raise
        bound(client)

    def _uncounted(self, packet: Publish, error: MqttError) -> None:
        """Refuse a publish; where a hook has failed, count the publish first, since its acknowledgement is counted."""
        client = self.client
        if isinstance(error, HookError):
            count(client, packet)
        refuse_publish(client, packet, error)

    def _publish(self, packet: Publish, after: Published, taker: Taker | None) -> None:
        """Publish a message that has another QoS than its packet, 3.1.1 properties from a hook, or a taker."""
        client = self.client
        key = _key(after.topic)
        if taker is None:
            if is_answer(key):
                raise NotAuthorized("an answer to a NATS client cannot be changed")
            route = route_for(client, key)
        else:
            route = client.path.table.route(_key(taker.target(after.topic)))
        guard = client.guarded
        if guard is not None and not guard.may_publish(route.asked, after.qos, after.retain):
            if client.version == 5 and packet.qos:
                raise NotAuthorized("not authorized")
            self._drop(packet, key, Drop(ReasonCode.NOT_AUTHORIZED), counted=True)
            return
        if client.version == 5:
            more = described(client, after.properties, after.payload, after.qos) if after.properties else None
        else:
            more = extras(after.properties)
        retain = after.retain and may_retain(client, len(after.payload), packet.qos)
        check_size(client.path, route, after.payload, client.sender_header, more)
        if taker is None and after.qos == packet.qos:
            publish(client, route, after.payload, after.qos, retain, packet.packet_id, more)
            return
        if packet.qos == 2 and after.qos == 2:
            client.inbound.publish(client, route_for(client, key), packet.packet_id, after.payload, retain, more)
            return
        client.services.counters.receive(packet.qos, len(packet.payload))
        operation = self._operation(packet, key, after.topic)
        if taker is None:
            inject(client.ingress, route, after.payload, after.qos, retain, client.sender_header, more, b"", operation)
        else:
            identity = client.path.ids.next()
            taker.take(
                Taken(after.topic, route, after.payload, after.qos, retain, client.sender_header, more, identity),
                operation,
            )
        if not operation.remaining and packet.qos:
            operation.expect()
            operation.stored(b"")

    def _operation(self, packet: Publish, key: bytes, topic: str) -> CountedStore:
        """Return the operation that ends when all stores of a message are done: a PUBACK, a PUBREC, or none."""
        client = self.client
        if not packet.qos:
            return LoggedStore(topic)
        receipt = Acknowledgement(client, PUBACK, packet.packet_id, 0) if packet.qos == 1 else self._passed(packet, key)
        client.receipts.append(receipt)
        return receipt

    def _passed(self, packet: Publish, key: bytes) -> Acknowledgement:
        """Return the PUBREC of a QoS 2 publish that is not held: its PUBREL only frees the packet identifier."""
        receipt = self.client.inbound.pass_on(self.client, packet.packet_id, key)
        assert receipt is not None  # a repetition is not looked at again
        return receipt

    def _drop(self, packet: Publish, key: bytes, drop: Drop, counted: bool = False, identity: str = "") -> None:
        """Drop a message and answer its publisher [MQTT-3.3.5-2] (3.1.1)."""
        client = self.client
        if not counted:
            client.drop(key[2:].decode(), packet.qos, "hook", identity)
        if not packet.qos:
            return
        if client.version == 5 and not counted:
            count(client, packet)
        if client.version == 5 and drop.reason >= ReasonCode.UNSPECIFIED_ERROR:
            refuse_publish(client, packet, MqttError(drop.text, drop.reason))
            return
        receipt = self._operation(packet, key, "")
        receipt.expect()
        receipt.stored(b"")

    # -- acknowledgements -----------------------------------------------------------------------

    def _acknowledged(self, packet: Packet) -> None:
        """Report to the hooks that the client has acknowledged messages."""
        if isinstance(packet, AckRun):
            kind, ids, failed = packet.kind, packet.ids, False
        elif isinstance(packet, Ack):
            kind, ids, failed = packet.kind, [packet.packet_id], packet.reason >= ReasonCode.UNSPECIFIED_ERROR
        else:
            return
        chain = self.client.services.hooks.noticing(MESSAGE_ACKED)
        if chain is None or not (kind in (PUBACK, PUBCOMP) or (kind == PUBREC and failed)):
            return
        send = self.client.write_buffer.send
        for identifier in ids:
            message = send.sent.pop(identifier, None) if isinstance(send, DeliveryHooks) else None
            chain.emit(Acked(self._event.client, identifier, failed, message))


def _key(topic: str) -> bytes:
    """Return a topic as it stands in a PUBLISH packet.

    Raises:
        NotAuthorized: the topic has more bytes than a topic can have; only a hook can make such a topic.
    """
    encoded = topic.encode()
    if len(encoded) > 65535:
        raise NotAuthorized("a hook has made a topic that is too long")
    return len(encoded).to_bytes(2) + encoded


def _is_taken(client: Client, key: bytes) -> bool:
    takers = client.ingress.takers
    return bool(takers) and takers.of(key[2:].decode(errors="replace")) is not None
