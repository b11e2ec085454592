# SPDX-License-Identifier: Apache-2.0
"""JetStream's storage is full: who needs no store is served, who is connected stays, durable sessions have to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import nats
import pytest

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw, raw5
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, ack, connect, packet, publish
from tests.harness.raw5 import Raw5
from tests.harness.waiting import eventually

LEASE = 4  # seconds
REGIMES = ["consumers", "records"]
DURABLE = raw5.prop(0x11, 3600)


def purge(server: NatsServer) -> None:
    """Make room."""

    async def run() -> None:
        client = await nats.connect(server.url)
        await client.jetstream().purge_stream("$MQTT_msgs")
        await client.close()

    asyncio.run(run())


def limit(server: NatsServer, max_bytes: int) -> None:
    """Let the stream of messages take so many bytes, and refuse more; -1 = no limit."""

    async def run() -> None:
        client = await nats.connect(server.url)
        js = client.jetstream()
        config = (await js.stream_info("$MQTT_msgs")).config
        config.max_bytes = max_bytes
        config.discard = nats.js.api.DiscardPolicy.NEW if max_bytes > 0 else nats.js.api.DiscardPolicy.OLD
        await js.update_stream(config)
        await client.close()

    asyncio.run(run())


def fill(port: int) -> None:
    """Publish by 5.0, in smaller and smaller messages, until not even an empty one is stored."""
    with Raw5.open(port, "filler") as client:
        number = 0
        for size in (60_000, 4000, 0):
            while True:
                number += 1
                client.send(raw5.publish("fill", bytes(size), qos=1, id=number))
                if client.answer(raw.PUBACK, number).reasons == (0x97,):
                    break


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory(config="jetstream { max_file_store: 3MB }")


@pytest.fixture(params=REGIMES)
def gateway(request: pytest.FixtureRequest, server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(server, "--session-positions", request.param, "--gateway-lease", str(LEASE))


@pytest.fixture
def unrenewed(gateway: Gateway) -> Gateway:
    """A gateway whose lease has ended since there is no room."""
    fill(gateway.port)
    eventually(lambda: "the lease of the gateway is not renewed" in gateway.log.partition("not ready: ")[2])
    return gateway


def echoed(client: Raw, topic: str) -> None:
    """What a client publishes at QoS 0 comes back to it."""
    client.send(publish(topic, b"x"))
    assert client.expect(raw.PUBLISH).payload == b"x"


def test_clean_sessions_are_served(unrenewed: Gateway, server: NatsServer) -> None:
    """Also when the lease has ended, at QoS 0, and at QoS 1 and 2 as soon as there is room again."""
    with Raw.connected(unrenewed.port, "old") as old, Raw5.open(unrenewed.port, "new") as new:
        assert old.subscribe(("a", 0)) == [0]
        echoed(old, "a")
        assert new.subscribed(("a/5", 0)) == (0,)
        for client in (old, new):
            assert client.ping() == []
        with Raw.connected(unrenewed.port, "again") as again:
            again.subscribe(("again", 2))
            echoed(again, "again")
        with Raw.connected(unrenewed.port, "again") as again:
            assert again.ping() == []
        purge(server)
        old.send(publish("a", b"stored", qos=1, id=1))
        found = [old.receive(), old.receive()]
        assert {one.kind for one in found if one} == {raw.PUBACK, raw.PUBLISH}
    eventually(lambda: "ready again" in unrenewed.log)


def test_a_client_id_has_one_connection(
    unrenewed: Gateway, server: NatsServer, gateway_factory: GatewayFactory
) -> None:
    """[MQTT-3.1.4-2] (3.1.1): at whichever gateway the later one comes; and when there is room, too."""
    second = gateway_factory(server, "--gateway-lease", str(LEASE), start=False)
    with Raw.connected(unrenewed.port, "one") as first, Raw.connected(unrenewed.port, "one") as other:
        assert first.expect_closed() == []
        assert other.ping() == []
        purge(server)
        second.start()
        with Raw.connected(second.port, "one") as elsewhere:
            assert other.expect_closed() == []
            assert elsewhere.ping() == []


def test_two_gateways_without_room(server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """[MQTT-3.1.4-2] (3.1.1): a claim that is not stored is heard as well."""
    one, other = (gateway_factory(server, "--gateway-lease", "300") for _ in range(2))
    fill(one.port)
    with Raw.connected(one.port, "client") as first, Raw.connected(other.port, "client") as second:
        assert first.expect_closed() == []
        assert second.ping() == []
        with Raw.connected(one.port, "client") as third:
            assert second.expect_closed() == []
            assert third.ping() == []
            server.restart()
            eventually(lambda: "connected to NATS again" in one.log)
            assert third.subscribe(("t", 0)) == [0]
            echoed(third, "t")
            purge(server)
            third.send(publish("t", b"y", qos=1, id=9))
            found = [third.receive(), third.receive()]
            assert {each.kind for each in found if each} == {raw.PUBACK, raw.PUBLISH}


@pytest.mark.parametrize("client_id", ["new", "known"])
def test_durable_sessions_are_refused(gateway: Gateway, server: NatsServer, client_id: str) -> None:
    """With the reason that there is no room; a session that was there is not touched."""
    with Raw.connected(gateway.port, "known", clean=False) as client:
        assert client.subscribe(("t", 1)) == [1]
    fill(gateway.port)
    for clean in (True, False) if client_id == "known" else (False,):
        with Raw(gateway.port) as client:
            client.send(connect(client_id, clean=clean))
            (answer,) = client.expect_closed()
            assert answer.body == b"\0\x03"
    with Raw5(gateway.port) as five:
        five.send(raw5.connect(client_id, DURABLE, clean=False))
        assert raw5.answer(five.expect(raw.CONNACK)).reason == 0x97
    purge(server)
    with Raw(gateway.port) as client:
        client.send(connect(client_id, clean=False))
        assert client.expect(raw.CONNACK).body == (b"\1\0" if client_id == "known" else b"\0\0")


def test_a_will_needs_room(unrenewed: Gateway) -> None:
    """[MQTT-3.1.2-8] (3.1.1): it has to be stored before CONNACK."""
    with Raw(unrenewed.port) as client:
        client.send(connect("willing", flags=0x0E, tail=("will/full", "gone")))
        (answer,) = client.expect_closed()
        assert answer.body == b"\0\x03"


class Clients:
    """A durable subscriber, and publishers of both versions, connected before the storage is full."""

    def __init__(self, port: int) -> None:
        self.durable = Raw.connected(port, "durable", clean=False)
        assert self.durable.subscribe(("t", 1), ("u", 2)) == [1, 2]
        self.five = Raw5(port)
        self.five.send(raw5.connect("five", DURABLE, clean=False))
        assert raw5.answer(self.five.expect(raw.CONNACK)).reason == 0
        self.old = Raw.connected(port, "old")

    def close(self) -> None:
        for client in (self.durable, self.five, self.old):
            client.close()

    def queue(self) -> None:
        """Store messages for the durable client, which it does not acknowledge."""
        for number in range(1, 6):
            self.old.send(publish("t", b"%d" % number, qos=1, id=number))
            self.old.expect(raw.PUBACK)
        self.old.send(publish("u", b"6", qos=2, id=6))
        self.old.expect(raw.PUBREC)
        self.old.send(ack(raw.PUBREL, 6))
        self.old.expect(raw.PUBCOMP)

    def acknowledge(self) -> list[bytes]:
        """Have the durable client acknowledge what was queued; returns the payloads."""
        found = [self.durable.expect(raw.PUBLISH) for _ in range(6)]
        for one in found:
            self.durable.send(ack(raw.PUBACK if one.qos == 1 else raw.PUBREC, one.id))
        return [one.payload for one in found]


@pytest.fixture
def clients(gateway: Gateway) -> Iterator[Clients]:
    found = Clients(gateway.port)
    yield found
    found.close()


def complete(client: Raw, qos: int, id: int) -> None:
    """The acknowledgements of a publish come."""
    client.expect(raw.PUBACK if qos == 1 else raw.PUBREC)
    if qos == 2:
        client.send(ack(raw.PUBREL, id))
        client.expect(raw.PUBCOMP)


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("limited", [False, True], ids=["server", "stream"])
def test_publishers_stay(server: NatsServer, gateway: Gateway, clients: Clients, limited: bool, qos: int) -> None:
    """One of 3.1.1 gets no acknowledgement before there is room; one of 5.0 gets a reason."""
    if limited:
        limit(server, 1_000_000)
    fill(gateway.port)
    clients.old.send(publish("u", bytes(5000), qos=qos, id=11))
    if limited and qos == 2:
        clients.old.expect(raw.PUBREC)  # held in another stream, which has room
        clients.old.send(ack(raw.PUBREL, 11))
    else:
        clients.five.send(raw5.publish("u", bytes(5000), qos=qos, id=11))
        assert clients.five.answer(raw.PUBACK if qos == 1 else raw.PUBREC, 11, 0x97)
    for _ in range(3):
        assert clients.old.ping() == [], "nothing is acknowledged"
        assert clients.five.ping() == []
    if limited:
        limit(server, -1)
    else:
        purge(server)
    if limited and qos == 2:
        clients.old.expect(raw.PUBCOMP)
    else:
        complete(clients.old, qos, 11)
    assert clients.durable.expect(raw.PUBLISH).payload == bytes(5000)
    assert gateway.log.count("is disconnected") == 1, "the filler"


def test_a_durable_subscriber_stays(server: NatsServer, gateway: Gateway, clients: Clients) -> None:
    """What it acknowledges counts, although a position may have to wait for room; it gets nothing twice."""
    clients.queue()
    fill(gateway.port)
    assert clients.acknowledge() == [b"1", b"2", b"3", b"4", b"5", b"6"]
    eventually(lambda: "the lease of the gateway is not renewed" in gateway.log)
    clients.durable.send(packet(raw.PINGREQ << 4))
    early = clients.durable.receive()
    while early is not None and early.kind == raw.PUBREL:
        clients.durable.send(ack(raw.PUBCOMP, early.id))
        early = clients.durable.receive()
    assert early is not None
    assert early.kind == raw.PINGRESP
    clients.old.send(publish("t", b"7", qos=1, id=7))
    assert clients.old.ping() == []
    purge(server)
    clients.old.expect(raw.PUBACK)
    found = clients.durable.receive()
    while found is not None and found.kind == raw.PUBREL:
        clients.durable.send(ack(raw.PUBCOMP, found.id))
        found = clients.durable.receive()
    assert found is not None
    assert found.payload == b"7"
    assert gateway.log.count("is disconnected") == 1, "the filler"


def test_subscriptions_change_when_there_is_room(server: NatsServer, gateway: Gateway, clients: Clients) -> None:
    """SUBACK says that the record cannot be stored; UNSUBACK waits, and nothing else does."""
    fill(gateway.port)
    assert clients.durable.subscribe(("later", 1), id=5) == [0x80]
    assert clients.five.subscribed(("later", 1), id=5) == (0x97,)
    clients.durable.send(raw.unsubscribe("u", id=6))
    clients.durable.send(publish("zero", b"x"))
    assert clients.durable.ping() == []
    purge(server)
    assert clients.durable.expect(raw.UNSUBACK).id == 6
    assert clients.durable.subscribe(("later", 1), id=7) == [1]
    assert gateway.log.count("is disconnected") == 1, "the filler"


def test_a_restart_of_nats_that_makes_no_room(server: NatsServer, gateway: Gateway, clients: Clients) -> None:
    """Durable and clean clients stay, and work goes on when there is room."""
    fill(gateway.port)
    with Raw.connected(gateway.port, "late") as late:
        assert late.subscribe(("t", 0)) == [0]
        server.restart()
        eventually(lambda: "connected to NATS again" in gateway.log)
        clients.old.send(publish("t", b"waits", qos=1, id=1))
        assert late.expect(raw.PUBLISH).payload == b"waits"
        for client in (clients.old, clients.five, clients.durable, late):
            assert client.ping() == []
        purge(server)
        clients.old.expect(raw.PUBACK)
        assert clients.durable.expect(raw.PUBLISH).payload == b"waits"
    assert gateway.log.count("is disconnected") <= 2, "the filler, and the last"
