# SPDX-License-Identifier: Apache-2.0
"""A model of everything around :class:`DurableSender`: the stream, its readers, the stored position, an MQTT client.

Everything travels in queues that a test moves on one step at a time, and each queue can be cut off between any two
steps. The client and JetStream keep their state over a crash of the gateway; the gateway keeps nothing. What the
gateway does around the machine is done here in the same order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mqtt_nats.protocol import durable_sender
from mqtt_nats.protocol.durable_sender import SEQUENCE_EVER, DurableSender, packet_id
from mqtt_nats.protocol.inflight import Delivery, SubscriptionState
from mqtt_nats.protocol.overlap import Overlap, subject_matches
from mqtt_nats.protocol.position import Content, SessionPosition, Step

PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP = 3, 4, 5, 6, 7
SHARED = "s"
"""Topic of messages that come by a shared subscription."""


@dataclass(frozen=True)
class Stored:
    """A message of the stream; ``sequence`` counts from 1."""

    sequence: int
    topic: str
    qos: int


@dataclass
class Subscription:
    """A subscription in the session record."""

    pattern: str
    qos: int
    start: int
    end: int | None = None
    """Stream sequence up to which it counts since it was lowered to QoS 0; None = it was not."""
    was: tuple[int, int] = (0, 0)
    """Up to the second, messages may have been sent at the QoS that is first."""

    def has(self, message: Stored) -> bool:
        """Whether its messages include this one."""
        return (
            self.start <= message.sequence
            and (self.end is None or message.sequence <= self.end)
            and subject_matches(self.pattern, message.topic.split("."))
        )


@dataclass(frozen=True)
class Position:
    """The stored position, and what else is written with it."""

    content: Content
    clean: bool = False
    """Whether the connection has ended in order."""
    unsent: frozenset[int] = frozenset()
    most: int = SEQUENCE_EVER
    perhaps: int = 0


@dataclass(frozen=True)
class Record:
    """A PUBREL record in the stream."""

    key: int
    id: int
    sequence: int


@dataclass
class Client:
    """The MQTT client and its application; both survive every crash."""

    late: bool
    """It hands QoS 2 messages on at PUBREL, not at PUBLISH: both are allowed (section 4.3.3)."""
    kept: int = 0
    """Sequence of a message that it does not acknowledge, or whose PUBREL it does not answer; 0 = none."""
    kept_from: int = PUBREC
    """Packet from which it keeps back what it answers: that for PUBLISH, or `PUBCOMP`."""
    kept_packets: list[tuple[int, int]] = field(default_factory=list)
    """What it will answer."""
    holds: dict[int, int] = field(default_factory=dict)
    """QoS 2 identifiers between PUBLISH and PUBREL, with the sequence of their message."""
    in_use: dict[int, int] = field(default_factory=dict)
    """Identifiers that it may know, also from earlier connections, with the sequence of their message."""
    got: dict[int, int] = field(default_factory=dict)
    """How often the application got each sequence."""


class Gateway:
    """The gateway that has the session; a crash leaves nothing of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.machine = DurableSender(world.limit, self)
        self.ledger = SessionPosition()
        self.sources: dict[str, SubscriptionState] = {}
        self.overlap: Overlap[str] = Overlap()
        self.past, self.group = SubscriptionState(0, 0), SubscriptionState(2, 0)
        self.machine.sources.append(self.past)
        self.position = self.perhaps = 0
        self.stalled = self.seeking = self.leaving = False
        self.lacking = False
        """Whether a message has waited because every identifier is in use."""
        self.unsent: frozenset[int] = frozenset()
        self.write: Position | None = None
        """The write under way."""
        self.stored_now = False
        """Whether it is in the stream, while the answer is on its way."""
        self.to_nats: deque[tuple[str, int, int]] = deque()
        """Requests not yet at the server: ("pubrel", id, sequence), ("unassign", record, id) and ("ack", key, 0)."""
        self.answers: deque[tuple[str, int]] = deque()
        """("stored", id) and ("confirmed", id), not yet at the gateway."""

    # -- ports ----------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        assert data[0] == 0x62
        assert len(data) == 4
        self.world.to_client.append((PUBREL, data[2] << 8 | data[3], 0, False, 0))

    def publish(self, delivery: Delivery, dup: bool) -> bool:
        self.world.published(delivery.body, delivery.id, delivery.qos, dup)
        return True

    def ack(self, reply: bytes, identifier: int = 0) -> None:
        kind, number = reply[:1], int(reply[1:])
        if kind in (b"@", b"%"):
            if not self.ledger.complete(reply, identifier):
                self.machine.confirmed(identifier)
        else:
            self.to_nats.append(("unassign", number, identifier) if kind == b"=" else ("ack", number, 0))

    def store_pubrel(self, identifier: int, sequence: int) -> None:
        if self.machine.inflight[identifier].reply.startswith(b"@"):
            self.ledger.receive(identifier, sequence)
        else:
            self.to_nats.append(("pubrel", identifier, sequence))

    def allocate(self, sequence: int, identifier: int) -> None:
        self.ledger.allocate(sequence, identifier)

    def end_allocation(self, sequence: int, identifier: int) -> None:
        self.ledger.end_allocation(sequence, identifier)

    def report_no_identifier(self) -> None:
        self.lacking = True

    def report_waiting(self) -> None:
        pass

    def report_sent(self, source: SubscriptionState) -> None:
        pass

    def seek(self) -> None:
        self.seeking = True

    # -- subscriptions --------------------------------------------------------------------------

    @property
    def may_change(self) -> bool:
        """Whether subscriptions may change: what a dead gateway may have sent has come again, and the client reads."""
        return not self.stalled and self.position >= self.perhaps

    def add(self, name: str) -> None:
        """Add a subscription of the record."""
        one = self.world.subscriptions[name]
        source = SubscriptionState(one.qos, one.start, end=one.end, whole=one.end is not None, was=one.was)
        source.begin_after(max(self.ledger.reached, one.start - 1))
        self.sources[name] = source
        self.machine.sources.append(source)
        self.overlap.add(one.pattern, name, source)

    def settle(self) -> None:
        """Tell all sources how far the reader has come."""
        self.machine.read_to(self.position)
        for source in self.sources.values():
            source.deliver_to(max(self.position, source.start - 1))

    def unmatch(self, name: str) -> None:
        """Take a subscription that has ended out of the overlap and the record."""
        for other in self.overlap.remove(name):
            raised = self.sources[other]
            self.world.subscriptions[other].was = raised.was_qos, raised.until
        del self.world.subscriptions[name]

    def unsubscribe(self, name: str) -> None:
        self.settle()
        self.unmatch(name)
        source = self.sources.pop(name)
        self.machine.drain(source, self._left_to_it)
        self.machine.forget(source)

    def _left_to_it(self, delivery: Delivery) -> bool:
        owner, qos = self.overlap.owner(delivery.body.topic, delivery.sequence)
        if owner is not None:
            delivery.regrant(min(delivery.body.qos, qos))
        return owner is not None

    def lower(self, name: str) -> None:
        self.settle()
        source = self.sources[name]
        self.machine.lower(source, self.world.last, retained=False)
        self.world.subscriptions[name].end = source.end

    def end_lowered(self) -> None:
        """Remove the lowered subscriptions of which nothing is left."""
        for name, source in list(self.sources.items()):
            left = self.machine.holds(source) or self.machine.waits(self.past)
            if source.whole and self.position >= source.end and not left and not self.stalled:
                self.settle()
                self.unmatch(name)
                self.machine.forget(self.sources.pop(name))

    # -- messages -------------------------------------------------------------------------------

    def take(self, message: Stored) -> None:
        """A reader brings the next message of the stream."""
        sequence = self.position = message.sequence
        name, granted = self.overlap.owner(message.topic, sequence)
        if name is None:
            return
        source, qos, token = self.sources[name], min(granted, message.qos), b"@%d" % sequence
        self.ledger.add_pending(sequence, qos)
        if self.machine.sent_at_once(source, sequence, qos, token):
            self.world.published(message, packet_id(sequence), qos, False)
        else:
            self.machine.read_to(sequence)
            self.machine.arrived(source, sequence, 1, token, message, qos)

    def fetch_in_flight(self) -> None:
        """Hand in what is pending and not on its way."""
        known = {one.sequence for one in self.machine.on_their_way()}
        for sequence, qos in sorted(self.ledger.pending.items()):
            message = self.world.stream.get(sequence)
            if sequence in known:
                continue
            if message is None:
                if qos == 2:
                    self.machine.suspect(sequence, sequence)
                self.ledger.done(sequence)
            else:
                self.machine.arrived(self.past, sequence, 2, b"@%d" % sequence, message, qos)

    def share(self, record: int, identifier: int, sequence: int, *, dup: bool) -> None:
        """Send a message that is assigned to this client."""
        message = self.world.stream[sequence]
        self.machine.share(self.group, sequence, identifier, 2, message, b"=%d" % record, dup)

    def look_for_records(self) -> None:
        """See whether those that the machine waits for are there."""
        there = {(record.id, record.sequence) for record in self.world.records}
        for identifier, sequence in self.machine.unrecorded().items() - there:
            self.machine.vanished(identifier, sequence)
        self.seeking = bool(self.machine.unrecorded())

    # -- writes of the position ------------------------------------------------------------------

    def begin_write(self) -> None:
        machine, ledger = self.machine, self.ledger
        if not self.stalled:
            ledger.reach(self.position)
        if self.perhaps and machine.past_all(self.perhaps):
            self.perhaps = 0
        most = SEQUENCE_EVER
        if self.leaving:
            self.unsent = frozenset(machine.unsent())
            most = max(machine.most, ledger.reached)
        self.write = Position(ledger.begin(), self.leaving, self.unsent, most, self.perhaps)
        self.stored_now = False

    def answered(self) -> None:
        """The answer comes that the write is stored."""
        machine = self.machine
        self.write = None
        for step, identifier in self.ledger.stored():
            if step is Step.RELEASE:
                machine.pubrel_stored(identifier)
                machine.keep_identifier(identifier, b"%%%d" % identifier)
            elif step is Step.CONFIRM:
                machine.confirmed(identifier)
            elif step is Step.FREE:
                machine.free_packet_id(identifier)
            elif step is Step.ALLOCATED:
                machine.allocation_stored(identifier)
            else:
                machine.allocation_removed(identifier)

    def write_all(self) -> None:
        """Whatever is to be written is."""
        while self.write is not None or self.ledger.dirty:
            if self.write is None:
                self.begin_write()
            self.world.store(self)
            self.answered()

    def flush(self) -> None:
        """Write the present position."""
        self.ledger.change()
        self.write_all()


