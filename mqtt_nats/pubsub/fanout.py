# SPDX-License-Identifier: Apache-2.0
"""Fan-out: encodes a message for its subscribers and hands the bytes to their write buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.backbone.transport import RunHandler
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.codec import PublishRun, publish_head
from mqtt_nats.messages.headers import identity, is_retained, is_status, moved, publish_qos, publisher
from mqtt_nats.messages.message import Message, Rich
from mqtt_nats.messages.properties import from_headers
from mqtt_nats.pubsub.routing_table import NOBODY, Filter, Group, Member, Route, Table
from mqtt_nats.transport.write_buffer import FlushRound, WriteBuffer
from mqtt_streams.subjects import visible_to_wildcard

# Seconds for which the ids of QoS 1 and 2 messages are remembered, in two halves. After a connection falls silent,
# the ids of half of that time, less the time in which the silence is noticed, are still known.
SEEN_FOR: Final = 40.0

# Maximum number of ids per filter and half: while a connection to NATS is away, no id is forgotten.
SEEN_MOST = 250_000

PARTS_PACKET_BYTES: Final = 2048
"""Packet size in bytes from which a copy of the packet costs more than a list of its parts."""


class Fanout:
    """Fan-out of messages to the subscribers of this gateway, and to NATS.

    No message overtakes another on its way [MQTT-4.6.0-5] [MQTT-4.6.0-6] (3.1.1, 5.0).
    """

    def __init__(self, table: Table, link: NatsConnection, round_: FlushRound) -> None:
        self.table = table
        self.out: list[bytes | memoryview] = link.out
        """Frames for NATS: the link's own list, which the link never replaces."""
        self.round = round_
        self.sent = [0, 0, 0]
        """Number of messages for members, by the QoS sent; messages that are dropped afterwards are counted, too."""
        self.sent_bytes = [0, 0, 0]
        """Payload bytes of the messages in `sent`, by QoS."""
        self.response_topic: Callable[[Filter, Route, bytes, bytes], bytes] | None = None
        """``response_topic(found, route, headers, reply)``: what 5.0 clients are told of a NATS reply subject."""
        self.suspected: Callable[[str, bytes, bytes, bytes], None] | None = None
        """``suspected(subject, target, headers, payload)``: a copy of a QoS 1 or 2 message, which may not be stored."""
        self.unclear: Callable[[str, bytes], None] | None = None
        """``unclear(subject, headers)``: the same for a copy that another program may be about to store."""
        self._remembering: set[Filter] = set()

    # -- from clients ---------------------------------------------------------------------------

    def run(self, route: Route, run: PublishRun, sender: Member) -> None:
        """Publish and deliver a run of QoS 0 messages of one client on one topic."""
        raw = run.raw
        if isinstance(raw, bytearray):
            self._large(route, run, raw, sender)
            return
        start = run.head
        count = run.count
        lead = b"%b%d\r\n" % (route.pub, run.step - start)
        if run.step > PARTS_PACKET_BYTES:
            out = self.out
            view = memoryview(raw)
            following = b"\r\n" + lead
            for at in range(start, start + count * run.step, run.step):
                out.append(lead)
                out.append(view[at : at + run.step - start])
                lead = following
            out.append(b"\r\n")
        elif count == 1:
            self.out.append(b"%b%b\r\n" % (lead, raw[start:]))
        else:
            self.out.append(lead + (b"\r\n" + lead).join(run.payloads()) + b"\r\n")
        group = route.local
        size = count * (run.step - start)
        if group.zero:
            self.zero(group.zero, raw if sender.version == 4 else _converted(route.key, run, 4), count, size)
        if group.zero5:
            self.zero(group.zero5, raw if sender.version == 5 else _converted(route.key, run, 5), count, size)
        for member, choice in group.guarded:
            for payload in run.payloads():
                member.guard(choice, Message(route.key, payload, 0, sender.client_id))

    def _large(self, route: Route, run: PublishRun, raw: bytearray, sender: Member) -> None:
        """Deliver a run of one large message from its read buffer; only another encoding needs a copy."""
        size = run.step - run.head
        self.out.append(b"%b%d\r\n" % (route.pub, size))
        self.out.append(memoryview(raw)[run.head :])
        self.out.append(b"\r\n")
        group = route.local
        same, other = (group.zero5, group.zero) if sender.version == 5 else (group.zero, group.zero5)
        for write_buffer in same:
            write_buffer.hand(raw)
        self.sent[0] += len(same)
        self.sent_bytes[0] += size * len(same)
        if other:
            self.zero(other, _converted(route.key, run, 4 if sender.version == 5 else 5), 1, size)
        for member, choice in group.guarded:
            member.guard(choice, Message(route.key, run.payloads()[0], 0, sender.client_id))

    def zero(self, write_buffers: list[WriteBuffer], data: bytes, count: int, size: int) -> None:
        """Send ``count`` QoS 0 messages with ``size`` payload bytes in all to a list of write buffers."""
        dirty = self.round.dirty
        for write_buffer in write_buffers:
            if write_buffer.clogged:
                write_buffer.offer(data, count)
            else:
                write_buffer.chunks.append(data)
                if not write_buffer.dirty:
                    write_buffer.join(dirty)
        several = len(write_buffers)
        self.sent[0] += count * several
        self.sent_bytes[0] += size * several

    def local(self, route: Route, message: Message, known: bytes = b"") -> None:
        """Deliver a message of a local client, with id ``known``, to the members that are served locally."""
        if route.local:
            self.group(route.local, message, known)

    def released(self, route: Route, message: Message, release: bytes) -> None:
        """Deliver a released QoS 2 message locally, unless a delivery for the same release came before."""
        for found, group in route.groups.items():
            if found.local and self.remember(found, release, route.subject):
                self.group(group, message, release)

    def tell_response_topics(self, response_topic: Callable[[Filter, Route, bytes, bytes], bytes]) -> None:
        """Tell 5.0 clients of NATS reply subjects; see :attr:`response_topic`."""
        self.response_topic = response_topic

    def begin_looking(
        self, suspected: Callable[[str, bytes, bytes, bytes], None], unclear: Callable[[str, bytes], None]
    ) -> None:
        """Hand on copies, which may not be stored."""
        self.suspected, self.unclear = suspected, unclear

    def remember(self, found: Filter, identity: bytes, subject: str) -> bool:
        """Remember the id of a message that came through a filter, with its subject; False: the id is known already."""
        if identity in found.seen or identity in found.seen_before:
            return False
        if len(found.seen) >= SEEN_MOST:
            found.rotate()
        found.seen[identity] = subject
        self._remembering.add(found)
        return True

    def rotate(self) -> None:
        """Forget the older half of the remembered ids; called every half of ``SEEN_FOR``."""
        self._remembering = {found for found in self._remembering if found.rotate()}

    # -- to members -----------------------------------------------------------------------------

    def group(self, group: Group, message: Message, known: bytes = b"") -> None:
        """Deliver one message, with id ``known``, to one group: at the lower QoS, RETAIN clear.

        [MQTT-3.8.4-6] [MQTT-3.3.1-9] (3.1.1), [MQTT-3.8.4-8] [MQTT-3.3.1-12] (5.0)
        """
        qos = message.qos
        if qos == 0:
            write_buffers, write_buffers5 = group.zero, group.zero5
        else:
            write_buffers, write_buffers5 = group.low, group.low5
            high = group.high
            if qos == 1:
                for member, _ in high:
                    member.send_or_queue(message, 1)
                if high:
                    several = len(high)
                    self.sent[1] += several
                    self.sent_bytes[1] += several * len(message.payload)
            elif high:
                self._twos(high, message)
        if write_buffers:
            self.zero(write_buffers, message.zero(), 1, len(message.payload))
        if write_buffers5:
            self.zero(write_buffers5, message.zero5(), 1, len(message.payload))
        for member, choice in group.guarded:
            member.guard(choice, message, known)
        self.round.start()

    def _twos(self, members: list[tuple[Member, int]], message: Message) -> None:
        """Send a QoS 2 message to members with granted QoS 1 or 2."""
        size = len(message.payload)
        for member, granted in members:
            member.send_or_queue(message, granted)
            self.sent[granted] += 1
            self.sent_bytes[granted] += size

    # -- from NATS ------------------------------------------------------------------------------

    def arrival(self, found: Filter) -> FilterHandler:
        """Return the handler of a filter's NATS subscriptions."""
        return FilterHandler(self, found)

    def resolved(self, found: Filter, subject: bytes) -> Route | None:
        """Return the route of a message that came through a filter; None if the filter does not match its subject."""
        if found.text[0] in "#+" and not visible_to_wildcard(subject.decode("utf-8", "replace")):
            return None
        return self.table.route_of_subject(subject)

    def from_nats(
        self,
        found: Filter,
        group: Group,
        route: Route,
        headers: bytes,
        payload: bytes,
        born: float = 0.0,
        reply: bytes = b"",
    ) -> None:
        """Deliver a message with headers: from another gateway, a NATS client, or a replay after a gap.

        Args:
            born: Unix time at which it was stored; 0 = now.
            reply: where its publisher waits for answers.
        """
        qos = publish_qos(headers)
        known = b""
        if qos:
            if found.joining is not None and not born and not is_retained(headers):
                group = group.without(found.joining)
            known = identity(headers)
            if known and not self.remember(found, known, route.subject):
                known = self._elsewhere(found, known, route.subject)
                if not known:
                    return
                if group.stored and not born and self.suspected is not None:
                    self.suspected(route.subject, route.msgs, headers, payload)
            elif group.stored and not born:
                self._look(route, headers, payload)
            if group.stored and not (group.high or group.low or group.low5 or group.guarded):
                return  # all members that want the message get it from the stream
        elif group.guarded:
            known = identity(headers)
        sender = publisher(headers) if group.guarded else ""
        topic = b""
        if reply and self.response_topic is not None and _modern(group):
            topic = self.response_topic(found, route, headers, reply)
        self.group(group, received(route.key, payload, qos, headers, sender, born, topic), known)

    def again(self, link: NatsConnection, subject: bytes, headers: bytes, payload: bytes) -> None:
        """Deliver a live copy that another gateway has sent again, to members for whom the first one has not come.

        Args:
            link: the connection that has brought it, whose filters it is for.
            subject: subject of the message.
        """
        route = self.table.route_of_subject(subject) if publish_qos(headers) else None
        if route is None:
            return
        for found, group in list(route.groups.items()):
            if found.link is not link or self.resolved(found, subject) is not route:
                continue
            if found.backlog is not None:
                found.keep_missed(found.backlog, route, headers, payload, b"")
            else:
                self.from_nats(found, group, route, headers, payload)

    def note(self, found: Filter, headers: bytes, subject: str) -> None:
        """Remember a message that comes to a filter's members through other filters, or is too old for them."""
        known = identity(headers)
        if known and known not in found.seen_before:
            if len(found.seen) >= SEEN_MOST:
                found.rotate()
            found.seen.setdefault(known, subject)
            self._remembering.add(found)

    def _elsewhere(self, found: Filter, known: bytes, subject: str) -> bytes:
        """Return the id under which a message counts on a further subject of its filter; empty: it is a repetition."""
        first = found.seen.get(known) or found.seen_before.get(known)
        if first == subject:
            return b""
        known = b"%b %b" % (known, subject.encode())
        return known if self.remember(found, known, subject) else b""

    def look_at_shared(self, found: Filter, subject: bytes, headers: bytes, payload: bytes) -> None:
        """Hand on a QoS 1 or 2 message that has come through a queue group, if it is a copy."""
        if b"\r\nNats-Stream:" not in headers and not moved(headers, b"Nmqtt-Subject:%b\r\n" % subject):
            return
        route = self.resolved(found, subject)
        if route is not None:
            self._look(route, headers, payload)

    def _look(self, route: Route, headers: bytes, payload: bytes) -> None:
        """Hand on a message if another stream has published it, or if its publisher stores it under another subject."""
        if b"\r\nNats-Stream:" in headers:
            if self.suspected is not None:
                self.suspected(route.subject, route.msgs, headers, payload)
        elif self.unclear is not None and moved(headers, route.stated):
            self.unclear(route.subject, headers)


