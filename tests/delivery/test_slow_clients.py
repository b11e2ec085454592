# SPDX-License-Identifier: Apache-2.0
"""What is taken back of what waits for a client that does not read, and how that is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.codec import PINGRESP, ack_bytes
from mqtt_nats.delivery import draining
from mqtt_nats.delivery import slow_clients as stalling
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.delivery.receiver import DeliveryServices, Receiver, SharedFeed
from mqtt_nats.delivery.slow_clients import (
    LONGEST,
    POSTPONED_MOST,
    SlowClient,
    _held,
    _take_back,
    look_after,
    postponed,
    publish_id,
    relieve,
    stall_session,
)
from mqtt_nats.delivery.states import DeliveryState
from mqtt_nats.messages.message import Message
from mqtt_nats.messages.publish_encoder import Aliases
from mqtt_nats.protocol import inflight
from mqtt_nats.protocol.ack_tokens import TAKEN
from mqtt_nats.protocol.durable_sender import DurableSender, packet_id
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.position import SessionPosition
from mqtt_nats.pubsub.backlog import ENTRY_BYTES, Gate
from mqtt_nats.pubsub.routing_table import Choice, Filter
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_nats.transport.connection import Hold
from mqtt_nats.transport.write_buffer import PIECE, SEPARATE_CHUNK_BYTES, FlushRound, WriteBuffer
from mqtt_streams.consumers import BACKSTOP_S, ConsumerRef
from tests.delivery.fakes import (
    FakeDelivery,
    FakeDeliveryServices,
    FakeReceiver,
    FakeSlowReceiver,
    Side,
    as_delivery,
    as_receiver,
)
from tests.harness import raw, raw5
from tests.protocol.recorder import Recorder, source


def publish(identifier: int, qos: int = 1, *, size: int = 10, version: int = 4, topic: str = "a/b") -> bytes:
    made = raw.publish if version == 4 else raw5.publish
    return made(topic, bytes(size), qos=qos, id=identifier)


def write_buffer_of(*, most: int = 1 << 40) -> tuple[WriteBuffer, list[bytes | bytearray], list[int]]:
    """A write buffer, what was given to its socket, and a list that counts how often the round was overfull."""
    written: list[bytes | bytearray] = []
    overfull: list[int] = []
    round_ = FlushRound(lambda flush: flush())
    round_.most = most
    round_.overfull = lambda: overfull.append(round_.held)
    write_buffer = WriteBuffer(round_, 1 << 30)
    write_buffer.send = written.append
    return write_buffer, written, overfull


def clogging(write_buffer: WriteBuffer, written: list[bytes | bytearray], room: int) -> None:
    """From now on the socket is full after ``room`` bytes."""

    def send(data: bytes | bytearray) -> None:
        written.append(data)
        if sum(map(len, written)) >= room:
            write_buffer.clog()

    write_buffer.send = send


def test_packet_identifiers() -> None:
    for version in (4, 5):
        for size in (0, 200, 20_000, 3_000_000):
            assert publish_id(publish(0x1234, 1, size=size, version=version)) == 0x1234
            assert publish_id(publish(0xFFFF, 2, size=size, version=version, topic="x" * 300)) == 0xFFFF
        assert publish_id(publish(0, 0, version=version)) == 0
    for other in (PINGRESP, ack_bytes(4, 7), ack_bytes(6, 7), b"\x90\x03\x00\x01\x00"):
        assert publish_id(other) == 0


def test_what_waits_is_counted() -> None:
    write_buffer, written, overfull = write_buffer_of(most=100)
    clogging(write_buffer, written, 40)
    write_buffer.write(b"x" * 50)
    held = (write_buffer.clogged, write_buffer.held, write_buffer.round.held)
    assert held == (True, 50, 50), "what its socket has not taken counts"
    write_buffer.write(b"y" * 30)
    assert not overfull
    write_buffer.write(b"z" * 30)
    assert overfull == [110]
    write_buffer.sift(lambda data: data[:1] != b"y")
    assert (write_buffer.held, write_buffer.round.held) == (80, 80)
    clogging(write_buffer, written, 1 << 40)
    write_buffer.unclog()
    assert written[1:] == [b"z" * 30]
    assert (write_buffer.clogged, write_buffer.held, write_buffer.round.held, write_buffer.chunks) == (False, 0, 0, [])
    write_buffer.write(b"x")
    assert write_buffer.round.held == 0


def test_large_chunks_leave_one_by_one() -> None:
    chunks = [b"a" * SEPARATE_CHUNK_BYTES, b"b" * SEPARATE_CHUNK_BYTES, b"c" * 10 * SEPARATE_CHUNK_BYTES, b"d"]
    written: list[bytes | bytearray] = []
    later: list[Callable[[], None]] = []
    write_buffer = WriteBuffer(FlushRound(later.append), 1 << 30)

    def send(data: bytes | bytearray) -> None:
        written.append(data)
        if len(written) == 2:
            write_buffer.clog()

    write_buffer.send = send
    for chunk in chunks:
        write_buffer.write(chunk)
    later.pop()()
    assert [id(data) for data in written] == [id(chunk) for chunk in chunks[:2]], "they are copied"
    assert (write_buffer.clogged, write_buffer.held, write_buffer.chunks) == (
        True,
        12 * SEPARATE_CHUNK_BYTES + 1,
        chunks[2:],
    )
    write_buffer.unclog()
    assert written[2:] == chunks[2:]
    assert (write_buffer.clogged, write_buffer.held, write_buffer.round.held, write_buffer.chunks) == (False, 0, 0, [])
    written.clear()
    write_buffer.write(b"a" * SEPARATE_CHUNK_BYTES)
    write_buffer.write(b"b")
    later.pop()()
    assert written == [b"a" * SEPARATE_CHUNK_BYTES + b"b"], "small ones are joined"


def test_a_connection_that_is_closed_between_large_chunks() -> None:
    """What is to be sent before the end is."""
    chunks = [b"a" * SEPARATE_CHUNK_BYTES, b"b" * SEPARATE_CHUNK_BYTES]
    written: list[bytes | bytearray] = []
    later: list[Callable[[], None]] = []
    write_buffer = WriteBuffer(FlushRound(later.append), 1 << 30)

    def send(data: bytes | bytearray) -> None:
        written.append(data)
        if len(written) == 1:
            write_buffer.write(b"goodbye")
            write_buffer.flush()
            write_buffer.send = None

    write_buffer.send = send
    for chunk in chunks:
        write_buffer.write(chunk)
    later.pop()()
    assert b"".join(written) == b"".join(chunks) + b"goodbye"


def test_what_is_collected_while_it_is_flushed() -> None:
    """What a hook does that is told of what is sent: it writes, or has the connection closed, which flushes."""
    written: list[bytes | bytearray] = []
    later: list[Callable[[], None]] = []
    write_buffer = WriteBuffer(FlushRound(later.append), 1 << 30)

    def send(data: bytes | bytearray) -> None:
        written.append(data)
        if len(written) == 1:
            write_buffer.flush()
            write_buffer.write(b"more")
            write_buffer.clog()

    write_buffer.send = send
    write_buffer.write(b"first")
    write_buffer.write(b"second")
    later.pop()()
    assert written == [b"firstsecond"]
    assert (write_buffer.clogged, write_buffer.held, write_buffer.chunks) == (True, 15, [b"more"])
    later.pop()()
    write_buffer.unclog()
    assert written == [b"firstsecond", b"more"]
    assert (write_buffer.held, write_buffer.round.held) == (0, 0)


def test_who_reads_again_is_given_no_more_than_its_socket_takes() -> None:
    write_buffer, written, _ = write_buffer_of()
    clogging(write_buffer, written, 1)
    write_buffer.write(b"first")
    pieces = [bytes([number]) * 100_000 for number in range(20)]
    for piece in pieces:
        write_buffer.write(piece)
    written.clear()
    write_buffer.unclog()
    assert write_buffer.clogged
    assert PIECE <= sum(map(len, written)) < PIECE + 100_000
    assert write_buffer.held == 2_000_000, "what was given to the socket counts until it reads again"
    write_buffer.unclog()
    assert write_buffer.held == 2_000_000 - 300_000
    clogging(write_buffer, written, 1 << 40)
    write_buffer.unclog()
    assert b"".join(written) == b"".join(pieces)
    assert write_buffer.held == write_buffer.round.held == 0


def test_qos_0_is_lost_and_counted() -> None:
    write_buffer, written, _ = write_buffer_of()
    clogging(write_buffer, written, 1)
    write_buffer.write(b"first")
    run = publish(0, 0) * 3 + publish(0, 0, size=200)
    for data in (run, PINGRESP, publish(7, 1), publish(8, 2), b"\x31" + publish(0, 0)[1:]):
        write_buffer.write(data)
    write_buffer.lose()
    assert write_buffer.chunks == [PINGRESP, publish(7, 1), publish(8, 2)]
    assert write_buffer.dropped == write_buffer.round.dropped == 5


def test_a_connection_that_ends_holds_nothing() -> None:
    write_buffer, written, _ = write_buffer_of()
    clogging(write_buffer, written, 1)
    write_buffer.write(b"first")
    write_buffer.write(b"second")
    write_buffer.shut()
    assert write_buffer.held == write_buffer.round.held == 0


async def test_too_many_unread_bytes_are_reduced_once_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    services = FakeDeliveryServices()
    services.settings.max_unread_bytes = 100
    services.path.round = round_ = FlushRound(lambda flush: None)
    delivery = as_delivery(FakeDelivery(services))
    relieved: list[object] = []
    monkeypatch.setattr(stalling, "relieve", relieved.append)
    stalling.watch(delivery)
    assert round_.most == 100
    for turns in (1, 2):
        for _ in range(3):
            round_.overfull()
        await asyncio.sleep(0)
        assert relieved == [delivery] * turns


@pytest.mark.sources
def test_all_gates_of_a_filter_count() -> None:
    """New messages may wait behind a consumer's, which wait behind retained ones."""
    found, message = Filter("a", (), cast(NatsConnection, None), False), Message(b"\0\1a", bytes(100), 0)
    choice = Choice(found, 0, b"", False)
    former = Gate(found, 1000)
    former.keep_back(choice, message)
    last = Gate(found, former.room, former)
    last.keep_back(choice, message)
    fake = FakeSlowReceiver(write_buffer_of()[0])
    fake.gates = {found: last}
    fake.write_buffer.held = 7
    client = as_receiver(fake)
    assert _held(client) == 7 + 2 * (message.size + ENTRY_BYTES)
    former.close()
    assert _held(client) == 7 + message.size + ENTRY_BYTES


