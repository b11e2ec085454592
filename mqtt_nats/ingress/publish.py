# SPDX-License-Identifier: Apache-2.0
"""PUBLISH from a client: its acknowledgement, its copies in NATS and the stream, and local delivery.

Each connection has one first-in-first-out queue of :class:`Acknowledgement`; an acknowledgement that is due early
waits for the acknowledgements before it [MQTT-4.6.0-2].
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import CountedStore, TooLarge
from mqtt_nats.base.logs import log_failure, once
from mqtt_nats.codec import (
    Ack,
    MqttError,
    PacketTooLarge,
    Publish,
    PublishRun,
    QuotaExceeded,
    ReasonCode,
    ReceiveMaximumExceeded,
    ack_bytes,
    encode,
)
from mqtt_nats.codec.wire import PUBACK, PUBCOMP, PUBREC
from mqtt_nats.ingress.publish_properties import described, unalias
from mqtt_nats.ingress.retained.ops import RetainedOp
from mqtt_nats.ingress.retained.store import may_retain, store_retained, tombstone_subject
from mqtt_nats.messages.message import Message, Rich
from mqtt_nats.sessions.session import Session
from mqtt_nats.transport.connection import Connection, Hold
from mqtt_streams.subjects import REPLY_LEVEL

if TYPE_CHECKING:
    from mqtt_nats.ingress.interceptors import Takers
    from mqtt_nats.ingress.publish_properties import Extras
    from mqtt_nats.ingress.qos2 import Inbound
    from mqtt_nats.ingress.request_reply import Replying
    from mqtt_nats.ingress.retained.store import RetainedStores
    from mqtt_nats.observability.sys_topics import System
    from mqtt_nats.pubsub.routing_table import Route
    from mqtt_nats.sessions.guard import Guard
    from mqtt_nats.sessions.services import Registry, Services
    from mqtt_streams.api import ApiError

log = logging.getLogger("mqtt_nats.broker")

HEADERS: Final = 256
"""Upper bound, in bytes, of all headers of a message except its subject, the publisher's client id and properties."""

HEADER_BYTES_MAX: Final = 65_535
"""Largest size, in bytes, of all headers of a message that JetStream stores."""

ANSWERED: Final = frozenset(
    (
        ReasonCode.UNSPECIFIED_ERROR,
        ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,
        ReasonCode.NOT_AUTHORIZED,
        ReasonCode.TOPIC_NAME_INVALID,
        ReasonCode.QUOTA_EXCEEDED,
        ReasonCode.PAYLOAD_FORMAT_INVALID,
    )
)
"""Reason codes of PUBACK or PUBREC that refuse a single publish; every other error ends the connection."""

RETAIN_LINE: Final = b"Nmqtt-Retain:1\r\n"

STATES: Final = b"$SYS/broker/connection/"
"""Beginning of the topics on which bridges of mosquitto publish the state of their connection."""

ANSWERS: Final = f"{REPLY_LEVEL}/".encode()
"""Beginning of the topics on which MQTT clients answer NATS clients."""

RECEIPTS_MAX: Final = 1024
"""Publishes of a client that wait for JetStream; beyond this nothing is read from the client."""
RECEIPTS_LOW: Final = 512