class World:
    """JetStream, the network and the client."""

    def __init__(self, *, late: bool, limit: int) -> None:
        self.limit = limit
        self.client = Client(late)
        self.stream_all: dict[int, Stored] = {}
        self.stream: dict[int, Stored] = {}
        """What has not expired."""
        self.last = 0
        self.subscriptions: dict[str, Subscription] = {}
        self.lowered: list[Subscription] = []
        """Subscriptions that were lowered to QoS 0, also when they are not in the record any more."""
        self.position = Position(Content(0, {}, {}, {}), clean=True, most=0)
        self.records: list[Record] = []
        self.record_wire: deque[Record] = deque()
        self.assignments: dict[int, tuple[int, int]] = {}
        """Packet identifier and sequence of each message of the group that is this client's."""
        self.count = 0
        """Number of records and assignments so far."""
        self.to_client: deque[tuple[int, int, int, bool, int]] = deque()
        """(kind, packet id, QoS, DUP, sequence)."""
        self.to_gateway: deque[tuple[int, int]] = deque()
        self.sent: dict[int, int] = {}
        """How often each sequence was sent in a PUBLISH."""
        self.sent_qos: dict[int, int] = {}
        """At which QoS each was sent first."""
        self.perhaps_sent: set[int] = set()
        """Sequences that a gateway that has died may have sent."""
        self.finished: set[int] = set()
        """Sequences whose last acknowledgement this connection of the client has had."""

    def expected(self, message: Stored) -> bool:
        """Whether the application must get a message that has not expired."""
        wanted = any(one.has(message) for one in (*self.subscriptions.values(), *self.lowered))
        return wanted or self.sent.get(message.sequence, 0) > 0

    # -- the client -----------------------------------------------------------------------------

    def published(self, message: Stored, identifier: int, qos: int, dup: bool) -> None:
        """The gateway sends a PUBLISH."""
        sequence = message.sequence
        assert sequence not in self.finished, f"{sequence} is sent again, and the client has acknowledged it"
        known = self.client.in_use.get(identifier, sequence)
        assert known == sequence or known not in self.stream, f"{identifier} of {sequence} is that of {known}"
        if sequence in self.sent:
            assert dup, f"{sequence} is sent again without DUP"
            assert self.sent_qos[sequence] <= qos, f"{sequence} is sent again at a lower QoS"
        else:
            assert not dup or sequence in self.perhaps_sent, f"{sequence} has DUP, and was never sent"
            last = max((one for one in self.sent if self.stream_all[one].topic == message.topic), default=0)
            assert message.topic == SHARED or sequence > last, f"{sequence} comes after {last}"
        self.sent[sequence] = self.sent.get(sequence, 0) + 1
        self.sent_qos.setdefault(sequence, qos)
        self.client.in_use[identifier] = sequence
        self.to_client.append((PUBLISH, identifier, qos, dup, sequence))

    def recall(self, gateway: Gateway, unread: int) -> None:
        """The client does not read: of what is on its way to it, all but so much has not left the gateway."""
        left = list(self.to_client)
        self.to_client = deque(left[:unread])
        for packet in left[unread:]:
            kind, identifier, _, _, sequence = packet
            if kind != PUBLISH or not gateway.machine.recall(identifier):
                self.to_client.append(packet)
                continue
            self.sent[sequence] -= 1
            if not self.sent[sequence]:
                del self.sent[sequence], self.sent_qos[sequence], self.client.in_use[identifier]

    def disconnected(self) -> None:
        """The client's connection has ended, and with it what was on its way."""
        self.to_client.clear()
        self.to_gateway.clear()
        self.finished.clear()
        self.client.kept_packets.clear()

    def client_reads(self) -> None:
        """The client takes one packet and answers it."""
        kind, identifier, qos, _, sequence = self.to_client.popleft()
        client = self.client
        if kind == PUBREL:
            held = client.holds.pop(identifier, 0)
            if held and client.late:
                self._application(held)
            self._answers(PUBCOMP, identifier)
        elif qos == 1:
            self._application(sequence)
            self._answers(PUBACK, identifier)
        else:
            if identifier not in client.holds:
                client.holds[identifier] = sequence
                if not client.late:
                    self._application(sequence)
            else:
                assert client.holds[identifier] == sequence, f"{sequence} is taken for a repetition and lost"
            self._answers(PUBREC, identifier)

    def _answers(self, kind: int, identifier: int) -> None:
        client = self.client
        keeps = client.kept and client.in_use.get(identifier) == client.kept
        keeps = keeps and (kind == PUBCOMP or kind <= client.kept_from)
        (client.kept_packets if keeps else self.to_gateway).append((kind, identifier))

    def keep(self, sequence: int, kind: int) -> None:
        """The client answers everything but one message, from its packet of ``kind`` on."""
        self.let_go()
        self.client.kept, self.client.kept_from = sequence, kind

    def let_go(self) -> None:
        """The client answers the message that it has kept."""
        self.to_gateway.extend(self.client.kept_packets)
        self.client.kept_packets.clear()
        self.client.kept = 0

    def _application(self, sequence: int) -> None:
        self.client.got[sequence] = self.client.got.get(sequence, 0) + 1
        if self.sent_qos[sequence] == 2:
            assert self.client.got[sequence] == 1, f"{sequence} came twice at QoS 2"

    def gateway_reads(self, gateway: Gateway) -> None:
        """The gateway takes one packet of the client."""
        kind, identifier = self.to_gateway.popleft()
        if kind in (PUBACK, PUBCOMP):
            self.finished.add(self.client.in_use.pop(identifier, 0))
        gateway.machine.acknowledged(kind, [identifier])

    # -- JetStream ------------------------------------------------------------------------------

    def publish(self, topic: str, qos: int) -> Stored:
        """Somebody publishes."""
        self.last += 1
        message = self.stream_all[self.last] = self.stream[self.last] = Stored(self.last, topic, qos)
        return message

    def following(self, position: int) -> Stored | None:
        """Return the next message of the stream."""
        sequence = min((one for one in self.stream if one > position), default=0)
        return self.stream[sequence] if sequence else None

    def store(self, gateway: Gateway) -> None:
        """The write under way reaches the server; the new owner's first write comes after it, or refuses it."""
        if gateway.write is not None and not gateway.stored_now:
            self.position = gateway.write
            gateway.stored_now = True

    def attach_records(self) -> None:
        """The consumer of PUBREL records gets a new deliver subject."""
        self.record_wire.clear()
        self.record_wire.extend(self.records)

    def serve(self, gateway: Gateway) -> None:
        """The server takes one request of the gateway."""
        match gateway.to_nats.popleft():
            case "ack", key, _:
                self.records = [record for record in self.records if record.key != key]
            case "unassign", record, identifier:
                self.assignments.pop(record, None)
                if identifier:
                    gateway.answers.append(("confirmed", identifier))
            case _, identifier, sequence:
                self.record_wire.append(self._record(identifier, sequence))
                gateway.answers.append(("stored", identifier))

    def serve_late(self, former: Gateway) -> None:
        """Records and their acknowledgements are all that still comes from a gateway that has lost the session."""
        for kind, number, sequence in former.to_nats:
            if kind == "pubrel":
                self._record(number, sequence)
            elif kind == "ack":
                self.records = [record for record in self.records if record.key != number]

    def _record(self, identifier: int, sequence: int) -> Record:
        self.count += 1
        record = Record(self.count, identifier, sequence)
        self.records.append(record)
        return record

    def answer(self, gateway: Gateway) -> None:
        """The gateway takes one answer of the server."""
        kind, identifier = gateway.answers.popleft()
        (gateway.machine.pubrel_stored if kind == "stored" else gateway.machine.confirmed)(identifier)

    def record_arrives(self, gateway: Gateway) -> None:
        """The gateway takes one PUBREL record from its consumer."""
        record = self.record_wire.popleft()
        gateway.machine.pubrel_delivered(record.id, record.sequence, b"&%d" % record.key)

    def assign(self, gateway: Gateway) -> None:
        """The gateway gets a message of the group, and stores that it is this client's."""
        sequence = self.publish(SHARED, 2).sequence
        self.count += 1
        identifier = gateway.machine.allocate_packet_id(sequence)
        self.assignments[self.count] = identifier, sequence
        gateway.share(self.count, identifier, sequence, dup=False)

    # -- a resume -------------------------------------------------------------------------------

    def resume(self, former: Gateway | None = None, dies: int = 0) -> Gateway | None:
        """A gateway takes the session.

        Args:
            former: it still stores its last records, after this one has read them.
            dies: the step after which the gateway is no more; 0 = it lives.
        """
        gateway, position = Gateway(self), self.position
        machine, ledger = gateway.machine, gateway.ledger
        for record in self.records:
            machine.owe(record.id, record.sequence)
        if former is not None:
            self.serve_late(former)
        self.attach_records()
        content = position.content
        ledger.restore(content.reached, dict(content.pending), dict(content.released), dict(content.identifiers))
        gateway.position = content.reached
        gateway.perhaps = position.perhaps if position.clean else self.last
        if not position.clean:
            self.perhaps_sent |= content.pending.keys() | set(range(content.reached + 1, self.last + 1))
        if dies == 1:
            return None
        gateway.flush()
        if dies == 2:
            return None
        machine.restore_identifiers(content.identifiers)
        for identifier, sequence in content.released.items():
            machine.owe(identifier, sequence)
            machine.keep_identifier(identifier, b"%%%d" % identifier)
        if position.clean:
            machine.not_sent(position.unsent)
            machine.sent_at_most(position.most)
        machine.sent_perhaps(gateway.perhaps)
        perhaps = range(content.reached + 1, gateway.perhaps + 1)
        # In a longer range, a message that comes again would be asked about because of another one with its identifier.
        if len(perhaps) <= durable_sender.ID_SPACE and any(one not in self.stream for one in perhaps):
            machine.suspect(content.reached + 1, gateway.perhaps)
        while self.record_wire and former is not None:
            self.record_arrives(gateway)
        for name in self.subscriptions:
            gateway.add(name)
        machine.read_to(content.reached)
        gateway.fetch_in_flight()
        self._resend_assigned(gateway)
        machine.start()
        return gateway

    def _resend_assigned(self, gateway: Gateway) -> None:
        for record, (identifier, sequence) in self.assignments.items():
            gateway.machine.answered(identifier, sequence)
            release = gateway.machine.releases.get(identifier)
            if release is not None and release.sequence == sequence:
                release.await_one_more()
                gateway.ack(b"=%d" % record, identifier)
            else:
                gateway.share(record, identifier, sequence, dup=True)
                self.perhaps_sent.add(sequence)