class Bench:
    """A durable session whose packets are in a write buffer that is clogged."""

    def __init__(self, *, aliases: Aliases | None = None) -> None:
        self.ports = Recorder()
        self.machine = DurableSender(100, self.ports)
        self.source = source(1)
        self.machine.sources.append(self.source)
        self.machine.start()
        self.write_buffer, self.written, _ = write_buffer_of()
        clogging(self.write_buffer, self.written, 1)
        self.write_buffer.write(b"first")
        self.fake = FakeSlowReceiver(self.write_buffer, aliases)
        self.client = as_receiver(self.fake)
        self.side = cast(DurableDelivery, Side(self.machine, client=self.fake))
        self.fake.durable_side = self.side

    def stored(self, sequence: int, *, attempt: int = 1) -> bytes:
        self.machine.arrived(self.source, sequence, attempt, b"r%d.%d" % (sequence, attempt), None, 1)
        return self.put(packet_id(sequence))

    def shared(self, sequence: int) -> bytes:
        identifier = self.machine.allocate_packet_id(sequence)
        self.machine.share(SubscriptionState(1, 0), sequence, identifier, 1, None, b"s%d" % sequence)
        return self.put(identifier)

    def put(self, identifier: int) -> bytes:
        data = publish(identifier)
        self.write_buffer.write(data)
        return data