class Acknowledgement(CountedStore):
    """A PUBACK, PUBREC or PUBCOMP to come, due when ``left`` stores are acknowledged."""

    __slots__ = ("client", "id", "kind", "reason", "text")

    def __init__(self, client: Publisher, kind: int, identifier: int, left: int, reason: int = 0) -> None:
        self.remaining = left  # without the base class: a call less for each message
        self.client = client
        self.kind = kind
        self.id = identifier
        self.reason = reason
        self.text = ""

    def refuse(self, reason: int, text: str) -> None:
        """Make the acknowledgement due with a reason code; stores are not waited for any more (5.0)."""
        self.remaining = 0
        self.reason = reason
        self.text = text

    def stored(self, ack: bytes) -> None:
        """Count a finished store; after the last one the acknowledgement is due."""
        if self.reason:
            return
        self.remaining -= 1
        if not self.remaining:
            receipts = self.client.receipts
            if receipts and receipts[0] is self:
                self.client.settle()

    def explains(self) -> bool:
        """Whether the acknowledgement can have a reason code (5.0)."""
        return self.client.version == 5

    def waits(self) -> bool:
        """Return whether the client cannot be told that there is no room (3.1.1)."""
        return not self.explains()

    def publisher(self) -> Publisher:
        """Return the client, whose messages on a topic keep their order [MQTT-4.6.0-5] (3.1.1)."""
        return self.client

    def failed(self, error: ApiError) -> None:
        """Report JetStream's refusal to the client: by a reason code, or by the end of the connection."""
        client = self.client
        if client.version != 5 or self.kind == PUBCOMP:
            client.refused(error)
        elif not self.reason:
            text = "%s: a message was not stored: %s"
            log_failure(log, logging.WARNING, "store", text, client, error, extra=once(str(error)))
            self.refuse(ReasonCode.QUOTA_EXCEEDED, str(error))
            if client.receipts and client.receipts[0] is self:
                client.settle()

    def packet(self) -> bytes:
        """Return the packet, without user properties [MQTT-3.4.2-3] [MQTT-3.5.2-3] [MQTT-3.7.2-3] (5.0)."""
        if not self.reason:
            return ack_bytes(self.kind, self.id)
        terms = self.client.terms
        if self.text and terms.problem_information:  # [MQTT-3.1.2-29] (5.0)
            data = encode(Ack(self.kind, self.id, self.reason, {"reason_string": self.text[:1000]}), 5)
            if len(data) <= terms.maximum_packet_size:  # [MQTT-3.4.2-2] [MQTT-3.5.2-2] [MQTT-3.7.2-2] (5.0)
                return data
        return encode(Ack(self.kind, self.id, self.reason), 5)


class Ingress:
    """Services of one account for messages that are published, by clients or by the gateway."""

    __slots__ = ("registry", "replying", "retained", "services", "system", "takers")

    def __init__(
        self,
        services: Services,
        registry: Registry[Publisher],
        replying: Replying,
        takers: Takers,
        retained: RetainedStores,
        system: System,
    ) -> None:
        self.services = services
        self.registry = registry
        self.replying = replying
        self.takers = takers
        self.retained = retained
        self.system = system


class Publisher(Session):
    """A session and its publishes that are not acknowledged; abstract: `Client` handles the packets."""

    __slots__ = ("ingress", "qos2", "receipts", "unacknowledged")

    def __init__(self, connection: Connection, ingress: Ingress) -> None:
        super().__init__(connection, ingress.services)
        self.ingress = ingress
        self.qos2: Inbound | None = None
        """QoS 2 publishes of the client; None = there were none, as of most clients."""
        self.receipts: list[Acknowledgement] = []  # a deque takes 700 bytes more in every connection
        self.unacknowledged = 0
        """Number of QoS 1 publishes of a 5.0 client that wait for PUBACK."""

    @property
    @abstractmethod
    def inbound(self) -> Inbound:
        """QoS 2 publishes of the client; made with the first one, since most clients have none."""

    def count_unacknowledged(self) -> None:
        """Count a QoS 1 publish that waits for PUBACK."""
        self.unacknowledged += 1

    def acknowledge(self, receipt: Acknowledgement) -> None:
        """Queue an acknowledgement that is due."""
        self.receipts.append(receipt)
        if self.receipts[0] is receipt:
            self.settle()

    def settle(self) -> None:
        """Send every acknowledgement that is due, in order [MQTT-4.6.0-2] [MQTT-4.6.0-3]."""
        receipts = self.receipts
        data, due = b"", 0
        for receipt in receipts:
            if receipt.remaining:
                break
            due += 1
            data += receipt.packet()
            if receipt.kind == PUBACK:
                self.unacknowledged -= 1
        if due:
            del receipts[:due]
            self.write_buffer.write(data)
        if len(receipts) < RECEIPTS_LOW:
            self.connection.release(Hold.WINDOW)


def route_for(client: Publisher, key: bytes) -> Route:
    """Return the route of a client's publishes on a topic.

    `$SYS/broker/connection/<client id>/state` is for the client of that id: a bridge of mosquitto has its will and a
    retained message there. All other `$SYS` topics belong to the gateways.

    Raises:
        MqttError: the topic is not for this client.
    """
    table = client.path.table
    if key.startswith(STATES, 2) and key[2:] == b"%b%b/state" % (STATES, client.client_id.encode()):
        return table.system_route(key)
    return client.memory.route(table, key)


