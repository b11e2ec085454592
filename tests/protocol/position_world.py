# SPDX-License-Identifier: Apache-2.0
"""A world around a session's position: JetStream's consumer and stored position, the client, a gateway that may crash.

The model has one subscription that matches everything. What the broker does around the machines is done here in the
same order.
"""

from __future__ import annotations

from collections import deque

from mqtt_nats.protocol.durable_sender import DurableSender, packet_id
from mqtt_nats.protocol.inflight import Delivery, SubscriptionState
from mqtt_nats.protocol.position import Content, SessionPosition, Step

EVER = 1 << 62


class Consumer:
    """A durable push consumer."""

    def __init__(self) -> None:
        self.position = 0
        self.pending: dict[int, int] = {}
        self.again: list[int] = []
        """What is sent once more, since it is attached anew."""

    def set(self, start: int) -> None:
        self.position, self.pending, self.again = start - 1, {}, []

    def attach(self) -> None:
        self.again = sorted(self.pending)


class Stored:
    """What is stored of a session's position, with the number of the write."""

    def __init__(self) -> None:
        self.number = 0
        self.content = Content(0, {}, {}, {})
        self.live = False
        self.clean = False
        self.perhaps = 0
        """Last sequence that a gateway that has died may have sent, also after a resume that did not end."""