def test_only_what_comes_again_is_taken_back() -> None:
    bench = Bench()
    read = publish(packet_id(1))
    bench.machine.arrived(bench.source, 1, 1, b"r1", None, 1)  # its socket has it
    bench.stored(2)
    shared = bench.shared(7)
    bench.write_buffer.write(PINGRESP)
    bench.stored(3)
    retained_id = 50_000
    bench.machine.replay(bench.source, 848, 1, None, False)
    assert retained_id in bench.machine.inflight
    retained = bench.put(retained_id)
    _take_back(bench.client, bench.side)
    bench.machine.stop_sending()
    assert bench.write_buffer.chunks == [shared, PINGRESP, retained]
    assert read not in bench.write_buffer.chunks
    assert sorted(one.sequence for one in bench.machine.inflight.values()) == [-848, -7, 1]


@pytest.mark.parametrize("lowered", [True, False])
def test_what_a_lowered_subscription_has_sent_is_not_taken_back(lowered: bool) -> None:
    """Messages at QoS 0 would overtake it; those of an ended one come again."""
    bench = Bench()
    data = bench.stored(2)
    bench.source.end_at(2, whole=lowered)
    assert bench.machine.recallable(packet_id(2)) is not lowered
    _take_back(bench.client, bench.side)
    assert bench.write_buffer.chunks == ([data] if lowered else [])
    assert [one.sequence for one in bench.machine.inflight.values()] == ([2] if lowered else [])


