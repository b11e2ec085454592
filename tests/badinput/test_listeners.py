# SPDX-License-Identifier: Apache-2.0
"""Somebody listens to every subject of the account: durable sessions resume all the same, in order and at once.

nats-server refuses to change the deliver subject of a consumer while anybody listens to it.
"""

import secrets
from collections.abc import Iterator

import pytest

from tests.harness import raw
from tests.harness.bystanders import Paho
from tests.harness.gateway import Gateway
from tests.harness.raw import Raw, connect, publish
from tests.harness.waiting import eventually
from tests.integration.conftest import Stored, stored  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("unharmed", "listener")


@pytest.fixture
def listener(gateway: Gateway) -> Iterator[Paho]:
    with Paho(gateway.port) as client:
        client.subscribe("#", 1)
        yield client


def resumed(port: int, client_id: str) -> Raw:
    client = Raw(port)
    client.send(connect(client_id, clean=False))
    assert client.expect(raw.CONNACK).body == b"\1\0"
    return client


def test_what_was_in_flight_is_sent_again_first_and_in_order(gateway: Gateway) -> None:
    client_id = f"listened-{secrets.token_hex(4)}"
    with Raw.connected(gateway.port) as publisher:

        def send(first: int, last: int) -> None:
            for number in range(first, last):
                publisher.send(publish(client_id, b"%d" % number, qos=1, id=number + 1))
                publisher.expect(raw.PUBACK)

        with Raw.connected(gateway.port, client_id, clean=False) as client:
            assert client.subscribe((client_id, 1)) == [1]
            send(0, 5)
            found = [client.expect(raw.PUBLISH) for _ in range(5)]
            client.send(raw.ack(raw.PUBACK, found[0].id) + raw.ack(raw.PUBACK, found[2].id))
            client.ping()
        send(5, 10)
        with resumed(gateway.port, client_id) as client:
            again = [client.expect(raw.PUBLISH) for _ in range(8)]
            assert [one.payload for one in again] == [b"1", b"3", b"4", b"5", b"6", b"7", b"8", b"9"]
            assert [one.id for one in again[:3]] == [found[1].id, found[3].id, found[4].id]
            assert all(one.first & 8 for one in again[:3])
            send(10, 12)
            assert [client.expect(raw.PUBLISH).payload for _ in range(2)] == [b"10", b"11"]
    Raw.connected(gateway.port, client_id).close()


async def test_owed_pubrels_and_no_second_delivery(gateway: Gateway, stored: Stored) -> None:  # noqa: F811
    client_id = f"listened-{secrets.token_hex(4)}"
    with Raw.connected(gateway.port) as publisher:
        with Raw.connected(gateway.port, client_id, clean=False) as client:
            assert client.subscribe((client_id, 2)) == [2]
            for number in range(3):
                publisher.send(publish(client_id, b"%d" % number, qos=2, id=number + 1))
                publisher.expect(raw.PUBREC)
                publisher.send(raw.ack(raw.PUBREL, number + 1))
                publisher.expect(raw.PUBCOMP)
            found = [client.expect(raw.PUBLISH) for _ in range(3)]
            for one in found[:2]:
                client.send(raw.ack(raw.PUBREC, one.id))
                assert client.expect(raw.PUBREL).id == one.id
            client.send(raw.ack(raw.PUBCOMP, found[0].id))
            await stored.settled(client_id, inflight=1, owed=1)
        with resumed(gateway.port, client_id) as client:
            assert client.expect(raw.PUBREL).id == found[1].id
            one = client.expect(raw.PUBLISH)
            assert (one.payload, one.id, one.qos) == (b"2", found[2].id, 2)
            client.send(raw.ack(raw.PUBCOMP, found[1].id) + raw.ack(raw.PUBREC, one.id))
            assert client.expect(raw.PUBREL).id == one.id
            client.send(raw.ack(raw.PUBCOMP, one.id))
            assert client.ping() == []
            await stored.settled(client_id)
        with resumed(gateway.port, client_id) as client:
            assert client.ping() == []
            publisher.send(publish(client_id, b"last", qos=1, id=9))
            assert client.expect(raw.PUBLISH).payload == b"last"
    Raw.connected(gateway.port, client_id).close()


def test_takeover(gateway: Gateway) -> None:
    client_id = f"listened-{secrets.token_hex(4)}"
    with Raw.connected(gateway.port, client_id, clean=False) as former, Raw.connected(gateway.port) as publisher:
        assert former.subscribe((client_id, 1)) == [1]
        publisher.send(publish(client_id, b"first", qos=1, id=1))
        one = former.expect(raw.PUBLISH)
        with resumed(gateway.port, client_id) as owner:
            former.expect_closed()
            again = owner.expect(raw.PUBLISH)
            assert (again.payload, again.id) == (b"first", one.id)
            owner.send(raw.ack(raw.PUBACK, again.id))
            publisher.send(publish(client_id, b"second", qos=1, id=2))
            assert owner.expect(raw.PUBLISH).payload == b"second"
    Raw.connected(gateway.port, client_id).close()


def test_more_than_a_window_while_absent(gateway: Gateway) -> None:
    """What the listener alone has heard was delivered as far as JetStream knows."""
    client_id = f"listened-{secrets.token_hex(4)}"
    total = 250
    with Paho(gateway.port, client_id, clean=False) as client:
        client.subscribe(client_id, 2)
    with Paho(gateway.port) as publisher:
        for number in range(total):
            publisher.publish(client_id, b"%d" % number, 1 + number % 2)
        eventually(lambda: len(publisher.acknowledged) == total)
    with Paho(gateway.port, client_id, clean=False) as client:
        eventually(lambda: len(client.received) >= total)
        # Messages of different QoS need not keep their order.
        for parity in (0, 1):
            got = [payload for payload in client.payloads() if int(payload) % 2 == parity]
            assert got == [b"%d" % number for number in range(parity, total, 2)]
    Raw.connected(gateway.port, client_id).close()