def publish_run(client: Publisher, run: PublishRun) -> None:
    """Publish a run of QoS 0 messages on one topic.

    Raises:
        MqttError: the topic is not for clients, or NATS would not take the messages.
    """
    path = client.path
    table = path.table
    route = table.routes.get(run.key)
    if route is None or route.version != table.version:
        if client.version == 5 and is_answer(run.key):
            client.ingress.replying.answer_run(client, run)
            return
        route = route_for(client, run.key)
    if run.step - run.head > path.store.max_payload:
        raise PacketTooLarge(f"nats-server takes messages of {path.store.max_payload} bytes")
    if client.guarded is not None and not client.guarded.may_publish(run.key, 0, False):
        return
    if client.marked:
        for payload in run.payloads():
            publish(client, route, payload, 0, False, 0)
    else:
        path.received[0] += run.count
        path.received_bytes[0] += run.count * (run.step - run.head)
        path.fanout.run(route, run, client)


def publish(
    client: Publisher, route: Route, payload: bytes, qos: int, retain: bool, packet_id: int, more: Extras | None = None
) -> None:
    """Publish a message of a client; its QoS decides about the acknowledgement [MQTT-3.3.4-1] (3.1.1, 5.0).

    Raises:
        PacketTooLarge, QuotaExceeded: NATS would not take the message, or not store its headers.
    """
    path = client.path
    if client.guarded is not None and not _permitted(client, client.guarded, route.asked, qos, retain, packet_id):
        return
    size = len(payload)
    if qos != 2:  # a QoS 2 publish may be a repetition: `Inbound.publish` counts it
        path.received[qos] += 1
        path.received_bytes[qos] += size
    retain = retain and may_retain(client, size, qos)
    lines = client.sender_header if more is None else client.sender_header + more.lines
    if qos or retain or more is not None or client.marked:
        size += checked(HEADERS + len(lines) + len(route.hpub) + len(route.stated), qos != 0 or retain)
    if size > path.store.max_payload:
        raise PacketTooLarge(f"nats-server takes messages of {path.store.max_payload} bytes, headers included")
    try:
        if qos == 0:
            identity = path.ids.next() if retain else b""
            if retain:
                lines += _retained(client, route, payload, 0, None, more, identity)
            if retain or more is not None or client.marked:
                bare(client, route, b"NATS/1.0\r\nNmqtt-Pub:0\r\n%b\r\n" % lines, payload, more)
            else:
                path.out.append(b"%b%d\r\n%b\r\n" % (route.pub, len(payload), payload))
            if route.local:
                path.fanout.group(route.local, message(client, route, payload, 0, retain, more), identity)
        elif qos == 1:  # [MQTT-3.3.1-12] [MQTT-4.3.2-2] (3.1.1), [MQTT-4.3.2-4] [MQTT-4.3.2-5] (5.0)
            receipt = Acknowledgement(client, PUBACK, packet_id, 2 if retain else 1)
            client.receipts.append(receipt)
            identity = path.ids.next()
            if retain:
                lines += _retained(client, route, payload, 1, receipt, more, identity)
            first = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:%b\r\n%b" % (identity, lines)
            bare(client, route, b"%b%b\r\n" % (first, route.stated), payload, more)
            last = b"\r\n" if more is None else more.stay + b"\r\n"
            headers = b"%bNats-Msg-Id:%b\r\n%b" % (first, identity, last) if path.with_ids else first + last
            path.store.put(route.msgs, headers, payload, receipt)
            if route.local:
                path.fanout.group(route.local, message(client, route, payload, 1, retain, more), identity)
        else:
            client.inbound.publish(client, route, packet_id, payload, retain, more)
    except TooLarge as error:
        raise PacketTooLarge(str(error)) from None
    bound(client)


def _retained(
    client: Publisher,
    route: Route,
    payload: bytes,
    qos: int,
    receipt: Acknowledgement | None,
    more: Extras | None,
    identity: bytes,
) -> bytes:
    """Store the retained copy of a publish; return the header lines of the other copies that say so, and name it."""
    operation = RetainedOp(client.ingress.retained, receipt, tombstone_subject(route, payload), client)
    known_by = b"Nmqtt-Id:%b\r\n" % identity
    store_retained(client, route, payload, qos, operation, known_by, more)
    return RETAIN_LINE if qos else known_by + RETAIN_LINE


def checked(size: int, stored: bool = True) -> int:
    """Return ``size``, bytes of headers, if JetStream takes it; without limit for a message that is not ``stored``.

    Raises:
        QuotaExceeded: JetStream would not store so many header bytes.
    """
    if stored and size > HEADER_BYTES_MAX:
        raise QuotaExceeded(f"JetStream stores headers of {HEADER_BYTES_MAX} bytes")
    return size


