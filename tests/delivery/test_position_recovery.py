# SPDX-License-Identifier: Apache-2.0
"""Sessions that go on with a position, or leave the shared reader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import pytest

from mqtt_nats.backbone.batch import all_done
from mqtt_nats.backbone.transport import NatsTransport
from mqtt_nats.delivery import position_recovery as grounding
from mqtt_nats.delivery.position_recovery import (
    CLIENT_INFLIGHT_MOST,
    fetch_in_flight,
    limit_in_flight,
    remove_dormant,
    restore_position,
    store_positions_in_consumers,
)
from mqtt_nats.delivery.position_writer import OWNERSHIP_PROOF_S, Fresh, PositionWriter
from mqtt_nats.delivery.states import DeliveryEvent, DeliveryState
from mqtt_nats.messages.terms import TERMS
from mqtt_nats.protocol.ack_tokens import TAKEN
from mqtt_nats.protocol.durable_sender import DurableSender, packet_id
from mqtt_nats.protocol.inflight import Delivery, SubscriptionState
from mqtt_nats.protocol.position import SessionPosition
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.api import ApiError, RequestTimeout
from mqtt_streams.consumers import ConsumerExists
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.positions import Found, Position
from mqtt_streams.sessions import V5
from tests.delivery.fakes import FakeDeliveryServices, FakeReceiver, Side
from tests.harness.doubles import Timers, stands_for
from tests.sessions.fakes import FakeLink, as_client, as_link, v5_of

PUBACK, PUBREC = 4, 5


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

    def request_state(self, source: SubscriptionState, sequence: int) -> None:
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


@stands_for(PositionWriter)
class Keeping:
    """Stands for `PositionWriter`: its session is its own so many times, and its writes are stored, or refused."""

    def __init__(self, times: int, ledger: SessionPosition | None = None, *, stores: bool = True) -> None:
        self.ledger = SessionPosition() if ledger is None else ledger
        self.live = {"a"}
        self.present: set[str] = set()
        self.fake_times = times
        self.fake_stores = stores
        self.fake_left = False

    async def flush(self) -> bool:
        return self.fake_stores

    async def sure(self) -> bool:
        self.fake_times -= 1
        return self.fake_times >= 0

    def end_if_moved(self) -> None:
        self.fake_left = True

    def restore(self, position: Position, valid: int, sent: int) -> None:
        """Begin as the position says."""

    def replace_no_consumer(self) -> None:
        """Speak for no consumer."""

    def expect_consumers(self, names: Iterable[str]) -> None:
        self.present.update(names)

    def miss_consumers(self, names: Iterable[str]) -> None:
        self.present.difference_update(names)


@pytest.mark.parametrize("qos", [1, 2])
async def test_both_hear_that_it_is_complete(qos: int) -> None:
    """Else it would be pending for ever, and be sent again by whoever goes on with the session."""
    ledger = SessionPosition()
    ports = Ports(ledger)
    machine = DurableSender(10, ports)
    source = SubscriptionState(qos, 1, 10)
    source.expected = 0
    machine.sources.append(source)
    for sequence in (6, 7):
        machine.arrived(source, sequence, 2, b"$JS.ACK.%d" % sequence, None, qos)
    ledger.add_pending(6, qos)
    side: Any = Side(machine, position_writer=Keeping(0, ledger))
    client = as_client(FakeReceiver(FakeDeliveryServices()))
    await fetch_in_flight(client, side)
    await fetch_in_flight(client, side)
    machine.start()
    for sequence in (6, 7):
        if qos == 1:
            machine.acknowledged(PUBACK, [packet_id(sequence)])
        else:
            machine.acknowledged(PUBREC, [packet_id(sequence)])
            machine.pubrel_stored(packet_id(sequence))
    assert ledger.pending == {}
    assert ports.acks == [b"$JS.ACK.6", b"$JS.ACK.7"]


@pytest.mark.parametrize(("unsent", "dup"), [([], True), ([6], False)])
async def test_what_an_earlier_connection_has_sent_has_dup(unsent: list[int], dup: bool) -> None:
    """Though the consumer, which was set in between, takes it for a first delivery [MQTT-3.3.1-1]."""
    ledger = SessionPosition()
    ports = Ports(ledger)
    machine = DurableSender(10, ports)
    machine.not_sent(unsent)
    source = SubscriptionState(1, 1, 10)
    source.expected = 0
    machine.sources.append(source)
    machine.arrived(source, 6, 1, b"$JS.ACK.6", None, 1)
    machine.arrived(source, 7, 1, b"$JS.ACK.7", None, 1)
    ledger.add_pending(6, 2)
    side: Any = Side(machine, position_writer=Keeping(0, ledger))
    await fetch_in_flight(as_client(FakeReceiver(FakeDeliveryServices())), side)
    machine.start()
    assert ports.sent == [(6, 2 if dup else 1, dup), (7, 1, False)]


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


@pytest.mark.parametrize(("times", "set_back"), [(0, 0), (1, 1), (2, 2)])
async def test_before_each_consumer_is_set(monkeypatch: pytest.MonkeyPatch, times: int, set_back: int) -> None:
    """The session is this gateway's still."""
    positions: list[int] = []

    async def set_position(inbox: object, consumer: object, start: int, *, resets: bool) -> object:
        positions.append(start)
        return consumer

    monkeypatch.setattr(grounding, "set_position", set_position)
    bindings = {}
    for name in ("a", "b"):
        consumer = subscription_consumer("hash", name, name_nuid=name, deliver_nuid="d", max_ack_pending=9, start_seq=1)
        bindings[name] = ConsumerBinding(name, consumer, SubscriptionState(1, 1, 10))
        bindings[name].source.live = True
    position_writer = Keeping(times)
    position_writer.ledger.reached = 41
    side: Any = Side(position_writer=position_writer, bindings=bindings, state=DeliveryState.LEAVING)
    side.client = client = FakeReceiver(FakeDeliveryServices())
    assert await store_positions_in_consumers(as_client(client), side) is (times == 2)
    assert positions == [42] * set_back
    assert position_writer.fake_left is (times < 2)


