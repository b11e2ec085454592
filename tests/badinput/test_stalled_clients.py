# SPDX-License-Identifier: Apache-2.0
"""Clients of durable sessions that stop reading: what waits for them stays in JetStream, and comes when they read."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw, raw5
from tests.harness.bystanders import Bystanders
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, Received
from tests.harness.waiting import eventually

MIB = 1024 * 1024
PATIENCE = 30.0
SIZE = 100_000
COUNT = 90
"""Messages that are pending for a client: fewer than its window, more than what sockets hold."""

LEFT = "its messages wait in JetStream"
AGAIN = "reads again"
ENV = {"MQTT_NATS_STALL_TIME": "0.5"}


def rss(gateway: Gateway) -> int:
    found: int = psutil.Process(gateway.pid).memory_info().rss
    return found


@pytest.fixture
def name() -> str:
    return f"stalled{secrets.token_hex(4)}"


@pytest.fixture(scope="module")
def quick(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that soon takes a client for one that does not read."""
    gateway = Gateway(tmp_path_factory.mktemp("quick") / "log", nats_server.url, env=ENV)
    gateway.start()
    yield gateway
    gateway.process.discard()


def payload(number: int) -> bytes:
    return b"%06d" % number + bytes(SIZE - 6)


def fill(gateway: Gateway, topic: str, count: int = COUNT, *, qos: int = 1, first: int = 0) -> None:
    """Publish and wait for all acknowledgements."""
    with Raw.connected(gateway.port, patience=PATIENCE) as publisher:
        for number in range(first, first + count):
            publisher.send(raw.publish(topic, payload(number), qos=qos, id=number + 1))
            if qos == 2:
                assert publisher.expect(raw.PUBREC).id == number + 1
                publisher.send(raw.ack(raw.PUBREL, number + 1))
            assert publisher.expect(raw.PUBCOMP if qos == 2 else raw.PUBACK).id == number + 1


def stuck(port: int, client_id: str, topic: str, qos: int = 1) -> Raw:
    """A client of a durable session that has subscribed and reads nothing more."""
    client = Raw.connected(port, client_id, clean=False, receive_buffer=4096, patience=PATIENCE)
    assert client.subscribe((topic, qos)) == [qos]
    return client


def mentions(gateway: Gateway, client_id: str, text: str) -> int:
    return sum(repr(client_id) in line and text in line for line in gateway.log.splitlines())


def left(gateway: Gateway, client_id: str) -> None:
    """Wait until a client's messages are left to JetStream."""
    eventually(lambda: mentions(gateway, client_id, LEFT), PATIENCE, what="a stalled session")


def read(client: Raw, count: int, *, first: int = 0, dup: bool = False) -> list[Received]:
    """Receive and acknowledge ``count`` messages, which come once and in order."""
    found = []
    for number in range(first, first + count):
        while (one := client.receive(PATIENCE)) is not None and one.kind != raw.PUBLISH:
            assert one.kind in (raw.PUBREL, raw.PINGRESP, raw.SUBACK), one
            if one.kind == raw.PUBREL:
                client.send(raw.ack(raw.PUBCOMP, one.id))
        assert one is not None, "the gateway has closed"
        assert int(one.payload[:6]) == number
        assert len(one.payload) == SIZE
        assert dup or not one.first & 8, f"{number} has DUP"
        client.send(raw.ack(raw.PUBREC if one.qos == 2 else raw.PUBACK, one.id))
        found.append(one)
    return found