def test_giving_up_leaves_nothing_of_what_readers_bring_again() -> None:
    """Readers stop where they are; what the socket has is in flight."""
    bench = Bench()
    bench.machine.limit = 2
    bench.fake.delivery.feed = feed = Feed()
    writer = bench.side.position_writer = cast("Any", Writer(moved=False))
    bench.stored(2)
    for sequence in (3, 4):
        bench.machine.arrived(bench.source, sequence, 1, b"r%d" % sequence, "body", 1)
    stall_session(bench.client, bench.side)
    assert (bench.side.stall is not None, bench.side.state) == (True, DeliveryState.NOT_READING)
    assert (feed.fake_left, writer.ledger.reached) == (["catching up", "reader"], 30)
    assert bench.write_buffer.chunks == []
    assert bench.machine.queued == []
    assert sorted(one.sequence for one in bench.machine.inflight.values()) == [3], "its socket has it"
    stall_session(bench.client, bench.side)
    assert len(feed.fake_left) == 2, "it is stalled already"


def test_a_session_that_is_being_resumed_is_not_given_up() -> None:
    bench = Bench()
    bench.machine.open = False
    stall_session(bench.client, bench.side)
    assert bench.side.stall is None


def test_aliases_that_may_be_lost_are_given_again() -> None:
    aliases = Aliases(10)
    assert aliases.give(b"t") == (1, False)
    bench = Bench(aliases=aliases)
    first = bench.stored(2)
    shared = bench.shared(7)
    bench.stored(3)
    _take_back(bench.client, bench.side)
    assert bench.write_buffer.chunks == [first, shared], "the second may use an alias that the first gives"
    assert aliases.give(b"t") == (1, False)


def test_what_was_never_sent_comes_again_without_dup_and_in_order() -> None:
    bench = Bench()
    machine, one = bench.machine, bench.source
    machine.arrived(one, 1, 1, b"r1", None, 1)  # its socket has it
    bench.stored(2)
    bench.stored(3, attempt=2)  # an earlier connection may have sent it
    bench.ports.take()
    _take_back(bench.client, bench.side)
    machine.stop_sending()
    machine.arrived(one, 4, 1, b"r4", None, 1)
    assert not machine.sent_at_once(one, 5, 1, b"r5")
    for sequence in (1, 2, 3, 4):
        machine.arrived(one, sequence, 2, b"again%d" % sequence, None, 1)
    assert bench.ports.take() == [], "nothing is sent while the client does not read"
    machine.go_on()
    assert bench.ports.take() == [("publish", 2, 1, False), ("publish", 3, 1, True), ("publish", 4, 1, False)]
    machine.acknowledged(4, [packet_id(1), packet_id(2)])
    assert bench.ports.take() == [("ack", b"r1"), ("ack", b"again2")]


class Feed(SharedFeed):
    """Notes the sessions that readers serve from now on, and whether their messages are kept back then."""

    def __init__(self) -> None:
        self.fake_served: list[int] = []
        self.fake_left: list[str] = []

    def reached(self, side: DurableDelivery) -> int:
        return 30

    def end_catching(self, side: DurableDelivery) -> None:
        self.fake_left.append("catching up")

    def remove(self, client: Receiver) -> None:
        self.fake_left.append("reader")

    def go_on(self, client: Receiver, side: DurableDelivery) -> None:
        self.fake_served += [one.source.held for one in side.bindings.values()]


class Writer:
    """In place of the writer of a session's position."""

    def __init__(self, *, moved: bool) -> None:
        self.fake_moved, self.fake_ended = moved, False
        self.ledger = SessionPosition()

    async def flush(self) -> bool:
        return not self.fake_moved

    def end_if_moved(self) -> None:
        self.fake_ended = True