class FilterHandler(RunHandler):
    """Handler of the messages that NATS brings for one filter. One object, since a gateway has very many of them."""

    __slots__ = ("_fanout", "_found")

    def __init__(self, fanout: Fanout, found: Filter) -> None:
        self._fanout = fanout
        self._found = found

    def __call__(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Deliver one message."""
        fanout, found = self._fanout, self._found
        table = fanout.table
        route = table.by_subject.get(subject)
        if route is None or route.version != table.version:
            route = fanout.resolved(found, subject)
            if route is None:
                return
        group = route.groups.get(found)
        if group is None or group is NOBODY:
            if group is not None and headers:
                fanout.note(found, headers, route.subject)
            return
        if not headers and not reply and not group.guarded:
            if group.zero:
                head = publish_head(0x30, route.key, len(payload))
                fanout.zero(group.zero, head + payload, 1, len(payload))
            if group.zero5:
                head = publish_head(0x30, route.key, 1 + len(payload))
                fanout.zero(group.zero5, b"%b\0%b" % (head, payload), 1, len(payload))
            fanout.round.start()
            return
        if reply.startswith(b"$JS.ACK."):
            return  # delivery of a push consumer whose deliver subject is like this subject
        if found.backlog is not None and publish_qos(headers):
            found.keep_missed(found.backlog, route, headers, payload, reply)
            return
        if headers and is_status(headers):
            return  # no responders: the answer to a request of a client
        fanout.from_nats(found, group, route, headers, payload, reply=reply)

    def run(self, subject: bytes, payloads: list[bytes]) -> None:
        """Deliver plain messages in a row."""
        fanout = self._fanout
        table = fanout.table
        route = table.by_subject.get(subject)
        if route is None or route.version != table.version:
            route = fanout.resolved(self._found, subject)
            if route is None:
                return
        group = route.groups.get(self._found)
        if group is None:
            return
        if group.guarded:
            for payload in payloads:
                self(subject, b"", b"", payload)
            return
        size, count = len(payloads[0]), len(payloads)
        if group.zero:
            head = publish_head(0x30, route.key, size)
            fanout.zero(group.zero, head.join([b"", *payloads]), count, count * size)
        if group.zero5:
            head = publish_head(0x30, route.key, 1 + size) + b"\0"
            fanout.zero(group.zero5, head.join([b"", *payloads]), count, count * size)
        fanout.round.start()


def _modern(group: Group) -> bool:
    """Return whether any member of a group uses MQTT 5.0."""
    return bool(group.zero5) or any(member.version == 5 for member, _ in group.guarded)


def received(
    key: bytes,
    payload: bytes,
    qos: int,
    headers: bytes,
    sender: str = "",
    born: float = 0.0,
    topic: bytes = b"",
    retain: bool = False,
) -> Message:
    """Return the message that came through NATS with ``headers``.

    Args:
        topic: its Response Topic property.
        retain: whether it is a retained message for a new subscription.
    """
    body, expiry = from_headers(headers)
    if topic:
        body = topic + body
    kept = is_retained(headers)
    if not body and expiry < 0 and not kept:
        return Message(key, payload, qos, sender, retain)
    if expiry >= 0 and not born:
        born = natstime.now()
    return Rich(key, payload, qos, sender, retain=retain, body=body, expiry=expiry, born=born, kept=kept)


def _converted(key: bytes, run: PublishRun, version: int) -> bytes:
    """Return the packets of a run in the encoding of the other MQTT version."""
    size = run.step - run.head
    head = publish_head(0x30, key, size) if version == 4 else publish_head(0x30, key, size + 1) + b"\0"
    return head.join([b"", *run.payloads()])
