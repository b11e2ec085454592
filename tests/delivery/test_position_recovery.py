# SPDX-License-Identifier: Apache-2.0
"""Sessions that go on at their stored position."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from mqtt_nats.backbone.batch import all_done
from mqtt_nats.delivery import position_recovery as grounding
from mqtt_nats.delivery.position_recovery import (
    CLIENT_INFLIGHT_MOST,
    end_shared_delivery,
    fetch_in_flight,
    limit_in_flight,
    lowered_consumer,
    restore_position,
)
from mqtt_nats.delivery.position_writer import NO_POSITION, PositionWriter
from mqtt_nats.delivery.receiver import SharedFeed
from mqtt_nats.delivery.states import DeliveryEvent, DeliveryState
from mqtt_nats.messages.message import Message
from mqtt_nats.messages.terms import TERMS
from mqtt_nats.protocol.ack_tokens import TAKEN
from mqtt_nats.protocol.durable_sender import DurableSender, packet_id
from mqtt_nats.protocol.inflight import Delivery, SubscriptionState
from mqtt_nats.protocol.position import SessionPosition
from mqtt_nats.pubsub.backlog import Gate
from mqtt_nats.pubsub.routing_table import Choice, Filter
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.api import ApiError, RequestTimeout
from mqtt_streams.consumers import backstop
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.positions import Found, Position, decode
from mqtt_streams.sessions import Draining
from tests.delivery.fakes import FakeDeliveryServices, FakePositionWriter, FakeReceiver, Side
from tests.sessions.fakes import as_client, v5_of

PUBACK = 4


class Ports:
    """Acknowledges to whom it has to."""

    def __init__(self, ledger: SessionPosition) -> None:
        self.ledger = ledger
        self.acks: list[bytes] = []
        self.sent: list[tuple[int, int, bool]] = []
        """Sequence, QoS and DUP."""

    def publish(self, delivery: Delivery, dup: bool) -> bool:
        self.sent.append((delivery.sequence, delivery.qos, dup))
        return True

    def send(self, data: bytes) -> None:
        pass

    def report_waiting(self) -> None:
        pass

    def report_sent(self, source: SubscriptionState) -> None:
        pass

    def seek(self) -> None:
        pass

    def allocate(self, sequence: int, identifier: int) -> None:
        pass

    def end_allocation(self, sequence: int, identifier: int) -> None:
        pass

    def report_no_identifier(self) -> None:
        pass

    def store_pubrel(self, identifier: int, sequence: int) -> None:
        pass

    def ack(self, reply: bytes, identifier: int = 0) -> None:
        if reply.startswith(TAKEN):
            assert self.ledger.complete(reply, identifier)
        else:
            self.acks.append(reply)


def stored(services: FakeDeliveryServices, *topics: str, qos: int = 1) -> list[int]:
    """Store messages; returns their sequences."""
    headers = b"NATS/1.0\r\nNmqtt-Pub:%d\r\n\r\n" % qos
    return [services.fake_inbox.put(f"$MQTT.msgs.{topic}", b"", headers) for topic in topics]


@pytest.mark.parametrize("qos", [1, 2])
async def test_messages_in_flight_are_fetched_once(qos: int) -> None:
    """With those that are on their way already they would be sent twice, or be pending for ever."""
    ledger, services = SessionPosition(), FakeDeliveryServices()
    first, second = stored(services, "a", "a", qos=qos)
    machine = DurableSender(10, ports := Ports(ledger))
    for sequence in (first, second):
        ledger.add_pending(sequence, qos)
    side: Any = Side(machine, position_writer=FakePositionWriter(ledger=ledger))
    client = as_client(FakeReceiver(services))
    for _ in range(2):
        await fetch_in_flight(client, side)
    machine.start()
    assert ports.sent == [(first, qos, True), (second, qos, True)]
    assert len(services.fake_inbox.asked) == 2
    for sequence in (first, second) if qos == 1 else ():
        machine.acknowledged(PUBACK, [packet_id(sequence)])
    assert len(ledger.pending) == (0 if qos == 1 else 2)
    assert ports.acks == []


async def test_what_was_taken_and_not_sent_has_no_dup() -> None:
    """[MQTT-3.3.1-1]"""
    ledger, services = SessionPosition(), FakeDeliveryServices()
    first, second = stored(services, "a", "a")
    machine = DurableSender(10, ports := Ports(ledger))
    machine.not_sent([second])
    ledger.add_pending(first, 1)
    ledger.add_pending(second, 1)
    await fetch_in_flight(
        as_client(FakeReceiver(services)),
        cast("Any", Side(machine, position_writer=FakePositionWriter(ledger=ledger))),
    )
    machine.start()
    assert ports.sent == [(first, 1, True), (second, 1, False)]


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_message_in_flight_that_was_removed(monkeypatch: pytest.MonkeyPatch, qos: int) -> None:
    """It is complete; a client that may have had it half-way gives its identifier up before that is used again."""
    ledger = SessionPosition()
    machine = DurableSender(10, Ports(ledger))
    suspects: list[tuple[int, int]] = []
    monkeypatch.setattr(machine, "suspect", lambda low, high: suspects.append((low, high)))
    ledger.add_pending(7, qos)
    side: Any = Side(machine, position_writer=FakePositionWriter(ledger=ledger))
    await fetch_in_flight(as_client(FakeReceiver(FakeDeliveryServices())), side)
    assert (ledger.pending, suspects) == ({}, [(7, 7)] if qos == 2 else [])


@pytest.mark.parametrize("replaying", [True, False])
@pytest.mark.parametrize("unsent", [True, False])
async def test_a_message_in_flight_waits_behind_retained_ones(replaying: bool, unsent: bool) -> None:
    """Of its subscription, whose retained messages an earlier connection had not sent all; if it was not sent, too."""
    ledger, services = SessionPosition(), FakeDeliveryServices()
    (sequence,) = stored(services, "a")
    ledger.add_pending(sequence, 1)
    machine = DurableSender(10, ports := Ports(ledger))
    machine.not_sent([sequence] if unsent else [])
    source = SubscriptionState(1, 1)
    if replaying:
        source.hold(SubscriptionState.REPLAYING)
    machine.sources.append(source)
    side: Any = Side(machine, position_writer=FakePositionWriter(ledger=ledger))
    consumer = subscription_consumer("hash", "a", name_nuid="a", deliver_nuid="d", max_ack_pending=9, start_seq=1)
    side.overlap.add("a", ConsumerBinding("a", consumer, source), source)
    await fetch_in_flight(as_client(FakeReceiver(services)), side)
    machine.start()
    assert (ports.sent == []) is (replaying and unsent)
    machine.drop_hold(source)
    assert len(ports.sent) == 1


BEHIND, RETURNING = SubscriptionState.BEHIND, SubscriptionState.RETURNING


@pytest.mark.parametrize(
    ("reasons", "unsent", "waits"),
    [
        ([BEHIND], True, True),
        ([BEHIND, RETURNING], True, True),
        ([RETURNING], True, False),
        ([BEHIND], False, False),
    ],
    ids=["behind another", "behind another, and returning", "returning", "sent before"],
)
async def test_a_message_in_flight_waits_behind_another_subscription(
    reasons: list[int], unsent: bool, waits: bool
) -> None:
    """Older messages at QoS 0 come first, if it was not sent. That the session returns keeps it back no longer."""
    ledger, services = SessionPosition(), FakeDeliveryServices()
    (sequence,) = stored(services, "a")
    ledger.add_pending(sequence, 1)
    machine = DurableSender(10, ports := Ports(ledger))
    machine.not_sent([sequence] if unsent else [])
    source = SubscriptionState(1, 1)
    for reason in reasons:
        source.hold(reason)
    machine.sources.append(source)
    side: Any = Side(machine, position_writer=FakePositionWriter(ledger=ledger))
    consumer = subscription_consumer("hash", "a", name_nuid="a", deliver_nuid="d", max_ack_pending=9, start_seq=1)
    side.overlap.add("a", ConsumerBinding("a", consumer, source), source)
    await fetch_in_flight(as_client(FakeReceiver(services)), side)
    assert [one.sequence for one in source.backlog] == ([sequence] if waits else [])
    assert [one.source for one in machine.queued] == [source if waits else side.past]
    machine.start()
    assert (ports.sent == []) is waits
    for reason in reasons:
        machine.drop_hold(source, reason)
    assert ports.sent == [(sequence, 1, not unsent)]


@pytest.mark.sources
async def test_a_message_in_flight_discards_its_copy_in_a_gate() -> None:
    """Core NATS has brought it for the subscription at QoS 0 that has replaced its own."""
    ledger, services = SessionPosition(), FakeDeliveryServices()
    headers = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:one\r\n\r\n"
    sequence = services.fake_inbox.put("$MQTT.msgs.a", b"", headers)
    ledger.add_pending(sequence, 1)
    machine = DurableSender(10, ports := Ports(ledger))
    found = cast("Filter", object())
    gate = Gate(found, 1000)
    for known in (b"one", b"two"):
        gate.keep_back(Choice(found, 0, b"", kept=False), Message(b"\0\1a", b"", 1, ""), known)
    source = SubscriptionState(1, 1, end=sequence, whole=True)
    consumer = subscription_consumer("hash", "a", name_nuid="a", deliver_nuid="d", max_ack_pending=9, start_seq=1)
    binding = ConsumerBinding("a", consumer, source)
    binding.lowered([gate])
    side: Any = Side(machine, position_writer=FakePositionWriter(ledger=ledger))
    side.overlap.add("a", binding, source)
    side.client = client = FakeReceiver(services)
    client.gates = {found: gate}
    await fetch_in_flight(as_client(client), side)
    assert list(gate.waiting) == [b"two"]
    machine.start()
    assert ports.sent == [(sequence, 1, True)]


async def test_one_request_fails_while_others_are_under_way() -> None:
    """Whoever waits for all of them would else go on too soon."""
    done = []

    async def slow() -> None:
        await asyncio.sleep(0.01)
        done.append(True)

    async def refused() -> None:
        raise ApiError(404, 10014, "consumer not found")

    with pytest.raises(ApiError):
        await all_done([refused(), slow(), slow()])
    assert done == [True, True]


@pytest.mark.parametrize(("unsent", "limit"), [([], 9), ([6, 7, 8, 9], 5), ([3, 9], 8), (range(1, 10), 3)])
async def test_what_an_earlier_connection_may_have_sent_waits_for_nothing(unsent: list[int], limit: int) -> None:
    """It may have had a larger window [MQTT-4.4.0-1]; the rest of what was taken keeps to that of this one."""
    ledger = SessionPosition()
    machine = DurableSender(CLIENT_INFLIGHT_MOST, Ports(ledger))
    machine.not_sent(unsent)
    source = SubscriptionState(1, 1)
    machine.sources.append(source)
    for sequence in range(1, 10):
        ledger.add_pending(sequence, 1)
        machine.arrived(source, sequence, 2, TAKEN + b"%d" % sequence, None, 1)
    consumer = subscription_consumer("hash", "a", name_nuid="a", deliver_nuid="d", max_ack_pending=3, start_seq=1)
    side: Any = Side(machine, position_writer=FakePositionWriter(ledger))
    side.bindings = {"a": ConsumerBinding("a", consumer, source)}
    side.client = client = FakeReceiver(FakeDeliveryServices())
    limit_in_flight(side)
    machine.start()
    assert (machine.limit, len(machine.inflight)) == (limit, limit)
    client.terms = replace(TERMS, receive_maximum=2)  # [MQTT-3.3.4-9] (5.0)
    limit_in_flight(side)
    assert machine.limit == 2


@pytest.mark.parametrize(("maximum", "limit"), [(7, 7), (65535, CLIENT_INFLIGHT_MOST)])
async def test_a_session_with_shared_subscriptions_alone_has_no_window(maximum: int, limit: int) -> None:
    """Only receive maximum bounds it: a window belongs to a subscription of the session."""
    side: Any = Side(DurableSender(1, Ports(SessionPosition())))
    side.client = client = FakeReceiver(FakeDeliveryServices())
    client.terms = replace(TERMS, receive_maximum=maximum)
    limit_in_flight(side)
    assert side.machine.limit == limit


@pytest.mark.parametrize(("ours", "rounds"), [(True, 10), (False, 1)])
async def test_somebody_else_writes_the_position(monkeypatch: pytest.MonkeyPatch, ours: bool, rounds: int) -> None:
    """Only whose the session is goes on writing."""
    loads = []

    async def load(client_hash: str) -> Found:
        loads.append(client_hash)
        return Found(Position("p", clean=True).encode(), 1, 0.0)

    async def still_owner(client: object) -> bool:
        return ours

    monkeypatch.setattr(grounding, "still_owner", still_owner)
    monkeypatch.setattr(grounding, "PositionWriter", lambda client, sequence: FakePositionWriter(stores=False))
    services = FakeDeliveryServices()
    monkeypatch.setattr(services.streams.positions, "load", load)
    client = FakeReceiver(services)
    v5_of(client).name_position("p")
    side: Any = Side(DurableSender(10, Ports(SessionPosition())))
    with pytest.raises(RequestTimeout):
        await restore_position(as_client(client), side)
    assert len(loads) == rounds


class Stores:
    """A session with a stored position; what it writes is stored at once."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, position: Position | None, *keys: str, messages: int = 0
    ) -> None:
        self.services = FakeDeliveryServices()
        stored(self.services, *(["a"] * messages))
        self.client = FakeReceiver(self.services)
        v5_of(self.client).name_position("p")
        assert self.client.record is not None
        for key in keys:
            consumer = subscription_consumer(
                "hash", key, name_nuid=key, deliver_nuid="d", max_ack_pending=3, start_seq=1
            )
            self.client.record.cons[key] = consumer
        self.machine = DurableSender(10, Ports(SessionPosition()))
        self.side: Any = Side(self.machine, DeliveryState.OPENING, client=self.client)
        self.client.durable_side = self.side
        self.imports: list[tuple[object, ...]] = []
        self.written: list[Position] = []
        self.found = position

        self.loads = 0

        async def load(client_hash: str) -> Found:
            self.loads += 1
            return Found() if self.found is None else Found(self.found.encode(), 5, 0.0)

        async def imported(client: object, side: Any, *told: object) -> None:
            self.imports.append(told)
            side.store_position_with(PositionWriter(as_client(self.client), 5))

        def put(target: bytes, headers: bytes, payload: bytes, operation: Any) -> None:
            written = decode(payload)
            assert written is not None
            self.written.append(written)
            asyncio.get_running_loop().call_soon(operation.stored, b'{"stream":"$MQTT_pos","seq":6}')

        monkeypatch.setattr(self.services.streams.positions, "load", load)
        monkeypatch.setattr(grounding, "import_position", imported)
        monkeypatch.setattr(self.services.fake_store, "put", put)

    async def restore(self) -> None:
        await restore_position(as_client(self.client), self.side)