class Gateway:
    """The gateway that has the session; a crash leaves nothing of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.machine = DurableSender(world.limit, self)
        self.ledger = SessionPosition()
        self.source = SubscriptionState(2, 1, 100)
        self.source.expected = 0
        self.machine.sources.append(self.source)
        self.taking = False
        self.live = False
        self.joining: int | None = None
        self.kept: list[int] = []
        self.reader = 0
        self.expected = 0
        self.leaving = False
        self.write: tuple[Content, bool, bool] | None = None
        self.stored_now = False
        self.records: deque[tuple[int, int]] = deque()

    def send(self, data: bytes) -> None:
        self.world.to_client.append(("pubrel", data[2] << 8 | data[3], 0, 0, False))

    def publish(self, delivery: Delivery, dup: bool) -> bool:
        self.world.to_client.append(("publish", delivery.id, delivery.sequence, delivery.qos, dup))
        return True

    def ack(self, reply: bytes, identifier: int = 0) -> None:
        kind, number = reply[:1], int(reply[1:])
        if kind in (b"@", b"%"):
            if not self.ledger.complete(reply, identifier):
                self.machine.confirmed(identifier)
            return
        known = self.world.records if kind == b"&" else self.world.consumer.pending
        known.pop(number, None)
        if identifier:
            self.records.append((identifier, -1))

    def store_pubrel(self, identifier: int, sequence: int) -> None:
        if self.machine.inflight[identifier].reply.startswith(b"@"):
            self.ledger.receive(identifier, sequence)
        else:
            self.records.append((identifier, sequence))

    def allocate(self, sequence: int, identifier: int) -> None:
        self.ledger.allocate(sequence, identifier)

    def end_allocation(self, sequence: int, identifier: int) -> None:
        self.ledger.end_allocation(sequence, identifier)

    def report_no_identifier(self) -> None:
        raise AssertionError("there are many identifiers")

    def request_state(self, source: SubscriptionState, sequence: int) -> None:
        raise AssertionError("one source needs no look")

    def report_waiting(self) -> None:
        pass

    def report_sent(self, source: SubscriptionState) -> None:
        pass

    def seek(self) -> None:
        """Records stay until they have been delivered."""

    def take(self, sequence: int) -> None:
        qos = self.world.stream[sequence]
        self.machine.reached = sequence
        mark = b"@%d" % sequence
        self.ledger.add_pending(sequence, qos)
        if self.machine.sent_at_once(self.source, sequence, qos, mark):
            self.world.to_client.append(("publish", packet_id(sequence), sequence, qos, False))
        else:
            self.machine.arrived(self.source, sequence, 1, mark, sequence, qos)

    def begin(self) -> None:
        if self.taking:
            self.ledger.reached = max(self.ledger.reached, self.reader)
        self.write = self.ledger.begin(), self.live, self.leaving

    def answered(self) -> None:
        for step, identifier in self.ledger.stored():
            if step is Step.RELEASE:
                self.machine.pubrel_stored(identifier)
                self.machine.keep_identifier(identifier, b"%%%d" % identifier)
            elif step is Step.CONFIRM:
                self.machine.confirmed(identifier)
            elif step is Step.FREE:
                self.machine.free_packet_id(identifier)
            elif step is Step.ALLOCATED:
                self.machine.allocation_stored(identifier)
            else:
                self.machine.allocation_removed(identifier)


class World:
    """JetStream, the network and the client."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.stream: dict[int, int] = {}
        self.last = 0
        self.consumer = Consumer()
        self.stored = Stored()
        self.records: dict[int, int] = {}
        """PUBREL records: sequence by packet identifier."""
        self.to_client: deque[tuple[str, int, int, int, bool]] = deque()
        self.to_gateway: deque[tuple[int, int]] = deque()
        self.held: dict[int, int] = {}
        """QoS 2 messages that the client has not been told to forget."""
        self.got: list[int] = []
        self.sent: set[int] = set()
        self.gateway: Gateway | None = None

    def after(self, sequence: int) -> list[int]:
        return [one for one in self.stream if one > sequence]

    # -- the client -----------------------------------------------------------------------------

    def client(self) -> None:
        kind, identifier, sequence, qos, dup = self.to_client.popleft()
        if kind == "pubrel":
            self.held.pop(identifier, None)
            self.to_gateway.append((7, identifier))
            return
        if not dup:
            assert sequence not in self.sent, f"{sequence} is sent again without DUP"
        self.sent.add(sequence)
        if qos == 1:
            self.got.append(sequence)
            self.to_gateway.append((4, identifier))
            return
        if identifier in self.held:
            assert self.held[identifier] == sequence, f"identifier {identifier} of {sequence} is in use"
        else:
            self.held[identifier] = sequence
            self.got.append(sequence)
        self.to_gateway.append((5, identifier))

    # -- a resume -------------------------------------------------------------------------------

    def crash(self, *, stored: bool) -> None:
        gateway = self.gateway
        if gateway is not None and stored and gateway.write is not None and not gateway.stored_now:
            self.store(gateway)
        self.to_client.clear()
        self.to_gateway.clear()
        self.gateway = None

    def store(self, gateway: Gateway) -> None:
        assert gateway.write is not None
        if gateway.expected == self.stored.number:
            self.stored.number += 1
            self.stored.content, self.stored.live, self.stored.clean = gateway.write
            gateway.expected = self.stored.number
        gateway.stored_now = True

    def resume(self, *, dies: int = 0) -> None:
        """With ``dies`` the gateway gets no further than this step."""
        gateway = self.gateway = Gateway(self)
        machine, ledger, source = gateway.machine, gateway.ledger, gateway.source
        for identifier, sequence in self.records.items():
            machine.owe(identifier, sequence)
        position = self.stored
        content = position.content
        was_live, clean = position.live, position.clean
        if was_live:
            self.consumer.set(content.reached + 1)
        if dies == 1:
            return self.crash(stored=False)
        gateway.expected = position.number
        ledger.reached = content.reached
        ledger.pending, ledger.released = dict(content.pending), dict(content.released)
        ledger.identifiers = dict(content.identifiers)
        gateway.begin()
        self.store(gateway)
        gateway.write, gateway.stored_now = None, False
        ledger.stored()
        if was_live:
            position.perhaps = 0 if clean else self.last
        if dies == 2:
            return self.crash(stored=False)
        machine.restore_identifiers(ledger.identifiers)
        for identifier, sequence in ledger.released.items():
            machine.owe(identifier, sequence)
            machine.keep_identifier(identifier, b"%%%d" % identifier)
        for identifier, sequence in self.records.items():
            machine.pubrel_delivered(identifier, sequence, b"&%d" % identifier)
        machine.sent_perhaps(position.perhaps)
        if was_live:
            source.last = source.first = content.reached
        else:
            source.last = source.first = self.consumer.position
        self.consumer.attach()
        source.expected = len(self.consumer.again)
        while self.consumer.again:
            self.bring_again()
        past = SubscriptionState(0, 0, 100)
        past.live, past.clear, past.expected = True, EVER, 0
        machine.sources.append(past)
        for sequence, qos in sorted(ledger.pending.items()):
            machine.arrived(past, sequence, 2, b"@%d" % sequence, sequence, qos)
        machine.start()
        return None

    def bring_again(self) -> None:
        gateway = self.gateway
        assert gateway is not None
        sequence = self.consumer.again.pop(0)
        if sequence in self.consumer.pending:
            self.consumer.pending[sequence] += 1
            attempt = self.consumer.pending[sequence]
            gateway.machine.arrived(
                gateway.source, sequence, attempt, b"$%d" % sequence, sequence, self.stream[sequence]
            )