class Stalled:
    """A stalled session whose client reads again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, moved: bool = False) -> None:
        bench = Bench()
        self.machine, self.source, self.ports = bench.machine, bench.source, bench.ports
        binding = ConsumerBinding("a", ConsumerRef("name", "deliver", "$MQTT.msgs.a", 10), self.source)
        binding.begin_after(0, removed=True)
        self.machine.drop_hold(self.source, SubscriptionState.RETURNING)
        self.machine.stop_sending()
        self.limited: list[object] = []
        self.asked: list[str] = []
        monkeypatch.setattr(stalling, "fetch_in_flight", self._fetch)
        monkeypatch.setattr(stalling, "limit_backlog", self._limit)
        for name in ("ask_again", "limit_in_flight"):
            monkeypatch.setattr(stalling, name, partial(self._note, name))
        self.client: Any = FakeReceiver(FakeDeliveryServices())
        self.client.delivery.feed = self.feed = Feed()
        self.stall, self.writer = SlowClient(), Writer(moved=moved)
        self.stall.wake()
        self.side: Any = Side(
            self.machine,
            DeliveryState.NOT_READING,
            bindings={"name": binding},
            stall=self.stall,
            client=self.client,
            position_writer=self.writer,
        )
        self.ports.take()

    async def _fetch(self, client: object, side: Any) -> None:
        self.machine.arrived(self.source, 2, 2, TAKEN + b"2", None, 1)

    async def _limit(self, client: object, side: object) -> None:
        self.limited.append(side)

    def _note(self, name: str, of: object) -> None:
        assert of is (self.client if name == "ask_again" else self.side)
        self.asked.append(name)


@pytest.mark.parametrize("moved", [False, True])
async def test_who_reads_again_goes_on_with_readers(monkeypatch: pytest.MonkeyPatch, moved: bool) -> None:
    """Nothing is sent when the session has another owner by now."""
    setup = Stalled(monkeypatch, moved=moved)
    await stalling._wake(setup.client, setup.side, setup.stall)
    state = DeliveryState.NOT_READING if moved else DeliveryState.LIVE
    assert (setup.side.state, setup.writer.fake_ended) == (state, moved)
    assert setup.feed.fake_served == ([] if moved else [SubscriptionState.RETURNING])
    assert setup.limited == ([] if moved else [setup.side]), "too much may have been stored meanwhile"
    assert setup.machine.crowd == (not moved), "kept back until the session is known to be this gateway's"
    assert setup.side.stall is (setup.stall if moved else None)
    assert setup.asked == ([] if moved else ["limit_in_flight", "ask_again"])
    setup.machine.drop_hold(setup.source, SubscriptionState.RETURNING)
    assert (("publish", 2, 1, True) in setup.ports.take()) is not moved


@pytest.mark.parametrize("stored", [True, False])
async def test_who_waits_for_messages_that_were_given_up_goes_on(monkeypatch: pytest.MonkeyPatch, stored: bool) -> None:
    """Behind them, or at once where they are not stored any more: no message of theirs will be sent."""
    closed: list[object] = []
    monkeypatch.setattr(draining, "close_gate", lambda client, gate: closed.append(gate))
    setup = Stalled(monkeypatch)
    gate = Gate(cast("Any", None), 1000)
    (binding,) = setup.side.bindings.values()
    binding.source.end_at(9, whole=True)
    binding.lowered([gate])
    binding.exhaust()

    async def fetch(client: object, side: Any) -> None:
        if stored:
            setup.machine.arrived(setup.source, 2, 2, TAKEN + b"2", None, 1)

    monkeypatch.setattr(stalling, "fetch_in_flight", fetch)
    draining.release_waiting(setup.side, binding)
    assert closed == []
    await stalling._wake(setup.client, setup.side, setup.stall)
    assert closed == ([] if stored else [gate])
    for job in setup.client.fake_jobs:
        job.close()


async def test_who_leaves_while_its_messages_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Stalled(monkeypatch)

    async def leave(client: object, side: object) -> None:
        setup.client.alive = False

    monkeypatch.setattr(stalling, "limit_backlog", leave)
    await stalling._wake(setup.client, setup.side, setup.stall)
    assert (setup.side.state, setup.feed.fake_served) == (DeliveryState.NOT_READING, [])


async def test_what_was_postponed_is_done_when_the_client_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subscriptions change in their order; with many of them nothing more is read from the client."""
    setup = Stalled(monkeypatch)
    held: list[int] = []
    monkeypatch.setattr(setup.client.connection, "hold", held.append, raising=False)
    monkeypatch.setattr(setup.client.connection, "release", lambda reason: held.remove(reason))
    done: list[int] = []

    async def work(number: int) -> None:
        done.append(number)

    setup.client.durable_side = setup.side
    for number in range(POSTPONED_MOST + 1):
        assert held == []
        assert postponed(setup.client, partial(work, number))
    assert held == [Hold.JOBS]
    await stalling._wake(setup.client, setup.side, setup.stall)
    await setup.client.fake_work()
    assert (done, held) == ([*range(POSTPONED_MOST + 1)], [])
    assert not postponed(setup.client, partial(work, 0))