@pytest.mark.parametrize(
    ("named", "position", "sequence"),
    [(False, None, NO_POSITION), (True, None, 0), (True, Position("of a former session"), 5)],
    ids=["never written", "none is stored", "of a former session"],
)
async def test_a_session_without_a_position_gets_that_of_its_consumers(
    monkeypatch: pytest.MonkeyPatch, named: bool, position: Position | None, sequence: int
) -> None:
    setup = Stores(monkeypatch, position, "a", messages=0)
    if not named:
        v5_of(setup.client).pos = ""
    await setup.restore()
    assert setup.imports == [(sequence,)]


async def test_a_position_that_lacks_a_subscription(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers have served it, at an older gateway: both say together where the session is."""
    position = Position("p", live=["hash_a"], clean=True, reached=4, most=3)
    setup = Stores(monkeypatch, position, "a", "b", messages=0)
    await setup.restore()
    assert setup.imports == [(5, position)]
    assert setup.machine.most == 3
    v5_of(setup.client).draining = [Draining("lowered", "$MQTT.msgs.a", 1, 9), Draining("ended", "$MQTT.msgs.a", 0, 9)]
    setup = Stores(monkeypatch, replace(position, live=["hash_a", "lowered"]), "a", messages=0)
    v5_of(setup.client).draining = [Draining("lowered", "$MQTT.msgs.a", 1, 9), Draining("ended", "$MQTT.msgs.a", 0, 9)]
    await setup.restore()
    assert setup.imports == [], "an ended one has nothing left to serve"


async def test_a_session_goes_on_where_its_connection_ended_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows what was sent, and which identifiers the client knows."""
    position = Position(
        "p",
        live=["hash_a"],
        clean=True,
        reached=3,
        pending={1: 1, 2: 2},
        released={9: 1},
        unsent=[2],
        most=1,
        identifiers={2: 77},
    )
    setup = Stores(monkeypatch, position, "a", messages=5)
    await setup.restore()
    side, machine = setup.side, setup.machine
    assert side.resumed_from == 3
    assert (side.position_writer.ledger.pending, side.position_writer.strict) == ({1: 1, 2: 2}, False)
    assert [(one.clean, one.unsent, one.reached) for one in setup.written] == [(False, [], 3)]
    assert (machine.unsent(), machine.most, machine.perhaps_sent) == ({2}, 1, 0)
    assert machine.identifiers.allocated == {2: 77}
    assert machine.releases[9].sequence == 1
    assert machine.releases[9].stays, "a position without it is stored before the identifier is used again"
    assert setup.imports == []


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("clean", [True, False])
async def test_the_gateway_that_wrote_the_position_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, clean: bool, answers: bool
) -> None:
    """It may still serve the session, and writes a last position; a clean one it has left."""
    position = Position("p", live=["hash_a"], clean=clean, reached=2, gateway="other")
    setup = Stores(monkeypatch, position, "a", messages=2)
    done: list[tuple[str, ...]] = []

    async def over(client_hash: str) -> None:
        done.append(("over", client_hash))

    async def elsewhere(name: str, gateway: str) -> bool:
        done.append((name, gateway))
        return answers

    monkeypatch.setattr(setup.client.delivery.handover, "over", over)
    monkeypatch.setattr(setup.client.delivery.handover, "elsewhere", elsewhere)
    await setup.restore()
    asked = [] if clean else [(setup.client.client_id, "other")]
    assert done == [("over", setup.client.hash), *asked]
    assert setup.loads == (2 if answers and not clean else 1)