def bound(client: Publisher) -> None:
    """Read nothing from a client that has too many publishes without an acknowledgement."""
    if len(client.receipts) > RECEIPTS_MAX:
        client.connection.hold(Hold.WINDOW)


def _permitted(client: Publisher, guard: Guard, key: bytes, qos: int, retain: bool, packet_id: int) -> bool:
    """Whether a publish is permitted; otherwise it is acknowledged and dropped [MQTT-3.3.5-2] (3.1.1).

    The acknowledgement of a 5.0 client has the reason. The PUBREL of a 3.1.1 client finds no held publish and gets
    PUBCOMP.
    """
    if qos == 2 and packet_id in client.inbound.machine.states:
        return True  # a repetition: the publish was permitted and is held
    if guard.may_publish(key, qos, retain):
        return True
    if qos:
        receipt = Acknowledgement(client, PUBACK if qos == 1 else PUBREC, packet_id, 0)
        if client.version == 5:
            receipt.refuse(ReasonCode.NOT_AUTHORIZED, "not authorized")
        client.acknowledge(receipt)
        bound(client)
    return False


def bare(client: Publisher, route: Route, headers: bytes, payload: bytes, more: Extras | None = None) -> None:
    """Publish the copy of a message that is not stored, for NATS clients and other gateways."""
    size = len(headers)
    target = route.hpub if more is None else route.hpub + more.reply
    client.path.out.append(b"%b%d %d\r\n%b%b\r\n" % (target, size, size + len(payload), headers, payload))


def is_answer(key: bytes) -> bool:
    """Whether a topic, as it stands in a PUBLISH packet, is for answers to NATS clients."""
    return key.startswith(ANSWERS, 2)


def message(client: Publisher, route: Route, payload: bytes, qos: int, retain: bool, more: Extras | None) -> Message:
    """Return the message of a publish for the subscribers of this gateway."""
    if more is None and not retain:
        return Message(route.key, payload, qos, client.client_id)
    if more is None:
        return Rich(route.key, payload, qos, client.client_id, kept=retain)
    return Rich(
        route.key, payload, qos, client.client_id, body=more.body, expiry=more.expiry, born=more.born, kept=retain
    )


def publish5(client: Publisher, packet: Publish) -> None:
    """Handle a PUBLISH of a 5.0 client.

    An error of a single message at QoS 1 or 2 goes into its acknowledgement.

    Raises:
        MqttError: the connection has to end.
    """
    qos = packet.qos
    if qos:
        count(client, packet)
    key = packet.key
    properties = packet.properties
    more = None
    try:
        if properties is not None:
            if "topic_alias" in properties:
                key = unalias(client, key, properties["topic_alias"])
            more = described(client, properties, packet.payload, qos)
        table = client.path.table
        route = table.routes.get(key)
        if route is None or route.version != table.version:
            if is_answer(key):
                client.ingress.replying.answer(client, packet, key, more)
                return
            route = route_for(client, key)
        publish(client, route, packet.payload, qos, packet.retain, packet.packet_id, more)
    except MqttError as error:
        if not qos or error.reason not in ANSWERED or b"+" in key or b"#" in key:
            raise  # a wildcard makes the packet malformed [MQTT-3.3.2-2] (5.0)
        refuse_publish(client, packet, error)


def refuse_publish(client: Publisher, packet: Publish, error: MqttError) -> None:
    """Refuse a publish of a 5.0 client by a reason code in PUBACK or PUBREC [MQTT-4.3.3-9] (5.0)."""
    receipt = Acknowledgement(client, PUBACK if packet.qos == 1 else PUBREC, packet.packet_id, 0)
    receipt.refuse(error.reason, str(error))
    client.acknowledge(receipt)


def count(client: Publisher, packet: Publish) -> None:
    """Count a publish against the Receive Maximum of CONNACK [MQTT-3.3.4-7] (5.0)."""
    unreleased = 0 if client.qos2 is None else len(client.qos2.machine.states)
    if packet.qos == 2:
        if packet.packet_id in client.inbound.machine.states:
            return  # a repetition
        unreleased += 1
    else:
        client.count_unacknowledged()
    most = client.connection.settings.receive_maximum
    if client.unacknowledged + unreleased > most:
        raise ReceiveMaximumExceeded(f"more than {most} publishes are not acknowledged")