def dormant(times: int, *names: str, live: set[str]) -> tuple[Any, Any]:
    """A session with consumers of these names, and its client; ``times``: as of `Keeping`."""
    services = FakeDeliveryServices()
    client = FakeReceiver(services, v5=V5())
    side: Any = Side(position_writer=Keeping(times), bindings={}, state=DeliveryState.LIVE)
    for name in names:
        consumer = subscription_consumer("hash", name, name_nuid=name, deliver_nuid="d", max_ack_pending=9, start_seq=1)
        side.bindings[name] = ConsumerBinding(name, consumer, SubscriptionState(1, 1, 10))
        side.bindings[name].source.live = name in live
        services.fake_inbox.consumers[MESSAGES][consumer.durable_name] = {"config": consumer.to_config()}
        services.registry.attached[consumer.durable_name] = cast("Any", client)
    side.client = client
    return client, side


@pytest.mark.parametrize(("start", "begin"), [(1, 42), (50, 50)])
async def test_dormant_consumers_are_removed_and_created_again(start: int, begin: int) -> None:
    """Where the position is, or the subscription begins; nobody takes the deletion for a loss."""
    client, side = dormant(9, "a", "b", live={"a"})
    side.bindings["a"].source.start = start
    consumers = client.services.fake_inbox.consumers[MESSAGES]
    await remove_dormant(client, side)
    assert list(consumers) == ["hash_b"]
    assert list(client.services.registry.attached) == ["hash_b"]
    assert [side.bindings[name].removed for name in "ab"] == [True, False]
    side.position_writer.ledger.reached = 41
    side.change(DeliveryEvent.LEFT_READER)
    assert await store_positions_in_consumers(client, side)
    assert consumers["hash_a"]["config"]["opt_start_seq"] == begin
    assert not side.bindings["a"].removed


async def test_only_the_owner_of_a_session_removes_its_consumers() -> None:
    """A later request would be one for a consumer that the next owner has created."""
    client, side = dormant(0, "a", live={"a"})
    await remove_dormant(client, side)
    assert list(client.services.fake_inbox.consumers[MESSAGES]) == ["hash_a"]
    assert not side.bindings["a"].removed