@pytest.mark.parametrize("gap", [False, True])
async def test_a_session_of_a_gateway_that_has_died(monkeypatch: pytest.MonkeyPatch, gap: bool) -> None:
    """It may have sent everything that is stored; where messages are gone, their identifiers are in doubt."""
    setup = Stores(monkeypatch, Position("p", live=["hash_a"], reached=2), "a", messages=5)
    suspects: list[tuple[int, int]] = []
    monkeypatch.setattr(setup.machine, "suspect", lambda low, high: suspects.append((low, high)))
    if gap:
        del setup.services.fake_inbox.messages[MESSAGES][:3]
    await setup.restore()
    assert setup.machine.perhaps_sent == 5
    assert setup.side.position_writer.perhaps == 5
    assert suspects == ([(3, 5)] if gap else [])


async def test_what_an_earlier_gateway_may_have_sent_stays_so_after_an_orderly_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The messages after that were sent by nobody."""
    setup = Stores(monkeypatch, Position("p", live=["hash_a"], clean=True, reached=2, perhaps=4), "a", messages=9)
    await setup.restore()
    assert setup.machine.perhaps_sent == 4


async def test_an_earlier_owner_goes_on_during_the_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was late; what the connection before it had sent at most does not count any more [MQTT-3.3.1-1]."""
    setup = Stores(monkeypatch, Position("p", live=["hash_a"], clean=True, reached=5, pending={5: 1}, most=4), "a")
    stored(setup.services, *(["a"] * 5))

    async def still_owner(client: object) -> bool:
        return True

    def refused(client: Any, sequence: int) -> Any:
        setup.found = Position("p", live=["hash_a"], reached=5, pending={5: 1})
        monkeypatch.setattr(grounding, "PositionWriter", PositionWriter)
        return FakePositionWriter(stores=False)

    monkeypatch.setattr(grounding, "still_owner", still_owner)
    monkeypatch.setattr(grounding, "PositionWriter", refused)
    await setup.restore()
    await fetch_in_flight(as_client(setup.client), setup.side)
    assert [(one.sequence, one.dup) for one in setup.machine.queued] == [(5, True)]


