# SPDX-License-Identifier: Apache-2.0
"""For how long clients have kept messages: what a look every few seconds finds."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from mqtt_nats.client import kept_messages
from mqtt_nats.client.client import Client
from mqtt_nats.client.kept_messages import CLIENTS_PER_TURN, KeptMessages
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.protocol.durable_sender import DurableSender
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.transient_sender import TransientSender
from tests.harness.doubles import stands_for
from tests.protocol.recorder import PUBACK, PUBCOMP, PUBREC, Recorder, session, source


@stands_for(DurableDelivery)
class FakeSide:
    """Stands for `DurableDelivery`: its state machine."""

    def __init__(self, machine: DurableSender) -> None:
        self.machine = machine


@stands_for(TransientSender)
class FakeRegular:
    """Stands for `TransientSender`: packet identifiers in flight."""

    def __init__(self, *identifiers: int) -> None:
        self.inflight = dict.fromkeys(identifiers, 1)


@stands_for(Client)
class FakeClient:
    """Stands for `Client`: one side of a session, or none yet."""

    def __init__(self, *, durable: FakeSide | None = None, regular: FakeRegular | None = None) -> None:
        self.durable_side, self.regular_side = durable, regular


class Bench:
    """Looks at clients, at times that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.kept = KeptMessages(lambda: self.now)
        self.clients: list[Client] = []

    def add(self, client: FakeClient) -> Client:
        self.clients.append(cast("Client", client))
        return self.clients[-1]

    def durable(self) -> tuple[Client, DurableSender, Recorder, SubscriptionState]:
        one = source()
        machine, ports = session(one)
        return self.add(FakeClient(durable=FakeSide(machine))), machine, ports, one

    async def look(self, after: float = 0.0) -> None:
        self.now += after
        await self.kept.look_at_clients(self.clients)


async def test_a_message_is_kept_since_the_first_look_that_has_seen_it() -> None:
    bench = Bench()
    client, machine, _, one = bench.durable()
    await bench.look()
    assert bench.kept.age(client) is None
    machine.arrived(one, 5, 1, b"r5", None, 1)
    assert bench.kept.age(client) is None
    await bench.look(5.0)
    machine.arrived(one, 6, 1, b"r6", None, 1)
    await bench.look(60.0)
    assert bench.kept.age(client) == 60.0
    machine.acknowledged(PUBACK, [7])
    await bench.look(60.0)
    assert bench.kept.age(client) == 120.0
    machine.arrived(one, 7, 1, b"r7", None, 1)
    machine.acknowledged(PUBACK, [6])
    assert bench.kept.age(client) is None
    await bench.look(5.0)
    assert bench.kept.age(client) == 0.0


async def test_a_pubrel_without_an_answer_is_kept_while_other_messages_come_and_go() -> None:
    bench = Bench()
    client, machine, _, one = bench.durable()
    machine.arrived(one, 5, 1, b"r5", None, 2)
    machine.acknowledged(PUBREC, [6])
    machine.pubrel_stored(6)
    for sequence in (6, 7, 8):
        machine.arrived(one, sequence, 1, b"r", None, 1)
        await bench.look(30.0)
        machine.acknowledged(PUBACK, [sequence + 1])
    assert bench.kept.age(client) == 60.0
    machine.pubrel_delivered(6, 5, b"record")
    machine.confirmed(6)
    machine.acknowledged(PUBCOMP, [6])
    assert bench.kept.age(client) is None


async def test_a_regular_session_keeps_messages_too() -> None:
    bench = Bench()
    regular = FakeRegular(5, 6)
    client = bench.add(FakeClient(regular=regular))
    await bench.look()
    await bench.look(10.0)
    assert bench.kept.age(client) == 10.0
    del regular.inflight[5]
    assert bench.kept.age(client) is None


async def test_clients_that_have_gone_are_forgotten() -> None:
    """And nothing is kept of those that keep nothing, or have no session yet."""
    bench = Bench()
    client = bench.add(FakeClient(regular=FakeRegular(1)))
    bench.add(FakeClient())
    await bench.look()
    assert list(bench.kept._known) == [client]
    bench.clients.clear()
    await bench.look()
    assert not bench.kept._known


async def test_a_look_at_many_clients_gives_way() -> None:
    bench = Bench()
    for _ in range(2 * CLIENTS_PER_TURN):
        bench.add(FakeClient())
    other = asyncio.create_task(asyncio.sleep(0))
    await bench.look()
    assert other.done()


async def test_a_look_frees_identifiers_of_messages_that_do_not_come_again() -> None:
    bench = Bench()
    one = source()
    machine, ports = session(one, started=False)
    machine.restore_identifiers({5: 9})
    machine.start()
    bench.add(FakeClient(durable=FakeSide(machine)))
    one.deliver_to(5)
    await bench.look()
    assert ports.take() == [("end allocation", 5, 9)]


async def test_looks_go_on_after_an_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kept_messages, "KEPT_CHECK_S", 0.0)
    looks: list[Any] = []

    async def look(clients: object) -> None:
        looks.append(clients)
        raise RuntimeError if len(looks) == 1 else asyncio.CancelledError

    kept = KeptMessages()
    monkeypatch.setattr(kept, "look_at_clients", look)
    with pytest.raises(asyncio.CancelledError):
        await kept.watch_clients([])
    assert len(looks) == 2
    assert "the search for messages that clients keep failed" in caplog.text
