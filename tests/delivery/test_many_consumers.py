# SPDX-License-Identifier: Apache-2.0
"""A durable session with many filters is served before all of its dormant consumers are checked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mqtt_nats.delivery import dormant_consumers
from mqtt_nats.delivery.slow_clients import stall_session
from mqtt_streams.consumers import existing_consumer
from tests.base.support import Inside, running
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.proxy import Proxy
from tests.harness.raw import PINGRESP, PUBACK, PUBLISH, SUBACK, UNSUBACK, Raw, Received
from tests.harness.waiting import eventually

COUNT = 264
FILTERS = [f"many/{number:03}" for number in range(COUNT)]
PINGREQ = b"\xc0\0"


class Gate:
    """Keeps consumers from being checked."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.waiting: set[str] = set()
        """Names of consumers that are to be checked."""

    def open(self) -> None:
        """Let all be checked."""
        self._open.set()

    async def look(self, js: Any, stream: str, name: str, client_id: str) -> Any:
        """Takes the place of :func:`existing_consumer`."""
        while not self._open.is_set():
            self.waiting.add(name)
            await asyncio.sleep(0.01)
        return await existing_consumer(js, stream, name, client_id)


@contextmanager
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Have a gate in every gateway of this process."""
    gate = Gate()
    monkeypatch.setattr(dormant_consumers, "existing_consumer", gate.look)
    try:
        yield gate
    finally:
        gate.open()


def subscribed(inside: Inside, client_id: str) -> None:
    """A new session with all filters, whose client leaves."""
    Raw.connected(inside.ports[0], client_id).close()
    with Raw.connected(inside.ports[0], client_id, clean=False) as client:
        assert client.subscribe(*((text, 1) for text in FILTERS)) == [1] * COUNT
        client.send(b"\xe0\0")
        client.expect_closed()


def publish(inside: Inside, *topics: str) -> None:
    """A message on each topic, stored, with the topic as its payload."""
    with Raw.connected(inside.ports[0], "publisher") as publisher:
        for topic in topics:
            publisher.send(raw.publish(topic, topic.encode(), qos=1))
            publisher.expect(PUBACK)


def received(client: Raw, *, answered: bool = True) -> Received:
    """The next message, as the first time that it is sent."""
    found = client.expect(PUBLISH)
    if answered:
        client.send(raw.ack(PUBACK, found.id))
    return found


def end(inside: Inside, client_id: str) -> None:
    """End a session."""
    Raw.connected(inside.ports[0], client_id).close()


def test_a_ping_is_answered_before_a_long_subscribe(nats_server: NatsServer) -> None:
    filters = [(f"long/{number:04}", 1) for number in range(1000)]
    with running(nats_server.url) as inside, Raw.connected(inside.ports[0], "long", clean=False) as client:
        client.send(raw.subscribe(*filters) + PINGREQ)
        client.expect(PINGRESP)
        client.send(PINGREQ)
        client.expect(PINGRESP)
        assert client.expect(SUBACK).body[2:] == b"\1" * 1000
        client.close()
        end(inside, "long")


def test_messages_come_before_all_consumers_are_checked(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ping that comes with CONNECT, or after it, is answered first; what is stored meanwhile comes, once."""
    with running(nats_server.url) as inside:
        subscribed(inside, "early")
        publish(inside, FILTERS[-1], FILTERS[7])
        with gated(monkeypatch) as gate, Raw(inside.ports[0]) as client:
            client.send(raw.connect("early", clean=False) + PINGREQ)
            assert client.expect(raw.CONNACK).body == b"\1\0"
            client.expect(PINGRESP)
            assert {received(client).topic for _ in range(2)} == {FILTERS[-1], FILTERS[7]}
            eventually(lambda: gate.waiting)
            client.send(PINGREQ)
            client.expect(PINGRESP)
            publish(inside, *FILTERS)
            found = [received(client) for _ in FILTERS]
            assert [one.topic for one in found] == FILTERS
            assert not any(one.first & 8 for one in found), "nothing was sent before"
            client.send(raw.unsubscribe(FILTERS[3]) + PINGREQ)
            client.expect(PINGRESP)
            gate.open()
            client.expect(UNSUBACK)
            publish(inside, *FILTERS)
            again = [received(client).topic for _ in range(COUNT - 1)]
            assert sorted(again) == sorted({*FILTERS} - {FILTERS[3]})
            assert client.ping() == []
        end(inside, "early")


