# SPDX-License-Identifier: Apache-2.0
"""The check for slow clients looks at clients that it may concern, and at no others."""

from __future__ import annotations

from typing import cast

import pytest

from mqtt_nats.client.client import Client
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.delivery.receiver import DeliveryServices
from mqtt_nats.delivery.slow_clients import SlowClient, look_after
from mqtt_nats.delivery.states import DeliveryState
from mqtt_nats.messages.message import Message
from mqtt_nats.protocol.durable_sender import DurableSender, packet_id
from mqtt_nats.transport.write_buffer import FlushRound, WriteBuffer
from tests.delivery.fakes import FakeDelivery, FakeDeliveryServices, as_delivery
from tests.harness.doubles import stands_for
from tests.protocol.recorder import Recorder, session, source


def buffer(round_: FlushRound) -> WriteBuffer:
    write_buffer = WriteBuffer(round_, 1 << 20)
    write_buffer.send_by(lambda data: None)
    return write_buffer


@stands_for(Message)
class FakeMessage:
    """Stands for `Message`, which is stored."""

    size = 100


@stands_for(Client)
class FakeWatched:
    """Stands for `Client` with a durable session: how often it was looked at."""

    def __init__(self, round_: FlushRound) -> None:
        self.write_buffer = buffer(round_)
        self.fake_looks = 0
        self.fake_side = FakeWatchedSide(self)

    @property
    def durable_side(self) -> FakeWatchedSide:
        self.fake_looks += 1
        return self.fake_side


@stands_for(DurableDelivery)
class FakeWatchedSide:
    """Stands for `DurableDelivery`, with a window of one message."""

    def __init__(self, client: FakeWatched) -> None:
        self.client = client
        self.stall: SlowClient | None = None
        self.state = DeliveryState.LIVE
        self.machine = DurableSender(1, Recorder())


def delivery_of(*clients: FakeWatched, most: int = 1 << 30) -> DeliveryServices:
    services = FakeDeliveryServices()
    services.settings.max_unread_bytes = most
    services.path.round = clients[0].write_buffer.round
    services.registry.connections |= {cast("Client", client) for client in clients}
    return as_delivery(FakeDelivery(services))


def sides(*clients: FakeWatched) -> set[DurableDelivery]:
    return {cast("DurableDelivery", client.fake_side) for client in clients}


def test_a_message_that_waits_is_reported() -> None:
    one, held = source(), source()
    machine, ports = session(one, limit=1)
    machine.arrived(one, 1, 1, b"r1", None, 1)
    assert ports.waited == 0, "it was sent at once"
    machine.arrived(one, 2, 1, b"r2", None, 1)
    assert ports.waited == 1
    machine.replay(one, 7, 1, None, False)
    machine.share(one, 8, machine.allocate_packet_id(8), 1, None, b"r8")
    assert ports.waited == 3
    machine.acknowledged(4, [packet_id(1)])
    held.hold(held.RETURNING)
    machine.sources.append(held)
    machine.arrived(held, 3, 1, b"r3", None, 1)
    assert ports.waited == 4


def test_nobody_looks_at_idle_clients() -> None:
    round_ = FlushRound(lambda flush: None)
    clients = [FakeWatched(round_) for _ in range(3)]
    look_after(delivery_of(*clients))
    assert [client.fake_looks for client in clients] == [0, 0, 0]


def test_who_does_not_read_is_looked_at_until_it_reads() -> None:
    round_ = FlushRound(lambda flush: None)
    clients = [FakeWatched(round_) for _ in range(2)]
    delivery = delivery_of(*clients)
    clients[1].write_buffer.clog()
    look_after(delivery)
    assert clients[1].fake_looks > clients[0].fake_looks == 0
    clients[1].fake_looks = 0
    clients[1].write_buffer.unclog()
    look_after(delivery)
    assert [client.fake_looks for client in clients] == [0, 0]


def test_a_session_is_looked_at_while_it_is_stalled_or_messages_wait() -> None:
    round_ = FlushRound(lambda flush: None)
    stalled, waits, idle, ended = (FakeWatched(round_) for _ in range(4))
    delivery = delivery_of(stalled, waits, idle)
    delivery.waiting |= sides(stalled, waits, idle, ended)
    stalled.fake_side.stall = ended.fake_side.stall = stall = SlowClient()
    stall.wake()
    one = source()
    waits.fake_side.machine.sources.append(one)
    waits.fake_side.machine.arrived(one, 1, 1, b"r1", FakeMessage(), 1)
    look_after(delivery)
    assert delivery.waiting == sides(stalled, waits)
    stalled.fake_side.stall = None
    look_after(delivery)
    assert delivery.waiting == sides(waits)


def test_what_waits_counts_for_max_unread_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    relieved: list[object] = []
    monkeypatch.setattr("mqtt_nats.delivery.slow_clients.relieve", relieved.append)
    client = FakeWatched(FlushRound(lambda flush: None))
    one = source()
    client.fake_side.machine.sources.append(one)
    client.fake_side.machine.arrived(one, 1, 1, b"r1", FakeMessage(), 1)
    for most, count in ((FakeMessage.size, 0), (FakeMessage.size - 1, 1)):
        delivery = delivery_of(client, most=most)
        delivery.waiting |= sides(client)
        look_after(delivery)
        assert len(relieved) == count


def test_the_round_knows_the_write_buffers_whose_clients_do_not_read() -> None:
    round_, other = FlushRound(lambda flush: None), FlushRound(lambda flush: None)
    one, two = buffer(round_), buffer(round_)
    one.clog()
    one.clog()
    two.clog()
    assert round_.clogged == {one, two}
    one.move(other)
    two.shut()
    assert (round_.clogged, other.clogged) == (set(), {one})
    one.send_by(lambda data: one.clog())
    one.write(b"x")
    one.unclog()
    assert other.clogged == {one}, "its socket is full again"
    one.send_by(lambda data: None)
    one.unclog()
    assert other.clogged == set()


def test_a_closed_connection_does_not_stay_among_those_that_do_not_read() -> None:
    """The job of a CONNECT may hold its answer back after the socket was closed: nobody would release it."""
    round_ = FlushRound(lambda flush: None)
    write_buffer = buffer(round_)
    write_buffer.shut()
    write_buffer.write(b"x")
    write_buffer.clog()
    write_buffer.write(b"y")
    write_buffer.flush()
    assert (round_.clogged, round_.held, write_buffer.held, write_buffer.chunks) == (set(), 0, 0, [])
