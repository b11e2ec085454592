# SPDX-License-Identifier: Apache-2.0
"""The check for slow clients looks at clients that it may concern, and at no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mqtt_nats.delivery.slow_clients import SlowClient, look_after
from mqtt_nats.delivery.states import DeliveryState
from mqtt_nats.protocol.durable_sender import DurableSender, packet_id
from mqtt_nats.transport.write_buffer import FlushRound, WriteBuffer
from tests.protocol.recorder import Recorder, session, source


def buffer(round_: FlushRound) -> WriteBuffer:
    return WriteBuffer(round_, 1 << 20)


class Body:
    """Stands for a stored message."""

    size = 100


class Watched:
    """A client with a durable session, and how often it was looked at."""

    def __init__(self, round_: FlushRound) -> None:
        self.outlet = buffer(round_)
        self.looks = 0
        self.side = Side(self)

    @property
    def durable_side(self) -> Side:
        self.looks += 1
        return self.side


class Side:
    """Stands for `DurableDelivery`, with a window of one message."""

    def __init__(self, client: Watched) -> None:
        self.client = client
        self.stall: SlowClient | None = None
        self.state = DeliveryState.PLAIN
        self.machine = DurableSender(1, Recorder())


def delivery_of(*clients: Watched, most: int = 1 << 30) -> Any:
    settings = SimpleNamespace(stall_time=1e9, max_unread_bytes=most)
    round_ = clients[0].outlet.round
    return SimpleNamespace(
        services=SimpleNamespace(settings=settings, path=SimpleNamespace(round=round_)),
        registry=SimpleNamespace(connections=set(clients)),
        waiting=set(),
    )


def test_a_message_that_waits_is_reported() -> None:
    one, held = source(), source()
    machine, ports = session(one, limit=1)
    machine.arrived(one, 1, 1, b"r1", None, 1)
    assert ports.waited == 0, "it was sent at once"
    machine.arrived(one, 2, 1, b"r2", None, 1)
    assert ports.waited == 1
    machine.replay(one, 7, 1, None, False)
    machine.share(one, 8, machine.free_id(8), 1, None, b"r8")
    assert ports.waited == 3
    machine.acknowledged(4, [packet_id(1)])
    held.hold(held.RETURNING)
    machine.sources.append(held)
    machine.arrived(held, 3, 1, b"r3", None, 1)
    assert ports.waited == 4


def test_nobody_looks_at_idle_clients() -> None:
    round_ = FlushRound(lambda flush: None)
    clients = [Watched(round_) for _ in range(3)]
    look_after(delivery_of(*clients))
    assert [client.looks for client in clients] == [0, 0, 0]


def test_who_does_not_read_is_looked_at_until_it_reads() -> None:
    round_ = FlushRound(lambda flush: None)
    clients = [Watched(round_) for _ in range(2)]
    delivery = delivery_of(*clients)
    clients[1].outlet.clog()
    look_after(delivery)
    assert clients[1].looks > clients[0].looks == 0
    clients[1].looks = 0
    clients[1].outlet.unclog()
    look_after(delivery)
    assert [client.looks for client in clients] == [0, 0]


def test_a_session_is_looked_at_while_it_is_stalled_or_messages_wait() -> None:
    round_ = FlushRound(lambda flush: None)
    stalled, waits, idle, ended = (Watched(round_) for _ in range(4))
    delivery = delivery_of(stalled, waits, idle)
    delivery.waiting = {one.side for one in (stalled, waits, idle, ended)}
    stalled.side.stall = ended.side.stall = SlowClient()
    one = source()
    waits.side.machine.sources.append(one)
    waits.side.machine.arrived(one, 1, 1, b"r1", Body(), 1)
    look_after(delivery)
    assert delivery.waiting == {stalled.side, waits.side}
    stalled.side.stall = None
    look_after(delivery)
    assert delivery.waiting == {waits.side}


def test_what_waits_counts_for_max_unread_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    relieved: list[object] = []
    monkeypatch.setattr("mqtt_nats.delivery.slow_clients.relieve", relieved.append)
    client = Watched(FlushRound(lambda flush: None))
    one = source()
    client.side.machine.sources.append(one)
    client.side.machine.arrived(one, 1, 1, b"r1", Body(), 1)
    for most, count in ((Body.size, 0), (Body.size - 1, 1)):
        delivery = delivery_of(client, most=most)
        delivery.waiting.add(client.side)
        look_after(delivery)
        assert len(relieved) == count


def test_the_round_knows_the_outlets_whose_clients_do_not_read() -> None:
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