def quiet(client: Raw) -> None:
    """Nothing but what completes QoS 2 comes any more."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        try:
            one = client.receive(0.3)
        except TimeoutError:
            continue
        assert one is not None
        assert one.kind == raw.PUBREL, one
        client.send(raw.ack(raw.PUBCOMP, one.id))


@pytest.mark.parametrize("qos", [1, 2])
def test_it_gets_everything_when_it_reads(quick: Gateway, name: str, qos: int) -> None:
    """Once, in order, without DUP, since nothing was sent twice; and what comes later as ever."""
    with Bystanders(quick.port) as bystanders, stuck(quick.port, name, name, qos) as client:
        fill(quick, name, qos=qos)
        left(quick, name)
        fill(quick, name, 20, qos=qos, first=COUNT)  # goes beyond the window
        read(client, COUNT + 20)
        eventually(lambda: mentions(quick, name, AGAIN), PATIENCE)
        fill(quick, name, 3, qos=qos, first=COUNT + 20)
        read(client, 3, first=COUNT + 20)
        quiet(client)
        bystanders.check()
    Raw.connected(quick.port, name).close()


def test_it_stalls_again_and_again(quick: Gateway, name: str) -> None:
    with stuck(quick.port, name, name) as client:
        for turn in range(3):
            fill(quick, name, first=turn * COUNT)
            eventually(lambda turn=turn: mentions(quick, name, LEFT) > turn, PATIENCE)  # type: ignore[misc]
            read(client, COUNT, first=turn * COUNT)
        quiet(client)
    Raw.connected(quick.port, name).close()


def test_subscriptions_of_a_stalled_client_wait_for_it(quick: Gateway, name: str) -> None:
    """What another subscription has left to the one that ends must not be lost; both answers come in order."""
    with stuck(quick.port, name, f"{name}/#") as client:
        client.send(raw.subscribe((f"{name}/+", 1), id=2))
        assert client.expect(raw.SUBACK).id == 2
        fill(quick, f"{name}/a")
        left(quick, name)
        # Of two that began at the same message the one with the lower subject delivers: * comes before >.
        client.send(raw.unsubscribe(f"{name}/+", id=3) + raw.subscribe((f"{name}/x/#", 1), id=4))
        read(client, 5)
        found: list[Received] = []
        numbers = list(range(5))
        while len(found) < 2 or len(numbers) < COUNT:
            one = client.receive(PATIENCE)
            assert one is not None
            if one.kind == raw.PUBLISH:
                numbers.append(int(one.payload[:6]))
                client.send(raw.ack(raw.PUBACK, one.id))
            else:
                found.append(one)
        assert numbers == list(range(COUNT))
        assert [(one.kind, one.id) for one in found] == [(raw.UNSUBACK, 3), (raw.SUBACK, 4)]
        fill(quick, f"{name}/x/y", 2)
        read(client, 2)
        quiet(client)
    Raw.connected(quick.port, name).close()


def test_another_connection_takes_a_stalled_session(quick: Gateway, name: str) -> None:
    with stuck(quick.port, name, name) as client:
        fill(quick, name)
        left(quick, name)
        with Raw.connected(quick.port, name, clean=False, patience=PATIENCE) as second:
            read(second, COUNT, dup=True)  # nobody knows what the first connection has got
            quiet(second)
        client.socket.settimeout(PATIENCE)
        while client.socket.recv(MIB):
            pass
    Raw.connected(quick.port, name).close()


def test_a_stalled_client_that_is_not_heard_of_is_closed(quick: Gateway, name: str) -> None:
    with Raw.connected(quick.port, name, clean=False, keepalive=4, receive_buffer=4096, patience=PATIENCE) as client:
        assert client.subscribe((name, 1)) == [1]
        fill(quick, name)
        left(quick, name)
        eventually(lambda: mentions(quick, name, "keep alive timeout"), PATIENCE)
    with Raw.connected(quick.port, name, clean=False, patience=PATIENCE) as client:
        read(client, COUNT, dup=True)
        quiet(client)
    Raw.connected(quick.port, name).close()


@pytest.mark.parametrize("kill", [False, True], ids=["restarted", "killed"])
def test_nats_is_away_while_a_client_is_stalled(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, name: str, kill: bool
) -> None:
    """Its consumers stay alone until it reads; a server that was killed may have forgotten what it had delivered."""
    nats = nats_factory()
    gateway = gateway_factory(nats, env=ENV)
    with stuck(gateway.port, name, name) as client:
        fill(gateway, name)
        left(gateway, name)
        (nats.kill if kill else nats.stop)()
        eventually(lambda: "connection to NATS is lost" in gateway.log, PATIENCE)
        nats.start()
        fill(gateway, name, 5, first=COUNT)
        assert not mentions(gateway, name, AGAIN)
        read(client, COUNT + 5)
        quiet(client)


def test_aliases_of_a_client_that_stalls(quick: Gateway, name: str) -> None:
    """What gave an alias may not have been sent: it is given again."""
    client = Raw(quick.port, receive_buffer=4096, patience=PATIENCE)
    with client:
        parts = (raw5.prop(raw5.ALIAS_MAXIMUM, 5), raw5.prop(raw5.SESSION_EXPIRY, 100))
        client.send(raw5.connect(name, *parts, clean=True))
        assert client.expect(raw.CONNACK).body[1] == 0
        client.send(raw5.subscribe((f"{name}/#", 1)))
        assert client.expect(raw.SUBACK).kind == raw.SUBACK
        for start in range(0, COUNT, 30):
            fill(quick, f"{name}/{start}", 30, first=start)
        left(quick, name)
        topics: dict[int, str] = {}
        for number in range(COUNT):
            one = client.expect(raw.PUBLISH, PATIENCE)
            size = int.from_bytes(one.body[:2], "big")
            topic = one.body[2 : 2 + size].decode()
            at = 2 + size + 2
            assert one.body[at : at + 2] == bytes((3, raw5.ALIAS)), "one property: the alias"
            alias = int.from_bytes(one.body[at + 2 : at + 4], "big")
            if topic:
                topics[alias] = topic
            assert topics[alias] == f"{name}/{number // 30 * 30}"
            assert int(one.body[at + 4 : at + 10]) == number
            client.send(raw.ack(raw.PUBACK, one.id))
    Raw.connected(quick.port, name).close()


def test_too_much_for_all_who_do_not_read(nats_server: NatsServer, gateway_factory: GatewayFactory, name: str) -> None:
    """Those with the most are left to JetStream at once; nobody else notices, and nothing is lost."""
    limit = 16 * MIB
    gateway = gateway_factory(nats_server, env={"MQTT_NATS_MAX_UNREAD_BYTES": str(limit)})
    with Bystanders(gateway.port) as bystanders:
        clients = [stuck(gateway.port, f"{name}{number}", f"{name}/{number}") for number in range(8)]
        try:
            before = rss(gateway)
            for number in range(len(clients)):
                fill(gateway, f"{name}/{number}", 80)
            assert rss(gateway) - before < limit + 60 * MIB
            eventually(lambda: sum(mentions(gateway, f"{name}{number}", LEFT) for number in range(8)) >= 3, PATIENCE)
            for client in clients:
                read(client, 80)
            bystanders.check()
        finally:
            for client in clients:
                client.close()


def test_too_much_that_cannot_be_had_again(nats_server: NatsServer, gateway_factory: GatewayFactory, name: str) -> None:
    """QoS 0 is dropped; a regular session with too much that may not be lost is ended."""
    env = {"MQTT_NATS_MAX_UNREAD_BYTES": str(4 * MIB), "MQTT_NATS_MAX_INFLIGHT": "1000"}
    gateway = gateway_factory(nats_server, env=env)
    with (
        Bystanders(gateway.port) as bystanders,
        Raw.connected(gateway.port, f"{name}0", receive_buffer=4096, patience=PATIENCE) as loses,
        Raw.connected(gateway.port, f"{name}1", receive_buffer=4096, patience=PATIENCE) as ended,
        Raw.connected(gateway.port, patience=PATIENCE) as publisher,
    ):
        assert loses.subscribe((f"{name}/0", 0)) == [0]
        assert ended.subscribe((f"{name}/1", 1)) == [1]
        for number in range(150):
            publisher.send(raw.publish(f"{name}/0", payload(number)))
            publisher.ping()
        eventually(lambda: "the longest queues are emptied" in gateway.log, PATIENCE)
        assert not mentions(gateway, f"{name}0", "does not read")
        fill(gateway, f"{name}/1", 150)
        eventually(lambda: mentions(gateway, f"{name}1", "max_unread_bytes is exceeded"), PATIENCE)
        publisher.send(raw.publish(f"{name}/0", payload(999)))
        publisher.ping()
        numbers: list[int] = []
        while not numbers or numbers[-1] != 999:
            numbers.append(int(loses.expect(raw.PUBLISH, PATIENCE).payload[:6]))
        assert numbers == sorted(numbers)
        assert len(numbers) < 151
        bystanders.check()


def test_too_much_waits_for_a_client_that_acknowledges_slowly(
    nats_server: NatsServer, gateway_factory: GatewayFactory, name: str
) -> None:
    """It reads, but takes one message at a time: what its many subscriptions bring meanwhile is left to JetStream."""
    gateway = gateway_factory(nats_server, env=ENV | {"MQTT_NATS_MAX_UNREAD_BYTES": str(MIB)})
    count = 20
    with Bystanders(gateway.port) as bystanders, Raw(gateway.port, patience=PATIENCE) as client:
        parts = (raw5.prop(raw5.RECEIVE_MAXIMUM, 1), raw5.prop(raw5.SESSION_EXPIRY, 100))
        client.send(raw5.connect(name, *parts, clean=True))
        assert client.expect(raw.CONNACK).body[1] == 0
        for number in range(count):
            client.send(raw5.subscribe((f"{name}/{number}", 1), id=number + 1))
            assert client.expect(raw.SUBACK).id == number + 1
        for number in range(count):
            fill(gateway, f"{name}/{number}", 2)
        # The session is stalled by now, unless it still has a reader of its own, which keeps no more than its share.
        wanted = {(f"{name}/{number}", of) for number in range(count) for of in range(2)}
        latest: dict[str, int] = {}
        while wanted:
            one = client.expect(raw.PUBLISH, PATIENCE)
            at = 2 + len(one.topic.encode()) + 2 + 1
            of = int(one.body[at : at + 6])
            wanted.remove((one.topic, of))  # once
            assert of > latest.get(one.topic, -1)
            latest[one.topic] = of
            client.send(raw.ack(raw.PUBACK, one.id))
        bystanders.check()
    Raw.connected(gateway.port, name).close()
