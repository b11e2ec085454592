# SPDX-License-Identifier: Apache-2.0
"""A model of everything around :class:`DurableSender`: JetStream, the network, and an MQTT client.

Everything travels in queues that a test moves on one step at a time, and each queue can be cut off between
any two steps. The client and JetStream keep their state over a crash of the gateway; the gateway keeps nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mqtt_nats.protocol.durable_sender import DurableSender, packet_id
from mqtt_nats.protocol.inflight import Delivery, SubscriptionState
from mqtt_nats.protocol.overlap import Overlap

PUBACK, PUBREC, PUBREL, PUBCOMP = 4, 5, 6, 7


@dataclass(frozen=True)
class Stored:
    """A message of the stream; ``sequence`` counts from 1."""

    sequence: int
    topic: str
    qos: int


@dataclass
class Consumer:
    """A durable push consumer with explicit acknowledgement."""

    name: str
    pattern: str
    qos: int
    start: int
    window: int
    end: int | None = None
    """Stream sequence of its end; None = it is not draining."""
    position: int = -1
    """Highest stream sequence delivered; at first the one before `start`, as nats-server has it."""
    was: tuple[int, int] = (0, 0)
    """Up to the second, messages may have been sent at the QoS that is first."""
    pending: dict[int, int] = field(default_factory=dict)
    """Delivered and not acknowledged: sequence to delivery count."""
    wire: deque[tuple[int, int]] = field(default_factory=deque)
    """(sequence, delivery count) on their way to the gateway."""
    states: list[tuple[int, dict[int, int]]] = field(default_factory=list)
    """Earlier ones, position and what was pending, which a follower may have when the leader dies."""

    def __post_init__(self) -> None:
        self.position = max(self.position, self.start - 1)

    def changes(self) -> None:
        """Something is about to change: followers hear of it later."""
        self.states.append((self.position, dict(self.pending)))


@dataclass
class Record:
    """A PUBREL record in the stream."""

    key: int
    id: int
    sequence: int


class Gateway:
    """The gateway's part between JetStream and the machine; dies with the gateway."""

    def __init__(self, world: World, limit: int) -> None:
        self.world = world
        self.machine = DurableSender(limit, self)
        self.machine.on_drained_message = self._on_drained_message
        self.sources: dict[str, SubscriptionState] = {}
        self.overlap: Overlap[str] = Overlap()
        self.lacking = False
        """A message has waited for an identifier."""
        self.seeking = False
        """The machine waits for records that are not delivered."""
        self.to_nats: deque[tuple[str, object]] = deque()
        """("ack", reply), ("confirm", (reply, id)) and ("pubrel", (id, sequence)), not yet at the server."""
        self.answers: deque[tuple[str, object]] = deque()
        """("stored", id), ("confirmed", id) and ("looked", (name, sequence, last, left, pending)), not yet at the
        gateway."""

    # -- ports ----------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        assert data[0] == 0x62
        assert len(data) == 4
        self.world.to_client.append((PUBREL, data[2] << 8 | data[3], 0, False, 0))

    def publish(self, delivery: Delivery, dup: bool) -> bool:
        self.write(delivery.body, delivery.id, delivery.qos, dup)
        return True

    def ack(self, reply: bytes, identifier: int = 0) -> None:
        assert reply
        self.to_nats.append(("confirm", (reply, identifier)) if identifier else ("ack", reply))

    def store_pubrel(self, identifier: int, sequence: int) -> None:
        self.to_nats.append(("pubrel", (identifier, sequence)))

    def allocate(self, sequence: int, identifier: int) -> None:
        self.to_nats.append(("allocate", (sequence, identifier)))

    def end_allocation(self, sequence: int, identifier: int) -> None:
        self.to_nats.append(("end allocation", (sequence, identifier)))

    def report_no_identifier(self) -> None:
        self.lacking = True

    def request_state(self, source: SubscriptionState, sequence: int) -> None:
        name = next(name for name, each in self.sources.items() if each is source)
        self.to_nats.append(("look", (name, sequence)))

    def report_waiting(self) -> None:
        pass

    def report_sent(self, source: SubscriptionState) -> None:
        pass

    def seek(self) -> None:
        self.seeking = True

    # -- what the broker does around the machine --------------------------------------------------

    def look_for_records(self) -> None:
        """See whether those that the machine waits for are there."""
        self.seeking = False
        there = {(record.id, record.sequence) for record in self.world.records}
        for identifier, sequence in self.machine.unrecorded().items() - there:
            self.machine.vanished(identifier, sequence)
        self.seeking = bool(self.machine.unrecorded())

    def write(self, message: Stored, identifier: int, qos: int, dup: bool) -> None:
        self.world.published(message, identifier, qos, dup)

    def add(self, consumer: Consumer) -> None:
        source = SubscriptionState(consumer.qos, consumer.start, consumer.window, consumer.end)
        source.was_qos, source.until = consumer.was
        self.sources[consumer.name] = source
        self.machine.sources.append(source)
        if consumer.end is None:
            self.overlap.add(consumer.pattern, consumer.name, source)

    def arrived(self, consumer: Consumer, sequence: int, attempt: int) -> None:
        machine = self.machine
        source = self.sources.get(consumer.name)
        if source is None:
            return
        message = self.world.stream_all[sequence]
        reply = f"{consumer.name} {sequence} {attempt}".encode()
        if source.ended:
            owner, granted = None, source.granted(sequence)
            wanted = sequence <= source.end and attempt > 1
        else:
            owner, granted = self.overlap.owner(message.topic, sequence)
            wanted = owner == consumer.name
        if not wanted:
            machine.passed_over(source, sequence, attempt, reply)
            return
        qos = min(granted, message.qos)
        if attempt == 1 and machine.sent_at_once(source, sequence, qos, reply):
            self.write(message, packet_id(sequence), qos, False)
        else:
            machine.arrived(source, sequence, attempt, reply, message, qos)

    def _on_drained_message(self, delivery: Delivery) -> None:
        for name, source in list(self.sources.items()):
            if source is delivery.source and source.ended and not self.machine.holds(source):
                self.delete(name)

    def delete(self, name: str) -> None:
        self.machine.sources.remove(self.sources.pop(name))
        self.to_nats.append(("delete", name))
        self.machine.pump()


