# SPDX-License-Identifier: Apache-2.0
"""Publishes without a matching PUBLISH packet: wills, messages of timers and plugins, a QoS changed by a hook."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from mqtt_nats.backbone.pending_stores import CountedStore, TooLarge
from mqtt_nats.codec import PacketTooLarge, TopicNameInvalid
from mqtt_nats.ingress.publish import HEADERS, RETAIN_LINE, STATES, checked
from mqtt_nats.ingress.publish_properties import Extras
from mqtt_nats.ingress.retained.ops import RetainedOp
from mqtt_nats.ingress.retained.store import retain, tombstone_subject
from mqtt_nats.messages.message import Message, Rich
from mqtt_nats.pubsub.routing_table import Route
from mqtt_streams.api import ApiError
from mqtt_streams.headers import percent_decode
from mqtt_streams.subjects import topic_to_subject

if TYPE_CHECKING:
    from mqtt_nats.ingress.publish import Ingress
    from mqtt_nats.pubsub.data_path import Path

log = logging.getLogger("mqtt_nats.broker")


class LoggedStore(CountedStore):
    """Stores of a message for whose end no client waits: a refusal is logged."""

    __slots__ = ("topic",)

    def __init__(self, topic: str) -> None:
        super().__init__()
        self.topic = topic

    def stored(self, ack: bytes) -> None:
        """Ignore a finished store."""

    def failed(self, error: ApiError) -> None:
        """Log that a store is refused."""
        log.error("a message on %r was not stored: %s", self.topic, error)


class Awaited(CountedStore):
    """Stores whose end a coroutine awaits (``done``)."""

    __slots__ = ("done",)

    def __init__(self, left: int = 0) -> None:
        super().__init__(left)
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def stored(self, ack: bytes) -> None:
        """Count one finished store; ``done`` is set after the last one."""
        self.remaining -= 1
        if self.remaining <= 0 and not self.done.done():
            self.done.set_result(0)

    def failed(self, error: ApiError) -> None:
        """Set the error in ``done``."""
        if not self.done.done():
            self.done.set_exception(error)


def check_size(path: Path, route: Route, payload: bytes, sender: bytes, more: Extras | None) -> None:
    """Check that NATS takes a message.

    Raises:
        PacketTooLarge: the message exceeds `max_payload`.
        QuotaExceeded: JetStream would not store the headers.
    """
    lines = len(more.lines) if more is not None else 0
    size = len(payload) + checked(HEADERS + len(sender) + 2 * len(route.hpub) + lines)
    if size > path.store.max_payload:
        raise PacketTooLarge(f"nats-server takes messages of {path.store.max_payload} bytes, headers included")


def inject(
    ingress: Ingress,
    route: Route,
    payload: bytes,
    qos: int,
    retained: bool,
    sender: bytes,
    more: Extras | None,
    release: bytes,
    operation: CountedStore,
) -> None:
    """Publish a message: to NATS and local subscribers, into the stream at QoS 1 or 2, and as a retained message.

    Args:
        sender: header line that names the publisher; empty = none.
        release: id by which a repetition is recognised, beginning with ``q2-`` or ``will-``; empty = none.
        operation: expects the stores in addition to those that it has counted.

    Raises:
        TooLarge: NATS would not take the message.
    """
    path = ingress.services.path
    lines = sender
    ttl, reply, stay = b"", b"", b""
    if more is not None:
        lines += more.lines
        ttl, reply, stay = more.ttl, more.reply, more.stay
    identity = path.ids.next() if qos or retained else b""
    known_by = b"Nats-Msg-Id:%b\r\n" % release if release else b""
    named = b"Nmqtt-Id:%b\r\n" % identity if identity else b""
    if retained:  # [MQTT-3.1.2-16] [MQTT-3.1.2-17] (3.1.1), [MQTT-3.1.2-14] [MQTT-3.1.2-15] (5.0)
        operation.expect()
        parent = RetainedOp(ingress.retained, operation, tombstone_subject(route, payload))
        retain(ingress.retained, route, payload, qos, parent, lines + ttl, known_by or named)
        lines += RETAIN_LINE
    first = b"NATS/1.0\r\nNmqtt-Pub:%d\r\n" % qos
    first += known_by + named + lines if identity else lines
    stated = first + route.stated if qos else first
    size = len(stated) + 2
    path.out.append(b"%b%b%d %d\r\n%b\r\n%b\r\n" % (route.hpub, reply, size, size + len(payload), stated, payload))
    if qos:
        operation.expect()
        if not release and path.with_ids:
            first += b"Nats-Msg-Id:%b\r\n" % identity
        path.store.put(route.msgs, b"%b%b\r\n" % (first, stay), payload, operation)
    message = _message(route, payload, qos, retained, sender, more)
    if qos and release:
        path.fanout.released(route, message, release)
    else:
        path.fanout.local(route, message, release or identity)


async def unretain(ingress: Ingress, topic: str) -> bool:
    """Remove the retained message of a topic; False: subscribers do not get an empty message.

    Where subject mappings lead the topic's publishes elsewhere, only the stored message is removed: an empty message
    would reach, and clear, another topic.

    Raises:
        MqttError: the topic is not for clients.
        ValueError: the topic is too long.
        ApiError: JetStream refuses the removal.
    """
    encoded = topic.encode()
    key = len(encoded).to_bytes(2) + encoded
    operation, path = Awaited(), ingress.services.path
    try:
        table = path.table
        route: Route | None = table.system_route(key) if key.startswith(STATES, 2) else table.route(key)
    except TopicNameInvalid:  # the topic is mapped to a subject that is no topic
        route = None
    told = route is not None and route.topic == topic
    if route is not None and told:
        inject(ingress, route, b"", 0, True, b"", None, b"", operation)
    else:
        operation.expect()
        only = Route(key, topic, topic_to_subject(topic))
        removal = RetainedOp(ingress.retained, operation, tombstone_subject(only, b""))
        retain(ingress.retained, only, b"", 0, removal, b"")
    path.link.kick()
    path.round.start()
    await operation.done
    return told


def _message(route: Route, payload: bytes, qos: int, retained: bool, sender: bytes, more: Extras | None) -> Message:
    name = percent_decode(sender.partition(b":")[2].strip().decode("latin-1"))
    if more is None and not retained:
        return Message(route.key, payload, qos, name)
    if more is None:
        return Rich(route.key, payload, qos, name, kept=True)
    return Rich(route.key, payload, qos, name, body=more.body, expiry=more.expiry, born=more.born, kept=retained)


def sender_line(headers: bytes) -> bytes:
    """Return the header line that names a publisher if ``headers`` begin with it, else empty bytes."""
    first, newline, _ = headers.partition(b"\r\n")
    return first + newline if first.startswith(b"Nmqtt-Client:") else b""


__all__ = ["Awaited", "LoggedStore", "TooLarge", "check_size", "inject", "sender_line", "unretain"]
