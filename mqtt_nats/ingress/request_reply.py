# SPDX-License-Identifier: Apache-2.0
"""Requests and answers between NATS clients and MQTT clients.

A request of a NATS client has a reply subject. A 5.0 client that gets the request sees an opaque Response Topic,
``$reply/<token>``, and publishes its answer there; the gateway knows the reply subject of the token. A request of an
MQTT 5.0 client has a Response Topic. NATS clients see the subject of this topic as the reply subject. Where the request
has correlation data, they see a subject of the gateway, which publishes the answer on the Response Topic with the data.

Tokens cannot be guessed, and are known for a limited time. See docs/internals/ingress.md#replies.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from mqtt_nats.codec import (
    MqttError,
    NotAuthorized,
    PacketKind,
    PacketTooLarge,
    Properties,
    Publish,
    PublishRun,
    ReasonCode,
    matches,
    put_varint,
)
from mqtt_nats.codec.properties import place, read_properties
from mqtt_nats.codec.wire import PUBACK, Reader
from mqtt_nats.ingress.publish import ANSWERS, HEADERS, Acknowledgement, bound, message
from mqtt_nats.ingress.publish_properties import ANSWER_LINE, Extras, extras
from mqtt_nats.messages.headers import is_status
from mqtt_nats.messages.message import Message, Rich
from mqtt_nats.messages.properties import RESPONSE_TOPIC, SHOWN_MOST, from_headers
from mqtt_streams.subjects import MAX_SUBJECT_BYTES, RESERVED_ROOTS, wire_topic

if TYPE_CHECKING:
    from mqtt_nats.ingress.publish import Publisher
    from mqtt_nats.pubsub.routing_table import Filter, Route
    from mqtt_nats.sessions.services import Services

log = logging.getLogger("mqtt_nats.broker")

KNOWN_FOR: Final = 300.0
"""Seconds for which a request can be answered."""

KNOWN_MOST: Final = 65_536
KNOWN_BYTES: Final = 32 * 1024 * 1024
"""Largest number of open requests in each direction, and their memory in bytes; the oldest are forgotten."""

ENTRY_BYTES: Final = 300
"""Rough size in memory, in bytes, of a request without its strings."""

TOKEN_BYTES: Final = 16

OWN_MOST: Final = 200
"""Longest subject of a Response Topic, in bytes, that is itself the reply subject: both have to fit into one line."""

INBOXES: Final = (b"_INBOX.", b"_R_.", b"_GR_.")
"""Beginnings of the subjects on which NATS clients, and NATS itself between accounts and clusters, wait for replies."""

T = TypeVar("T")


class Request(NamedTuple):
    """A request from NATS that clients of this gateway may answer."""

    subject: bytes
    """The reply subject."""
    topic: str
    filter: str
    """Topic filter of the subscription that brought the request."""
    asked: bytes
    """The reply subject as a topic, as it stands in a PUBLISH packet: an answering client must be permitted to publish
    there. Empty for an inbox, which is no topic."""


class Question(NamedTuple):
    """A request of an MQTT client that NATS clients may answer."""

    key: bytes
    """The Response Topic as it stands in a PUBLISH packet."""
    correlation: bytes | None


class Unconfirmed(NamedTuple):
    """An answer whose PUBACK or PUBREC waits until nats-server has the answer."""

    receipt: Acknowledgement
    wire: object
    """Connection to NATS on which the answer was sent."""

    def acknowledge_answer(self, arrived: bool) -> None:
        """Acknowledge the answer if nats-server has it; else refuse it, so that the client may send it again."""
        receipt = self.receipt
        client = receipt.client
        if not client.alive:
            return
        if arrived:
            receipt.stored(b"")
            return
        if receipt.kind == 5:
            client.ingress.replying.released(client, receipt.id)
        receipt.refuse(ReasonCode.UNSPECIFIED_ERROR, "the connection to NATS was lost")
        if client.receipts and client.receipts[0] is receipt:
            client.settle()


class _Owned:
    """Tokens of one owner, the oldest first, and their memory in bytes."""

    __slots__ = ("bytes", "tokens")

    def __init__(self) -> None:
        self.bytes = 0
        self.tokens: OrderedDict[bytes, None] = OrderedDict()

    def add(self, token: bytes, size: int) -> None:
        """Add a token."""
        self.tokens[token] = None
        self.bytes += size

    def remove(self, token: bytes, size: int) -> bool:
        """Remove a token; return whether it was the last one."""
        del self.tokens[token]
        self.bytes -= size
        return not self.tokens


class Tokens(Generic[T]):
    """Tokens with their values, bounded in number, memory and time.

    Without room the oldest token makes room. It is one of the owner that wants another, if this owner has more than the
    average of all: who asks much does not make others wait in vain.
    """

    __slots__ = ("_bytes", "_found", "_owned")

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, tuple[float, int, T, str]] = OrderedDict()  # a dict is slow to find its oldest
        self._owned: dict[str, _Owned] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._found)

    def issue(self, value: T, size: int, now: float, owner: str = "") -> bytes:
        """Return a new token of an owner for a value; ``size`` is the rough memory of the value, in bytes."""
        found = self._found
        while found and now - found[oldest := next(iter(found))][0] >= KNOWN_FOR:
            self.forget(oldest)
        while found and (len(found) >= KNOWN_MOST or self._bytes + size > KNOWN_BYTES):
            own = self._owned.get(owner)
            above = own is not None and own.bytes * len(self._owned) > self._bytes
            self.forget(next(iter(own.tokens if own is not None and above else found)))
        token = secrets.token_urlsafe(TOKEN_BYTES).encode()
        found[token] = (now, size, value, owner)
        self._bytes += size
        self._owned.setdefault(owner, _Owned()).add(token, size)
        return token

    def find(self, token: bytes, now: float) -> T | None:
        """Return the value of a token; None when the token is unknown or too old."""
        entry = self._found.get(token)
        if entry is None or now - entry[0] >= KNOWN_FOR:
            return None
        return entry[2]

    def forget(self, token: bytes) -> None:
        """Remove a token that is not used any more."""
        entry = self._found.pop(token, None)
        if entry is not None:
            _, size, _, owner = entry
            self._bytes -= size
            if self._owned[owner].remove(token, size):
                del self._owned[owner]


class Replying:
    """Open requests that one gateway has passed on, of NATS clients and of MQTT clients."""

    def __init__(self, services: Services) -> None:
        self._services, self._path = services, services.path
        own = services.settings.reply_prefixes
        self._inboxes = (*INBOXES, *(f"{prefix}.".encode() for prefix in own))
        self._requests: Tokens[Request] = Tokens()
        self._questions: Tokens[Question] = Tokens()
        self._prefix = b"_INBOX." + secrets.token_hex(11).encode() + b"."
        services.nats.reconnect.subscribe_answers(self._prefix + b"*", self._answered)
        self._sent: dict[tuple[str, int], bytes] = {}
        """Tokens of the answers at QoS 2 without PUBREL, by session key and packet identifier."""
        self._unconfirmed: list[Unconfirmed] = []
        self._confirming = False

    # -- requests from NATS ---------------------------------------------------------------------

    def response_topic(self, found: Filter, route: Route, headers: bytes, reply: bytes) -> bytes:
        """Return the Response Topic, as a property, of a message that came from NATS with a reply subject.

        Empty when the message has its own Response Topic, or when answers on the reply subject are not permitted: a
        gateway may publish on subjects on which the requester must not.
        """
        if b"\r\nNmqtt-Reply:" in headers or not _answerable(reply):
            return b""
        asked = b""
        if not reply.startswith(self._inboxes):
            name = wire_topic(reply)
            if name is None:  # no topic, so the rules cannot be applied
                return b""
            encoded = name.encode()
            asked = len(encoded).to_bytes(2, "big") + encoded
        request = Request(reply, route.topic, found.text, asked)
        size = ENTRY_BYTES + len(reply) + len(asked) + len(route.key) + len(found.text)
        token = self._requests.issue(request, size, self._services.clock.now)
        topic = ANSWERS + token
        return RESPONSE_TOPIC + len(topic).to_bytes(2, "big") + topic

    def answer_run(self, client: Publisher, run: PublishRun) -> None:
        """Publish a run of answers at QoS 0 without properties."""
        for payload in run.payloads():
            self.answer(client, Publish(0, False, False, run.key, 0, payload), run.key, None)

    def answer(self, client: Publisher, packet: Publish, key: bytes, more: Extras | None) -> None:
        """Handle a PUBLISH on ``$reply/...``; at QoS 0 an answer that comes too late is dropped.

        PUBACK and PUBREC leave when nats-server has the answer. The answer goes to the requester at once, also at
        QoS 2: PUBREL only frees the packet identifier.

        Raises:
            NotAuthorized: the request is not known any more, or was not for this client, or its reply subject is a
                topic that this client may not publish to.
            PacketTooLarge: NATS would not take the answer.
        """
        token = key[2 + len(ANSWERS) :]
        qos, identifier = packet.qos, packet.packet_id
        if packet.retain:
            raise NotAuthorized("an answer to a NATS client cannot be retained")
        request = self._request(client, token, qos)
        if request is None:
            return
        size = HEADERS + len(client.sender_header) + len(packet.payload) + (len(more.lines) if more is not None else 0)
        if size > self._path.store.max_payload:
            raise PacketTooLarge(
                f"nats-server takes messages of {self._path.store.max_payload} bytes, headers included"
            )
        receipt: Acknowledgement | None = None
        if qos == 2:
            receipt = client.inbound.pass_on(client, identifier, key)
            if receipt is None:
                return
            sent = (client.hash, identifier)
            if not packet.dup or self._sent.get(sent) != token:
                self._send(client, request, packet, more)
            if len(self._sent) >= KNOWN_MOST:
                self._sent.clear()
            self._sent[sent] = token
        else:
            self._send(client, request, packet, more)
        if qos:
            receipt = receipt or Acknowledgement(client, PUBACK, identifier, 0)
            receipt.expect()
            client.receipts.append(receipt)
            self._confirm(Unconfirmed(receipt, self._path.link.wire))
            bound(client)

    def _request(self, client: Publisher, token: bytes, qos: int) -> Request | None:
        """Return the request that a client answers; None: the answer comes too late or is not permitted (QoS 0).

        Raises:
            NotAuthorized: the same at QoS 1 or 2, where the acknowledgement has the reason.
        """
        request = self._requests.find(token, self._services.clock.now)
        if request is None or not _receives(client, request):
            if qos:
                raise NotAuthorized("the request was not for this client, or can no longer be answered")
            log.debug("%s: no NATS client waits for this answer", client)
            return None
        if request.asked and client.guarded is not None and not client.guarded.may_publish(request.asked, qos, False):
            if qos:
                raise NotAuthorized("the response topic of the request is not permitted")
            return None
        return request

    def _send(self, client: Publisher, request: Request, packet: Publish, more: Extras | None) -> None:
        payload = packet.payload
        client.services.counters.receive(packet.qos, len(payload))
        lines = client.sender_header + (more.lines if more is not None else b"")
        self._publish(request.subject, b"NATS/1.0\r\nNmqtt-Pub:0\r\n%b\r\n" % lines, payload, more)
        if not request.subject.startswith(INBOXES):  # MQTT clients here may subscribe to it as a topic
            route = self._path.table.route_of_subject(request.subject)
            if route is not None and route.local:
                self._path.fanout.group(route.local, message(client, route, payload, 0, False, more))

    def _publish(self, subject: bytes, headers: bytes, payload: bytes, more: Extras | None) -> None:
        reply = more.reply if more is not None else b""
        size = len(headers)
        frame = b"HPUB %b %b%d %d\r\n%b%b\r\n" % (subject, reply, size, size + len(payload), headers, payload)
        self._path.link.out.append(frame)
        self._path.link.kick()

    def released(self, client: Publisher, identifier: int) -> None:
        """Forget an answer at QoS 2 after PUBREL: its packet identifier may be used for another answer."""
        self._sent.pop((client.hash, identifier), None)

    def _confirm(self, one: Unconfirmed) -> None:
        self._unconfirmed.append(one)
        if not self._confirming:
            self._confirming = True
            self._services.tasks.spawn(self._confirm_all(), "answers")

    async def _confirm_all(self) -> None:
        """Acknowledge answers when nats-server has them: one round trip for all waiting answers."""
        try:
            while self._unconfirmed:
                some, self._unconfirmed = self._unconfirmed, []
                link = self._path.link
                try:
                    await link.fence()
                    wire: object = link.wire
                except TimeoutError:
                    wire = None
                for one in some:
                    one.acknowledge_answer(wire is not None and one.wire is wire)
                self._path.round.start()
        finally:
            self._confirming = False

    # -- requests of MQTT clients ---------------------------------------------------------------

    def reply_subject(self, topic: str, correlation: bytes | None, qos: int, owner: str = "") -> bytes:
        """Return the reply subject of a request for NATS clients, with a space after it.

        This is the Response Topic's own subject where the answer needs no correlation data. Some clients send the
        headers of a request back with their answer; at QoS 1 and 2 these would make the answer a copy of a stored
        message, so the answer then comes to a subject of the gateway.

        Args:
            owner: user of the requester, or the address of an anonymous one.

        Raises:
            MqttError: the Response Topic is not for clients.
        """
        encoded = topic.encode()
        route = self._path.table.route(len(encoded).to_bytes(2, "big") + encoded)
        subject = route.origin.encode()
        if correlation is None and not qos and len(subject) <= OWN_MOST:
            return subject + b" "
        size = ENTRY_BYTES + len(route.key) + len(correlation or b"")
        token = self._questions.issue(Question(route.asked, correlation), size, self._services.clock.now, owner)
        return b"%b%b " % (self._prefix, token)

    def addressed(self, more: Extras, record: bytes) -> Extras:
        """Return the properties of a publish from a record, with a reply subject if it has a Response Topic.

        A record without `ANSWER_LINE` gets no reply subject: whether answers are permitted was decided at the publish,
        by the rules of the publisher's connection.

        Args:
            record: the headers of the record.
        """
        properties = _decoded(more.body)
        topic = properties.get("response_topic")
        if topic is None or b"\r\n" + ANSWER_LINE not in record:
            return more
        try:
            return more._replace(reply=self.reply_subject(topic, properties.get("correlation_data"), 2))
        except MqttError:
            return more

    def _answered(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Publish the answer of a NATS client on the Response Topic, with the correlation data of the request."""
        token = subject[len(self._prefix) :]
        question = self._questions.find(token, self._services.clock.now)
        if question is None:
            return
        if is_status(headers):  # no responders
            self._questions.forget(token)
            return
        found, expiry = from_headers(headers)
        properties = _decoded(found)
        if properties.get("response_topic", "").encode() == question.key[2:]:
            del properties["response_topic"]  # a header of the request that the NATS client has sent back
        if question.correlation is not None:
            properties["correlation_data"] = question.correlation
        if expiry >= 0:
            properties["message_expiry_interval"] = expiry
        more = extras(properties)
        lines = more.lines if more is not None else b""
        if HEADERS + len(lines) + len(payload) > self._path.store.max_payload:
            log.warning("an answer from NATS on %r is too large with its correlation data", question.key[2:])
            return
        route = self._path.table.route(question.key)
        self._publish(route.origin.encode(), b"NATS/1.0\r\nNmqtt-Pub:0\r\n%b\r\n" % lines, payload, more)
        if route.local:
            whole = Message(route.key, payload, 0)
            if more is not None:
                whole = Rich(route.key, payload, 0, body=more.body, expiry=more.expiry, born=more.born)
            self._path.fanout.group(route.local, whole)


def _answerable(subject: bytes) -> bool:
    """Whether MQTT clients may answer on a reply subject that a requester has chosen.

    Not on subjects of JetStream, NATS (but for its subjects of replies) or the gateways, and not where the frame would
    be so long that nats-server would end the connection.
    """
    if len(subject) > MAX_SUBJECT_BYTES or b"*" in subject or b">" in subject:
        return False
    if subject[:1] not in (b"$", b"_") or subject.startswith(INBOXES):
        return True
    return subject.partition(b".")[0].decode("utf-8", "replace") not in RESERVED_ROOTS


def _receives(client: Publisher, request: Request) -> bool:
    """Whether a client is subscribed to the topic of a request."""
    filters = client.filters
    if client.path.table.filters.get(request.filter) in filters:
        return True
    if any(matches(found.text, request.topic) for found in filters):
        return True
    return any(member.filter == request.filter for member in (client.shares or {}).values())


def _decoded(body: bytes) -> Properties:
    """Return the properties that stand in a PUBLISH packet as ``body``, without their length."""
    data = put_varint(len(body)) + body
    return read_properties(Reader(data, 0, len(data)), place(PacketKind.PUBLISH), SHOWN_MOST) or {}