class World:
    """JetStream, the network and the client."""

    def __init__(self, *, late: bool) -> None:
        self.late = late
        """The client hands QoS 2 messages on at PUBREL, not at PUBLISH: both are allowed (section 4.3.3)."""
        self.stream_all: dict[int, Stored] = {}
        self.stream: dict[int, Stored] = {}
        """What has not expired."""
        self.last = 0
        self.consumers: dict[str, Consumer] = {}
        self.records: list[Record] = []
        self.record_wire: deque[Record] = deque()
        self.record_count = 0
        self.identifiers: dict[int, int] = {}
        """Those that are allocated, by sequence, in the session's position."""
        self.kept = 0
        """Sequence of a message that the client does not acknowledge, or whose PUBREL it does not answer; 0 = none."""
        self.kept_from = PUBREC
        """Its packet from which the client keeps back what it answers: that for PUBLISH, or `PUBCOMP`."""
        self.kept_packets: list[tuple[int, int]] = []
        """What it will answer."""
        self.to_client: deque[tuple[int, int, int, bool, int]] = deque()
        """(kind, packet id, QoS, DUP, sequence); kind 3 = PUBLISH."""
        self.to_gateway: deque[tuple[int, int]] = deque()
        self.client_holds: dict[int, int] = {}
        """QoS 2 identifiers between PUBLISH and PUBREL, with the sequence of their message."""
        self.got: dict[int, int] = {}
        """How often the application got each sequence."""
        self.sent: dict[int, int] = {}
        """How often each sequence was sent in a PUBLISH."""
        self.first_sent: dict[str, int] = {}
        """Per topic, the highest sequence sent for the first time."""
        self.in_use: dict[int, int] = {}
        """Identifiers that the client may know, also from earlier connections, with the sequence of their message."""
        self.finished: set[int] = set()
        """Sequences whose last acknowledgement this connection of the client has had."""
        self.sent_qos: dict[int, int] = {}
        """At which QoS each was sent first."""
        self.ended: dict[str, int] = {}
        """Subscriptions that have ended, with the last sequence that they delivered."""

    def expected(self, message: Stored) -> bool:
        """Whether the application must get a message that has not expired."""
        matching = [
            consumer.name
            for consumer in self.consumers.values()
            if consumer.end is None and message.sequence >= consumer.start and _matches(consumer.pattern, message.topic)
        ]
        return bool(matching) or self.sent.get(message.sequence, 0) > 0

    # -- the client -----------------------------------------------------------------------------

    def published(self, message: Stored, identifier: int, qos: int, dup: bool) -> None:
        """The gateway sends a PUBLISH."""
        sequence = message.sequence
        assert sequence not in self.finished, f"{sequence} is sent again, and the client has acknowledged it"
        assert self.in_use.get(identifier, sequence) == sequence, (
            f"identifier {identifier} of {sequence} is in use for {self.in_use[identifier]}"
        )
        if sequence in self.sent:
            assert dup, f"{sequence} is sent again without DUP"
            assert self.sent_qos[sequence] <= qos, f"{sequence} is sent again at a lower QoS"
        else:
            assert sequence > self.first_sent.get(message.topic, 0), f"{sequence} is out of order"
            self.first_sent[message.topic] = sequence
        self.sent[sequence] = self.sent.get(sequence, 0) + 1
        self.sent_qos.setdefault(sequence, qos)
        self.in_use[identifier] = sequence
        self.to_client.append((3, identifier, qos, dup, sequence))

    def recall(self, gateway: Gateway, unread: int) -> None:
        """The client does not read: of what is on its way to it, all but so much has not left the gateway."""
        left = list(self.to_client)
        self.to_client = deque(left[:unread])
        for packet in left[unread:]:
            kind, identifier, _, _, sequence = packet
            if kind != 3 or not gateway.machine.recall(identifier):
                self.to_client.append(packet)
                continue
            self.sent[sequence] -= 1
            if not self.sent[sequence]:
                del self.sent[sequence], self.sent_qos[sequence], self.in_use[identifier]
        self.first_sent = {}
        for sequence in self.sent:
            topic = self.stream_all[sequence].topic
            self.first_sent[topic] = max(sequence, self.first_sent.get(topic, 0))

    def disconnected(self) -> None:
        """The client's connection has ended, and with it what was on its way."""
        self.to_client.clear()
        self.to_gateway.clear()
        self.finished.clear()
        self.kept_packets.clear()

    def client_reads(self) -> None:
        """The client takes one packet and answers it."""
        kind, identifier, qos, _, sequence = self.to_client.popleft()
        if kind == PUBREL:
            held = self.client_holds.pop(identifier, 0)
            if held and self.late:
                self._application(held)
            self._answers(PUBCOMP, identifier)
        elif qos == 1:
            self._application(sequence)
            self._answers(PUBACK, identifier)
        else:
            if identifier not in self.client_holds:
                self.client_holds[identifier] = sequence
                if not self.late:
                    self._application(sequence)
            else:
                assert self.client_holds[identifier] == sequence, f"{sequence} is taken for a repetition and lost"
            self._answers(PUBREC, identifier)

    def _answers(self, kind: int, identifier: int) -> None:
        keeps = self.kept and self.in_use.get(identifier) == self.kept and (kind == PUBCOMP or kind <= self.kept_from)
        (self.kept_packets if keeps else self.to_gateway).append((kind, identifier))

    def keep(self, sequence: int, kind: int) -> None:
        """The client answers everything but one message, from its packet of ``kind`` on."""
        self.let_go()
        self.kept, self.kept_from = sequence, kind

    def let_go(self) -> None:
        """The client answers the message that it has kept."""
        self.to_gateway.extend(self.kept_packets)
        self.kept_packets.clear()
        self.kept = 0

    def _application(self, sequence: int) -> None:
        self.got[sequence] = self.got.get(sequence, 0) + 1
        if self.sent_qos[sequence] == 2:
            assert self.got[sequence] == 1, f"{sequence} came twice at QoS 2"

    def gateway_reads(self, gateway: Gateway) -> None:
        """The gateway takes one packet of the client."""
        kind, identifier = self.to_gateway.popleft()
        if kind in (PUBACK, PUBCOMP):
            self.finished.add(self.in_use.pop(identifier, 0))
        gateway.machine.acknowledged(kind, [identifier])

    # -- JetStream ------------------------------------------------------------------------------

    def store(self, topic: str, qos: int) -> None:
        """Somebody publishes."""
        self.last += 1
        message = Stored(self.last, topic, qos)
        self.stream_all[self.last] = self.stream[self.last] = message

    def _matching(self, consumer: Consumer) -> list[int]:
        return [
            sequence
            for sequence, message in self.stream.items()
            if sequence > consumer.position and _matches(consumer.pattern, message.topic)
        ]

    def deliver(self, consumer: Consumer) -> bool:
        """The server sends one new message to the gateway, if the window allows; False when it cannot."""
        matching = self._matching(consumer)
        if not matching or len(consumer.pending) >= consumer.window:
            return False
        consumer.changes()
        consumer.position = matching[0]
        consumer.pending[matching[0]] = 1
        consumer.wire.append((matching[0], 1))
        return True

    def redeliver(self, consumer: Consumer, sequence: int) -> None:
        """ack_wait has passed for one message."""
        consumer.pending[sequence] += 1
        consumer.wire.append((sequence, consumer.pending[sequence]))

    def attach(self, consumer: Consumer, source: SubscriptionState, *, opened: bool) -> None:
        """A new deliver subject: everything pending comes again, before anything new."""
        consumer.wire.clear()
        source.attaching()
        source.attached(len(consumer.pending), 0, late=False)
        if not opened:
            source.last = max(source.last, consumer.position)
        for sequence in sorted(consumer.pending):
            self.redeliver(consumer, sequence)

    def elect(self, consumer: Consumer, source: SubscriptionState, back: int) -> None:
        """The leader dies; the next one knows the consumer as it was ``back`` changes ago."""
        consumer.position, pending = consumer.states[-back]
        consumer.pending = dict(pending)
        del consumer.states[-back:]
        self.attach(consumer, source, opened=True)

    def serve_late(self, gateway: Gateway) -> None:
        """Records and their acknowledgements are all that still comes from a gateway."""
        for kind, argument in gateway.to_nats:
            match kind, argument:
                case "ack", bytes() as reply if reply.startswith(b"record "):
                    self._ack(reply)
                case "pubrel", (int() as identifier, int() as sequence):
                    self._record(identifier, sequence)

    def attach_records(self) -> None:
        """The consumer of PUBREL records gets a new deliver subject."""
        self.record_wire.clear()
        self.record_wire.extend(self.records)

    def serve(self, gateway: Gateway) -> None:
        """The server takes one command of the gateway."""
        kind, argument = gateway.to_nats.popleft()
        match kind, argument:
            case "ack", bytes() as reply:
                self._ack(reply)
            case "confirm", (bytes() as reply, int() as identifier):
                self._ack(reply)
                for consumer in self.consumers.values():  # followers have it, and all before
                    consumer.states.clear()
                gateway.answers.append(("confirmed", identifier))
            case "pubrel", (int() as identifier, int() as sequence):
                self.record_wire.append(self._record(identifier, sequence))
                gateway.answers.append(("stored", identifier))
            case "delete", str() as name:
                del self.consumers[name]
            case "allocate", (int() as sequence, int() as identifier):
                self.identifiers[sequence] = identifier
                gateway.answers.append(("allocated", identifier))
            case "end allocation", (int() as sequence, int() as identifier):
                self.identifiers.pop(sequence, None)
                gateway.answers.append(("removed", identifier))
            case "look", (str() as name, int() as sequence):
                consumer = self.consumers[name]
                left = len(self._matching(consumer))
                # A leader may have passed over messages that do not match.
                last = consumer.position if left else max(self.stream, default=consumer.position)
                state = (name, sequence, last, left, len(consumer.pending))
                gateway.answers.append(("looked", state))
            case _:
                raise AssertionError(kind)

    def _record(self, identifier: int, sequence: int) -> Record:
        self.record_count += 1
        record = Record(self.record_count, identifier, sequence)
        self.records.append(record)
        return record

    def _ack(self, reply: bytes) -> None:
        name, number, _ = reply.decode().split(" ")
        if name == "record":
            self.records = [record for record in self.records if record.key != int(number)]
            return
        consumer = self.consumers.get(name)
        if consumer is not None:
            consumer.changes()
            consumer.pending.pop(int(number), None)

    def answer(self, gateway: Gateway) -> None:
        """The gateway takes one answer of the server."""
        match gateway.answers.popleft():
            case "stored", int() as identifier:
                gateway.machine.pubrel_stored(identifier)
            case "allocated", int() as identifier:
                gateway.machine.allocation_stored(identifier)
            case "removed", int() as identifier:
                gateway.machine.allocation_removed(identifier)
            case "confirmed", int() as identifier:
                gateway.machine.confirmed(identifier)
            case "looked", (str() as name, int() as sequence, int() as last, int() as left, int() as pending):
                source = gateway.sources.get(name)
                if source is not None and not gateway.machine.looked(source, sequence, last, left, pending):
                    gateway.machine.look_again(source)
            case other:
                raise AssertionError(other)

    def record_arrives(self, gateway: Gateway) -> None:
        """The gateway takes one PUBREL record from its consumer."""
        record = self.record_wire.popleft()
        gateway.machine.pubrel_delivered(record.id, record.sequence, b"record %d 1" % record.key)

    def expire(self, sequence: int) -> None:
        """The stream's retention removes a message."""
        del self.stream[sequence]


def _matches(pattern: str, topic: str) -> bool:
    return topic == pattern or (pattern.endswith(".>") and topic.startswith(pattern[:-1]))
