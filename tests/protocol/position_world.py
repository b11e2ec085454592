# SPDX-License-Identifier: Apache-2.0
"""A world around a session's position: the stream, the stored position, the client, a gateway that may crash.

The model has one subscription that matches everything, and its session is served by the shared reader, or by a catch-up
reader while it is behind. What the gateway does around the machines is done here in the same order.
"""

from __future__ import annotations

from collections import deque

from mqtt_nats.protocol.durable_sender import DurableSender, packet_id
from mqtt_nats.protocol.inflight import Delivery, SubscriptionState
from mqtt_nats.protocol.position import Content, SessionPosition, Step


class Stored:
    """What is stored of a session's position, with the number of the write."""

    def __init__(self) -> None:
        self.number = 0
        self.content = Content(0, {}, {}, {})
        self.clean = True
        self.perhaps = 0
        """Last sequence that a gateway that has died may have sent, also after a resume that did not end."""


class Gateway:
    """The gateway that has the session; a crash leaves nothing of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.machine = DurableSender(world.limit, self)
        self.ledger = SessionPosition()
        self.source, self.past = SubscriptionState(2, 1), SubscriptionState(0, 0)
        self.machine.sources.extend((self.source, self.past))
        self.reached = 0
        """Stream sequence up to which a reader has brought everything."""
        self.handover: tuple[int, list[int]] | None = None
        """Where the shared reader began for a session that is behind, and what it has kept back since; None = it is not
        behind, or the shared reader has yet to begin."""
        self.behind = True
        self.expected = 0
        self.leaving = False
        self.write: tuple[Content, bool] | None = None
        self.stored_now = False

    def send(self, data: bytes) -> None:
        self.world.to_client.append(("pubrel", data[2] << 8 | data[3], 0, 0, False))

    def publish(self, delivery: Delivery, dup: bool) -> bool:
        self.world.to_client.append(("publish", delivery.id, delivery.sequence, delivery.qos, dup))
        return True

    def ack(self, reply: bytes, identifier: int = 0) -> None:
        if not self.ledger.complete(reply, identifier):
            self.machine.confirmed(identifier)

    def store_pubrel(self, identifier: int, sequence: int) -> None:
        self.ledger.receive(identifier, sequence)

    def allocate(self, sequence: int, identifier: int) -> None:
        self.ledger.allocate(sequence, identifier)

    def end_allocation(self, sequence: int, identifier: int) -> None:
        self.ledger.end_allocation(sequence, identifier)

    def report_no_identifier(self) -> None:
        raise AssertionError("there are many identifiers")

    def report_waiting(self) -> None:
        pass

    def report_sent(self, source: SubscriptionState) -> None:
        pass

    def seek(self) -> None:
        """Records stay until they have been delivered."""

    def take(self, sequence: int) -> None:
        qos = self.world.stream[sequence]
        self.reached = sequence
        mark = b"@%d" % sequence
        self.ledger.add_pending(sequence, qos)
        if self.machine.sent_at_once(self.source, sequence, qos, mark):
            self.world.to_client.append(("publish", packet_id(sequence), sequence, qos, False))
        else:
            self.machine.arrived(self.source, sequence, 1, mark, sequence, qos)

    def begin(self) -> None:
        self.ledger.reach(self.reached)
        self.write = self.ledger.begin(), self.leaving

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
        self.stored = Stored()
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
            self.stored.content, self.stored.clean = gateway.write
            gateway.expected = self.stored.number
        gateway.stored_now = True

    def resume(self, *, dies: int = 0) -> None:
        """With ``dies`` the gateway gets no further than this step."""
        gateway = self.gateway = Gateway(self)
        machine, ledger, position = gateway.machine, gateway.ledger, self.stored
        content, clean = position.content, position.clean
        if dies == 1:
            return self.crash(stored=False)
        gateway.expected = position.number
        ledger.restore(content.reached, dict(content.pending), dict(content.released), dict(content.identifiers))
        gateway.reached = content.reached
        if not clean:
            position.perhaps = self.last
        gateway.begin()
        self.store(gateway)
        gateway.write, gateway.stored_now = None, False
        ledger.stored()
        if dies == 2:
            return self.crash(stored=False)
        machine.restore_identifiers(ledger.identifiers)
        for identifier, sequence in ledger.released.items():
            machine.owe(identifier, sequence)
            machine.keep_identifier(identifier, b"%%%d" % identifier)
        machine.sent_perhaps(position.perhaps)
        gateway.source.begin_after(content.reached)
        for sequence, qos in sorted(ledger.pending.items()):
            machine.arrived(gateway.past, sequence, 2, b"@%d" % sequence, sequence, qos)
        machine.start()
        return None
