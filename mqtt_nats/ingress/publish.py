# SPDX-License-Identifier: Apache-2.0
"""PUBLISH from a client: its acknowledgement, its copies in NATS and the stream, and local delivery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mqtt_nats.backbone.pending_stores import TooLarge
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.codec import (
    MqttError,
    PacketTooLarge,
    PayloadFormatInvalid,
    Properties,
    Publish,
    PublishRun,
    QuotaExceeded,
    ReasonCode,
    ReceiveMaximumExceeded,
    TopicAliasInvalid,
)
from mqtt_nats.ingress.receipts import RECEIPTS_MAX, Acknowledgement
from mqtt_nats.ingress.retained_ops import RetainedOp
from mqtt_nats.ingress.retained_store import may_retain, store_retained
from mqtt_nats.messages.message import Message, Rich
from mqtt_nats.messages.properties import body, from_headers
from mqtt_nats.transport.connection import Hold
from mqtt_streams.properties import STAY, header_lines, ttl_line
from mqtt_streams.subjects import REPLY_LEVEL

if TYPE_CHECKING:
    from mqtt_nats.ingress.publisher import Publisher
    from mqtt_nats.pubsub.routing_table import Route
    from mqtt_nats.sessions.guard import Guard

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

ANSWER_LINE: Final = b"Nmqtt-Answer:1\r\n"
"""Header line of a stored record: NATS clients may answer, since the publisher may publish on its Response Topic."""

STATES: Final = b"$SYS/broker/connection/"
"""Beginning of the topics on which bridges of mosquitto publish the state of their connection."""

ANSWERS: Final = f"{REPLY_LEVEL}/".encode()
"""Beginning of the topics on which MQTT clients answer NATS clients."""

OF_RECORD: Final = (
    b"Nmqtt-Pub:",
    b"Nmqtt-Subject:",
    b"Nmqtt-Mapped:",
    b"Nmqtt-Epoch:",
    b"Nmqtt-Id:",
    b"Nmqtt-Client:",
    b"Nmqtt-Answer:",
    b"Nats-",
)
"""Beginnings of the header lines of a held publish that are not properties of the message."""


class Extras(NamedTuple):
    """Properties of a publish (5.0) in the forms that its copies need."""

    lines: bytes
    """Header lines, with the expiry."""
    ttl: bytes
    """TTL header line of the retained copy; empty without an expiry."""
    body: bytes
    """Properties as they stand in a PUBLISH packet."""
    expiry: int
    """Message expiry interval in seconds; -1 = none."""
    born: float
    """Unix time of the publish, from which the expiry counts."""
    reply: bytes = b""
    """Reply subject for NATS clients with a space after it; empty = no answer is wanted."""

    @property
    def stay(self) -> bytes:
        """Header line for the copy in `$MQTT_msgs` [MQTT-4.3.3-7] (5.0); empty without an expiry."""
        return b"Nats-TTL:%ds\r\n" % (self.expiry + STAY) if self.expiry >= 0 else b""

    @property
    def recorded(self) -> bytes:
        """Header lines for a record from which the message is published later, maybe by another gateway."""
        return self.lines + ANSWER_LINE if self.reply else self.lines


def extras(properties: Properties, reply: bytes = b"") -> Extras | None:
    """Return the properties that travel with a message; None when there are none."""
    lines = header_lines(properties)
    if not lines:
        return None
    expiry = properties.get("message_expiry_interval", -1)
    return Extras(lines, ttl_line(properties), body(properties), expiry, natstime.now() if expiry >= 0 else 0.0, reply)


def aged(more: Extras, now: float) -> Extras | None:
    """Return the properties with what is left of the expiry interval at Unix time ``now``; None: it has passed."""
    passed = int(now - more.born)
    if passed < 1:
        return more
    left = more.expiry - passed
    if left <= 0:
        return None
    lines = more.lines.replace(b"Nmqtt-Expiry:%d" % more.expiry, b"Nmqtt-Expiry:%d" % left, 1)  # the first line
    return Extras(lines, ttl_line({"message_expiry_interval": left}), more.body, left, now, more.reply)


def restored(headers: bytes, born: float) -> Extras | None:
    """Return the properties of a held publish from its record's headers; ``born``: Unix time of the record's store."""
    found, expiry = from_headers(headers)
    if not found and expiry < 0:
        return None
    kept = [line for line in headers.split(b"\r\n")[1:] if line and not line.startswith(OF_RECORD)]
    lines = b"".join(line + b"\r\n" for line in kept)
    ttl = ttl_line({"message_expiry_interval": expiry}) if expiry >= 0 else b""
    return Extras(lines, ttl, found, expiry, born)


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
            if retain:
                lines += _retained(client, route, payload, 0, None, more)
            if retain or more is not None or client.marked:
                bare(client, route, b"NATS/1.0\r\nNmqtt-Pub:0\r\n%b\r\n" % lines, payload, more)
            else:
                path.out.append(b"%b%d\r\n%b\r\n" % (route.pub, len(payload), payload))
            if route.local:
                path.fanout.group(route.local, message(client, route, payload, 0, retain, more))
        elif qos == 1:  # [MQTT-3.3.1-12] [MQTT-4.3.2-2] (3.1.1), [MQTT-4.3.2-4] [MQTT-4.3.2-5] (5.0)
            receipt = Acknowledgement(client, 4, packet_id, 2 if retain else 1)
            client.receipts.append(receipt)
            if retain:
                lines += _retained(client, route, payload, 1, receipt, more)
            identity = path.ids.next()
            first = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:%b\r\n%b" % (identity, lines)
            bare(client, route, b"%b%b\r\n" % (first, route.stated), payload, more)
            last = b"\r\n" if more is None else more.stay + b"\r\n"
            headers = b"%bNats-Msg-Id:%b\r\n%b" % (first, identity, last) if path.with_ids else first + last
            path.store.put(route.msgs, headers, payload, receipt)
            if route.local:
                path.fanout.group(route.local, message(client, route, payload, 1, retain, more), identity)
        else:
            client.inbound.publish(client, route.asked, route, packet_id, payload, retain, more)
    except TooLarge as error:
        raise PacketTooLarge(str(error)) from None
    bound(client)


def _retained(
    client: Publisher, route: Route, payload: bytes, qos: int, receipt: Acknowledgement | None, more: Extras | None
) -> bytes:
    """Store the retained copy of a publish; return the header line of the other copies that says so."""
    operation = RetainedOp(client.ingress.retained, receipt, not payload, client)
    store_retained(client, route, payload, qos, operation, b"", more)
    return RETAIN_LINE


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
        receipt = Acknowledgement(client, 4 if qos == 1 else 5, packet_id, 0)
        if client.version == 5:
            receipt.refuse(ReasonCode.NOT_AUTHORIZED, "not authorized")
        client.receipts.append(receipt)
        client.settle()
        bound(client)
    return False


def bare(client: Publisher, route: Route, headers: bytes, payload: bytes, more: Extras | None = None) -> None:
    """Publish the copy of a message that is not stored, for NATS clients and other gateways."""
    size = len(headers)
    target = route.hpub if more is None else route.hpub + more.reply
    client.path.out.append(b"%b%d %d\r\n%b%b\r\n" % (target, size, size + len(payload), headers, payload))


def may_answer(client: Publisher, topic: str) -> bool:
    """Whether NATS clients may answer on a response topic: only where the client may publish itself."""
    if client.guarded is None:
        return True
    raw = topic.encode()
    return client.guarded.may_publish(len(raw).to_bytes(2) + raw, 0, False)


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
    receipt = Acknowledgement(client, 4 if packet.qos == 1 else 5, packet.packet_id, 0)
    receipt.refuse(error.reason, str(error))
    client.receipts.append(receipt)
    client.settle()


def described(client: Publisher, properties: Properties, payload: bytes, qos: int) -> Extras | None:
    """Return the properties of a client's publish in the forms that its copies need.

    Raises:
        MqttError: a property is invalid or not permitted.
    """
    reply = b""
    if "response_topic" in properties:
        topic = properties["response_topic"]
        if may_answer(client, topic):
            owner = client.connection.host if client.user is None else f"user {client.user}"
            reply = client.ingress.replying.reply_subject(topic, properties.get("correlation_data"), qos, owner)
    if properties.get("payload_format_indicator") and client.services.settings.validate_payload_format:
        _check_text(payload)
    return extras(properties, reply)


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


def unalias(client: Publisher, key: bytes, alias: int) -> bytes:
    """Return the topic of an alias, which the packet may also set [MQTT-3.3.2-7] [MQTT-3.3.2-12] (5.0).

    Raises:
        TopicAliasInvalid: the alias is higher than CONNACK allows, or not known.
        QuotaExceeded: the gateway has no memory for the alias.
    """
    if alias > client.services.settings.topic_alias_maximum:  # [MQTT-3.3.2-9] (5.0)
        # [MQTT-3.2.2-17] [MQTT-3.2.2-18] (5.0)
        raise TopicAliasInvalid(f"topic alias {alias} is above {client.services.settings.topic_alias_maximum}")
    if len(key) > 2:
        if not client.memory.set_alias(alias, key):
            raise QuotaExceeded("the topic aliases take too much memory")
        return key
    known = None if client.memory.aliases is None else client.memory.aliases.get(alias)
    if known is None:
        raise TopicAliasInvalid(f"topic alias {alias} has no topic")
    return known


def _check_text(payload: bytes) -> None:
    try:
        payload.decode()
    except UnicodeDecodeError:
        raise PayloadFormatInvalid("the payload is not UTF-8 text") from None