def test_what_was_in_flight_comes_first_and_in_order(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    topics = [FILTERS[-1], FILTERS[0], FILTERS[COUNT // 2]]
    with running(nats_server.url) as inside:
        subscribed(inside, "unanswered")
        with Raw.connected(inside.ports[0], "unanswered", clean=False) as client:
            served = inside.client("unanswered")
            eventually(lambda: not served.busy)
            for topic in topics:
                publish(inside, topic)
                assert received(client, answered=False).topic == topic
        eventually(
            lambda: not inside.call(lambda: inside.gateway.account and inside.gateway.account.registry.connections)
        )
        publish(inside, FILTERS[1])
        with (
            gated(monkeypatch),
            Raw.connected(inside.ports[0], "unanswered", clean=False) as client,
        ):
            found = [received(client) for _ in range(4)]
            assert [one.topic for one in found] == [*topics, FILTERS[1]]
            assert [one.first & 8 for one in found] == [8, 8, 8, 0]
        end(inside, "unanswered")


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
def test_a_session_that_moves_before_all_consumers_are_checked(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """The next connection has everything, from whichever gateway."""
    with (
        running(nats_server.url) as first,
        running(nats_server.url) as second,
    ):
        other = second if elsewhere else first
        subscribed(first, "moving")
        publish(first, FILTERS[5])
        with gated(monkeypatch) as gate, Raw.connected(first.ports[0], "moving", clean=False) as client:
            assert received(client).topic == FILTERS[5]
            eventually(lambda: gate.waiting)
            with Raw(other.ports[0]) as again:
                again.send(raw.connect("moving", clean=False))
                client.expect_closed()
                assert again.expect(raw.CONNACK).body == b"\1\0"
                gate.open()
                publish(other, *FILTERS)
                assert [received(again).topic for _ in FILTERS] == FILTERS
        end(other, "moving")


def test_a_client_that_leaves_before_all_consumers_are_checked(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(nats_server.url) as inside:
        subscribed(inside, "leaving")
        publish(inside, FILTERS[5])
        with gated(monkeypatch) as gate, Raw.connected(inside.ports[0], "leaving", clean=False) as client:
            assert received(client).topic == FILTERS[5]
            eventually(lambda: gate.waiting)
            client.send(b"\xe0\0")
            gate.open()
            client.expect_closed()
        publish(inside, *FILTERS)
        with Raw.connected(inside.ports[0], "leaving", clean=False) as client:
            assert [received(client).topic for _ in FILTERS] == FILTERS
        end(inside, "leaving")


def test_nats_is_lost_before_all_consumers_are_checked(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(nats_server.port) as proxy, running(proxy.url) as inside:
        subscribed(inside, "cut")
        publish(inside, FILTERS[5])
        with gated(monkeypatch) as gate, Raw.connected(inside.ports[0], "cut", clean=False) as client:
            assert received(client).topic == FILTERS[5]
            eventually(lambda: gate.waiting)
            account = inside.gateway.account
            assert account is not None
            nats = account.services.nats
            wire = nats.link.wire
            proxy.cut()
            eventually(lambda: nats.link.wire is not wire)
            proxy.restore()
            eventually(lambda: nats.link.wire is not None and nats.online.is_set())
            gate.open()
            publish(inside, *FILTERS)
            assert [received(client).topic for _ in FILTERS] == FILTERS
        end(inside, "cut")


def test_a_client_stalls_before_all_consumers_are_checked(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(nats_server.url) as inside:
        subscribed(inside, "stalled")
        publish(inside, FILTERS[5])
        with gated(monkeypatch) as gate, Raw.connected(inside.ports[0], "stalled", clean=False) as client:
            assert received(client).topic == FILTERS[5]
            eventually(lambda: gate.waiting)
            served = inside.client("stalled")
            side = served.durable_side
            assert side is not None
            inside.call(lambda: stall_session(served, side))
            assert inside.call(lambda: side.stall is not None)
            publish(inside, *FILTERS)
            gate.open()
            assert [received(client).topic for _ in FILTERS] == FILTERS
            assert inside.call(lambda: side.stall is None)
        end(inside, "stalled")
