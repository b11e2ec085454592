# SPDX-License-Identifier: Apache-2.0
"""Limits of what is stored: retained messages in the whole cluster, and what waits for a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtt_nats.delivery.states import DeliveryState
from tests.base.support import PATIENCE, Inside, running
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import Raw5
from tests.harness.waiting import eventually


@pytest.fixture(scope="module")
def inside(nats_server: NatsServer) -> Iterator[Inside]:
    with running(nats_server.url, max_retained=3, max_backlog=10) as found:
        yield found


@pytest.fixture
def port(inside: Inside) -> int:
    return inside.ports[0]


def test_retained_messages_of_the_cluster(inside: Inside, port: int) -> None:
    """A topic that has one gets another; one more topic does not: a 5.0 client is told, and it is passed on."""
    account = inside.gateway.account
    assert account is not None
    with Raw5.open(port) as five, Raw.connected(port) as four, Raw.connected(port) as reader:
        assert reader.subscribe(("kept/#", 0)) == [0]
        for topic in ("kept/a", "kept/b", "kept/c", "kept/a"):
            five.deliver(topic, b"1", qos=1, flags=1)
        five.send(raw5.publish("kept/d", b"2", qos=1, id=9, flags=1))
        five.answer(raw5.PUBACK, 9, 0x97)
        for qos in (0, 1, 2):
            four.send(raw.publish("kept/d", b"%d" % qos, qos=qos, id=qos + 1, flags=1))
            if qos == 1:
                assert four.expect(raw.PUBACK).id == 2
            if qos == 2:
                assert four.expect(raw.PUBREC).id == 3
                four.send(raw.ack(raw.PUBREL, 3))
                assert four.expect(raw.PUBCOMP).id == 3
        five.send(raw5.publish("kept/d", b"3", qos=2, id=10, flags=1))
        five.answer(raw5.PUBREC, 10, 0)
        five.send(raw5.ack(raw5.PUBREL, 10))
        five.answer(raw5.PUBCOMP, 10, 0)
        assert {one.topic for one in reader.ping()} == {"kept/a", "kept/b", "kept/c", "kept/d"}
        assert account.services.counters.not_retained == 4
        with Raw.connected(port) as late:
            assert late.subscribe(("kept/#", 0)) == [0]
            assert sorted(one.topic for one in late.ping()) == ["kept/a", "kept/b", "kept/c"]
        five.deliver("kept/a", b"", qos=1, flags=1)  # removing one makes room
        five.deliver("kept/d", b"4", qos=1, flags=1)
        for topic in ("kept/b", "kept/c", "kept/d"):
            five.deliver(topic, b"", qos=1, flags=1)


def is_live(inside: Inside, client_id: str) -> bool:
    """Whether the shared reader serves a session."""
    side = inside.client(client_id).durable_side
    return side is not None and side.live


@pytest.mark.parametrize("qos", [1, 2])
def test_what_waits_for_a_session(inside: Inside, qos: int) -> None:
    """The newest are sent, in order; each subscription has its own number; what is new comes after them."""
    account, port = inside.gateway.account, inside.ports[0]
    assert account is not None
    name = f"backlog-{qos}"
    before = account.services.counters.passed_over
    with Raw.connected(port, name, clean=False) as client:
        assert client.subscribe((f"{name}/a", qos), (f"{name}/b", qos)) == [qos, qos]
        assert is_live(inside, name)
    with Raw.connected(port) as writer:
        for topic, count in (("a", 25), ("b", 10)):
            for number in range(count):
                writer.send(raw.publish(f"{name}/{topic}", b"%d" % number, qos=1, id=number + 1))
                assert writer.expect(raw.PUBACK, PATIENCE).id == number + 1
        with Raw.connected(port, name, clean=False, patience=PATIENCE) as client:
            found = [client.expect(raw.PUBLISH) for _ in range(20)]
            assert [one.payload for one in found if one.topic.endswith("a")] == [b"%d" % n for n in range(15, 25)]
            assert [one.payload for one in found if one.topic.endswith("b")] == [b"%d" % n for n in range(10)]
            assert account.services.counters.passed_over - before == 15
            for one in found:
                client.send(raw.ack(raw.PUBACK if one.qos == 1 else raw.PUBREC, one.id))
            writer.send(raw.publish(f"{name}/a", b"new", qos=1, id=100))
            assert writer.expect(raw.PUBACK).id == 100
            assert client.expect(raw.PUBLISH).payload == b"new"
            client.ping()
    with Raw.connected(port, name) as client:
        client.ping()


def test_a_client_that_is_there_and_falls_behind(inside: Inside) -> None:
    """It gets everything: what it has not acknowledged, what waits for its window, and what a reader brings later."""
    account, port = inside.gateway.account, inside.ports[0]
    assert account is not None
    before = account.services.counters.passed_over
    with Raw.connected(port, "behind", clean=False, patience=PATIENCE) as client, Raw.connected(port) as writer:
        assert client.subscribe(("behind", 1)) == [1]
        assert is_live(inside, "behind")
        for number in range(300):
            writer.send(raw.publish("behind", b"%d" % number, qos=1, id=number + 1))
        for number in range(300):
            assert writer.expect(raw.PUBACK, PATIENCE).id == number + 1
        side = inside.client("behind").durable_side
        assert side is not None
        eventually(lambda: side.state is DeliveryState.CATCHING_UP, PATIENCE)
        for number in range(300):
            found = client.expect(raw.PUBLISH)
            assert found.payload == b"%d" % number
            client.send(raw.ack(raw.PUBACK, found.id))
        client.ping()
    assert account.services.counters.passed_over == before
    with Raw.connected(port, "behind") as client:
        client.ping()