async def test_what_an_import_has_found_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers of an older gateway may have delivered more than the position says."""
    setup = Stores(monkeypatch, Position("p", live=["hash_a"], clean=True, reached=2, perhaps=4), "a", "b", messages=9)

    async def imported(client: object, side: Any, *told: object) -> None:
        side.machine.sent_perhaps(7)

    monkeypatch.setattr(grounding, "import_position", imported)
    await setup.restore()
    assert setup.machine.perhaps_sent == 7


async def test_a_position_of_a_stream_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says of messages that the present stream has not does not count."""
    position = Position(
        "p", "former", ["hash_a"], clean=True, reached=90, pending={2: 1, 80: 1}, unsent=[2, 80], identifiers={80: 7}
    )
    setup = Stores(monkeypatch, position, "a", messages=5)
    setup.services.stream.floor = 4
    v5_of(setup.client).count_in("present")
    await setup.restore()
    assert (setup.side.resumed_from, setup.side.position_writer.ledger.pending) == (4, {2: 1})
    assert (setup.machine.unsent(), setup.machine.identifiers.allocated) == ({2}, {})


class Feed(SharedFeed):
    """A feed that has come to sequence 30."""

    def __init__(self) -> None:
        self.fake_left: list[str] = []

    def reached(self, side: object) -> int:
        return 30

    def end_catching(self, side: Any) -> None:
        self.fake_left.append("catching up")
        if side.state is DeliveryState.CATCHING_UP:
            side.change(DeliveryEvent.CATCH_UP_ENDED)

    def remove(self, client: object) -> None:
        self.fake_left.append("reader")