@pytest.mark.parametrize("ours", [True, False])
async def test_a_consumer_that_was_to_be_removed_is_there(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    """It is set, unless it is one of the session's next owner."""
    client, side = dormant(1 + ours, "a", live={"a"})
    side.bindings["a"].remove()
    side.change(DeliveryEvent.LEFT_READER)

    async def exists(*_: object) -> None:
        raise ConsumerExists

    positions: list[int] = []

    async def set_position(inbox: object, consumer: object, start: int, *, resets: bool) -> object:
        positions.append(start)
        return consumer

    monkeypatch.setattr(grounding, "create_again", exists)
    monkeypatch.setattr(grounding, "set_position", set_position)
    assert await store_positions_in_consumers(client, side) is ours
    assert positions == [1] * ours


async def test_what_was_taken_is_sent_at_the_pace_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """No consumer bounds what a session has from the shared reader when it leaves that."""

    async def set_position(inbox: object, consumer: object, start: int, *, resets: bool) -> object:
        return consumer

    monkeypatch.setattr(grounding, "set_position", set_position)
    source = SubscriptionState(1, 1, 3)
    source.live = True
    consumer = subscription_consumer("hash", "a", name_nuid="a", deliver_nuid="d", max_ack_pending=3, start_seq=1)
    position_writer = Keeping(2)
    ports = Ports(position_writer.ledger)
    machine = DurableSender(CLIENT_INFLIGHT_MOST, ports)
    machine.sources.append(source)
    machine.open = True
    side: Any = Side(machine, DeliveryState.LIVE, position_writer=position_writer)
    side.bindings = {"a": ConsumerBinding("a", consumer, source)}
    side.client = client = FakeReceiver(FakeDeliveryServices())
    limit_in_flight(side)
    for sequence in range(1, 11):
        position_writer.ledger.add_pending(sequence, 1)
        machine.arrived(source, sequence, 1, TAKEN + b"%d" % sequence, None, 1)
    side.change(DeliveryEvent.LEFT_READER)
    position_writer.ledger.reached = 10
    assert await store_positions_in_consumers(as_client(client), side)
    machine.pump()
    for sequence in (11, 12, 13):
        machine.arrived(source, sequence, 1, b"$JS.ACK.%d" % sequence, None, 1)
    for acknowledged in range(10):
        assert [one for one, _, _ in ports.sent] == [*range(1, acknowledged + 4)]
        machine.acknowledged(PUBACK, [packet_id(acknowledged + 1)])
    assert position_writer.ledger.pending == {}
    assert (machine.limit, machine.on_room) == (CLIENT_INFLIGHT_MOST, None)  # consumers bound it from here on


@pytest.mark.parametrize(("unsent", "limit"), [([], 9), ([6, 7, 8, 9], 5), ([3, 9], 8), (range(1, 10), 3)])
async def test_what_an_earlier_connection_may_have_sent_waits_for_nothing(unsent: list[int], limit: int) -> None:
    """It may have had a larger window [MQTT-4.4.0-1]; the rest of what was taken keeps to that of this one."""
    ledger = SessionPosition()
    machine = DurableSender(CLIENT_INFLIGHT_MOST, Ports(ledger))
    machine.not_sent(unsent)
    source = SubscriptionState(1, 1, 3)
    source.expected = 0
    machine.sources.append(source)
    for sequence in range(1, 10):
        ledger.add_pending(sequence, 1)
        machine.arrived(source, sequence, 2, TAKEN + b"%d" % sequence, None, 1)
    consumer = subscription_consumer("hash", "a", name_nuid="a", deliver_nuid="d", max_ack_pending=3, start_seq=1)
    side: Any = Side(machine, position_writer=Keeping(0, ledger))
    side.bindings = {"a": ConsumerBinding("a", consumer, source)}
    side.client = client = FakeReceiver(FakeDeliveryServices())
    limit_in_flight(side)
    machine.start()
    assert (machine.limit, len(machine.inflight)) == (limit, limit)
    client.terms = replace(TERMS, receive_maximum=2)  # [MQTT-3.3.4-9] (5.0)
    limit_in_flight(side)
    assert machine.limit == 2


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
    monkeypatch.setattr(grounding, "PositionWriter", lambda client, sequence: Keeping(0, stores=False))
    services = FakeDeliveryServices()
    monkeypatch.setattr(services.streams.positions, "load", load)
    client = FakeReceiver(services)
    v5_of(client).name_position("p")
    side: Any = Side(DurableSender(10, Ports(SessionPosition())))
    with pytest.raises(RequestTimeout):
        await restore_position(as_client(client), side)
    assert len(loads) == rounds


@pytest.mark.parametrize("found", [Found(), Found(Position("of a former session").encode(), 1, 0.0)])
@pytest.mark.parametrize("consumers", [True, False])
async def test_a_first_position_that_comes_late_is_void(
    monkeypatch: pytest.MonkeyPatch, found: Found, consumers: bool
) -> None:
    """An earlier owner whose write is sent again, once NATS is back, would set the consumers back: QoS 2 came twice."""

    async def load(client_hash: str) -> Found:
        return found

    services = FakeDeliveryServices()
    monkeypatch.setattr(services.streams.positions, "load", load)
    client = FakeReceiver(services)
    v5_of(client).name_position("p")
    assert client.record is not None
    if consumers:
        client.record.cons["a"] = subscription_consumer(
            "hash", "a", name_nuid="a", deliver_nuid="d", max_ack_pending=3, start_seq=1
        )
    side: Any = Side(DurableSender(10, Ports(SessionPosition())))
    assert await restore_position(as_client(client), side) == set()
    assert (v5_of(client).pos != "p", side.kept) == (consumers, consumers)


async def test_what_was_asked_is_sure_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """And on the same connection to NATS only: others are told at once that this gateway is gone."""
    fake = FakeLink()
    link = as_link(fake)
    link.wire, following = (NatsTransport(link, asyncio.Transport(), asyncio.Protocol()) for _ in range(2))
    timers = Timers(monkeypatch)
    fresh = Fresh(link)
    timers.pass_to(OWNERSHIP_PROOF_S * 0.9)
    assert fresh
    former, fake.wire = link.wire, None
    assert not fresh
    assert not Fresh(link)
    link.wire = following
    assert not fresh
    link.wire = former
    timers.pass_to(OWNERSHIP_PROOF_S * 1.1)
    assert not fresh