@pytest.mark.parametrize("lowered", [True, False])
def test_what_waits_for_a_place_in_the_window_is_given_up_too(lowered: bool) -> None:
    """Not what a lowered subscription has left: messages at QoS 0 depend on it."""
    ports = Recorder()
    machine = DurableSender(1, ports)
    one, ended = source(1), source(1)
    machine.sources.extend([one, ended])
    machine.start()
    machine.arrived(one, 1, 1, b"r1", None, 1)
    machine.arrived(one, 2, 1, b"r2", "body", 1)
    machine.arrived(ended, 3, 1, b"r3", "body", 1)
    ended.end_at(3, whole=lowered)
    assert [one.body for one in machine.queued] == ["body", "body"]
    machine.stop_sending()
    assert [delivery.sequence for delivery in machine.queued] == ([3] if lowered else [])
    for sequence in (2, 3):
        machine.arrived(one, sequence, 2, b"again%d" % sequence, "body", 1)
    machine.acknowledged(4, [packet_id(1)])
    ports.take()
    machine.go_on()
    assert ports.take() == [("publish", 2, 1, False)]
    machine.acknowledged(4, [packet_id(2)])
    assert ports.take() == [("ack", b"again2"), ("publish", 3, 1, False)]
    machine.acknowledged(4, [packet_id(3)])
    assert ports.take() == [("ack", b"r3" if lowered else b"again3")]


def test_a_client_that_never_reads_is_let_go_before_its_consumers_are_removed() -> None:
    bench = Bench()
    bench.side.begin_stall(stall := SlowClient())
    services = FakeDeliveryServices()
    services.path.round = bench.write_buffer.round
    services.registry.connections.add(bench.client)
    delivery = as_delivery(FakeDelivery(services))
    delivery.waiting.add(bench.side)
    look_after(delivery)
    assert not bench.fake.fake_ended
    stall.since -= LONGEST
    look_after(delivery)
    assert bench.fake.fake_ended == ["the client has not read for too long"]
    assert LONGEST < BACKSTOP_S


@pytest.mark.parametrize("look", [look_after, relieve])
def test_a_failure_ends_one_session_and_not_the_gateway(
    look: Callable[[DeliveryServices], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The clock of the gateway looks after all sessions: the failure of one must not end the clock."""
    services = FakeDeliveryServices()
    services.settings.stall_time, services.settings.max_unread_bytes = -1.0, 9
    services.path.round = FlushRound(lambda flush: None)
    wrong, right = Bench(), Bench()
    wrong.side.state = DeliveryState.ENDED  # not known to happen while the session may send
    for number, bench in enumerate((wrong, right)):
        bench.write_buffer.held += 2 - number  # the larger one is emptied first
        services.registry.connections.add(bench.client)
        services.path.round.clogged.add(bench.write_buffer)
    look(as_delivery(FakeDelivery(services)))
    assert (wrong.fake.fake_ended, right.fake.fake_ended) == (["internal error"], [])
    assert right.side.state is DeliveryState.NOT_READING
    assert "ForbiddenTransition" in caplog.text


def test_a_delivery_that_was_sent_keeps_no_body() -> None:
    machine = DurableSender(10, Recorder())
    one = source(1)
    machine.sources.append(one)
    machine.start()
    machine.arrived(one, 1, 1, b"r1", "body", 1)
    sent: inflight.Delivery = machine.inflight[packet_id(1)]
    assert sent.body is None