@pytest.mark.parametrize("state", [DeliveryState.LIVE, DeliveryState.CATCHING_UP, DeliveryState.NOT_READING])
async def test_readers_bring_a_session_no_more(state: DeliveryState) -> None:
    """Its position notes where they have come; a session that no reader serves has that already."""
    client = FakeReceiver(FakeDeliveryServices())
    client.delivery.feed = feed = Feed()
    ledger = SessionPosition()
    side: Any = Side(state=state, client=client, position_writer=FakePositionWriter(ledger=ledger))
    end_shared_delivery(side)
    served = state is not DeliveryState.NOT_READING
    assert feed.fake_left == (["catching up", "reader"] if served else [])
    assert (ledger.reached, ledger.dirty) == ((30, True) if served else (0, False))
    assert side.state is not DeliveryState.CATCHING_UP


async def test_the_consumer_of_a_lowered_subscription() -> None:
    client = FakeReceiver(FakeDeliveryServices())
    v5_of(client).expiry = 60
    side: Any = Side(client=client, window=lambda: 7)
    found = lowered_consumer(side, Draining("lowered", "$MQTT.msgs.a", 1, 9))
    assert (found.durable_name, found.filter_subject, found.max_ack_pending) == ("lowered", "$MQTT.msgs.a", 7)
    assert (found.inactive_threshold, found.deliver_subject) == (backstop(60), "$MQTT.sub.nuid1")
