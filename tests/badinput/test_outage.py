# SPDX-License-Identifier: Apache-2.0
"""NATS is away: nothing is acknowledged, nobody is disconnected, and afterwards nothing is missing."""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw
from tests.harness.bystanders import Bystanders, Paho
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, connect, publish, subscribe
from tests.harness.waiting import eventually

AWAY = 10.0  # seconds

RECOVERY = 40.0
"""Seconds in which all is as before: reconnection, a page of stored messages per filter, redelivery."""


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
def local(server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(server)


def killed(server: NatsServer) -> Callable[[], None]:
    server.kill()
    return server.start


def stopped(server: NatsServer) -> Callable[[], None]:
    server.stop()
    return server.start


def paused(server: NatsServer) -> Callable[[], None]:
    server.pause()
    return server.resume


@pytest.mark.slow
@pytest.mark.parametrize("away", [killed, stopped, paused])
def test_nats_is_gone_for_ten_seconds(
    server: NatsServer, local: Gateway, away: Callable[[NatsServer], Callable[[], None]]
) -> None:
    port = local.port
    with (
        Bystanders(port) as bystanders,
        Paho(port, "regular") as regular,
        Paho(port, "durable", clean=False) as durable,
        Paho(port, "absent", clean=False) as absent,
        Raw.connected(port, "publisher", patience=RECOVERY) as publisher,
        Raw.connected(port, "subscriber", patience=RECOVERY) as subscriber,
        contextlib.ExitStack() as stack,
    ):
        newcomer = stack.enter_context(Raw(port, patience=RECOVERY))
        regular.subscribe("t/+", 2)
        durable.subscribe("t/#", 2)
        absent.subscribe("t/1", 2)
        absent.close()
        publisher.send(publish("t/retained", b"before", qos=1, id=1, flags=1))
        publisher.expect(raw.PUBACK)
        for number in range(20):
            publisher.send(publish("t/1", b"before %d" % number, qos=1, id=2 + number))
        for number in range(20):
            assert publisher.expect(raw.PUBACK).id == 2 + number
        publisher.send(publish("t/2", b"half", qos=2, id=50))
        publisher.expect(raw.PUBREC)
        eventually(lambda: len(bystanders.delays) > 20)

        back = away(server)
        gone = time.monotonic()
        try:
            # What was begun: a release, publishes of each kind, a subscription, a connection.
            publisher.send(raw.ack(raw.PUBREL, 50))
            for number in range(20):
                publisher.send(publish("t/1", b"%d" % number, qos=1, id=100 + number))
                publisher.send(publish("t/2", b"%d" % number, qos=2, id=200 + number))
            publisher.send(publish("t/kept", b"meanwhile", qos=1, id=300, flags=1))
            assert publisher.ping() == []
            if away is not paused:  # who connects before it is known that NATS is away is refused
                eventually(lambda: "connection to NATS is lost" in local.log)
            subscriber.send(subscribe(("t/retained", 1), ("t/kept", 1)))
            newcomer.send(connect("newcomer"))
            while time.monotonic() - gone < AWAY:
                # PINGRESP comes, and no acknowledgement before it.
                assert publisher.ping() == []
                assert subscriber.ping() == []
                time.sleep(0.25)
            for paho in (regular, durable, bystanders.publisher, bystanders.regular, bystanders.durable):
                assert paho.disconnections == []
        finally:
            back()

        acknowledged: list[tuple[int, int]] = []
        while len(acknowledged) < 42:
            one = publisher.receive()
            assert one is not None
            acknowledged.append((one.kind, one.id))
            if one.kind == raw.PUBREC:
                publisher.send(raw.ack(raw.PUBREL, one.id))
        # In the order of the packets [MQTT-4.6.0-2] [MQTT-4.6.0-3].
        firsts = [one for one in acknowledged if one[0] in (raw.PUBACK, raw.PUBREC)]
        wanted = [pair for n in range(20) for pair in ((raw.PUBACK, 100 + n), (raw.PUBREC, 200 + n))]
        assert firsts == [*wanted, (raw.PUBACK, 300)]
        assert acknowledged[0] == (raw.PUBCOMP, 50)
        completed = {id for kind, id in acknowledged if kind == raw.PUBCOMP}
        while len(completed) < 21:
            completed.add(publisher.expect(raw.PUBCOMP).id)

        assert list(subscriber.expect(raw.SUBACK).body[2:]) == [1, 1]
        retained = [subscriber.expect(raw.PUBLISH), subscriber.expect(raw.PUBLISH)]
        assert {(one.topic, one.payload, one.first & 1) for one in retained} == {
            ("t/retained", b"before", 1),
            ("t/kept", b"meanwhile", 1),
        }
        if newcomer.expect(raw.CONNACK).body != b"\0\0":
            # Nobody had noticed that NATS was away: a server that does not answer in time is unavailable.
            assert away is paused
            newcomer = stack.enter_context(Raw.connected(port, "newcomer", patience=RECOVERY))
        assert newcomer.subscribe(("new/#", 1)) == [1]

        ones = [b"before %d" % number for number in range(20)] + [b"%d" % number for number in range(20)]
        twos = [b"half"] + [b"%d" % number for number in range(20)]
        for paho in (regular, durable):
            eventually(lambda p=paho: set(ones) <= set(p.payloads("t/1")), RECOVERY)  # type: ignore[misc]
            eventually(lambda p=paho: set(twos) <= set(p.payloads("t/2")), RECOVERY)  # type: ignore[misc]
            assert list(dict.fromkeys(paho.payloads("t/1"))) == ones
            assert paho.payloads("t/2") == twos
        regular.publish_acknowledged("new/message", b"after", 2)
        assert newcomer.expect(raw.PUBLISH).payload == b"after"
        with Paho(port, "absent", clean=False) as absent:
            eventually(lambda: set(ones) <= set(absent.payloads("t/1")))
            assert list(dict.fromkeys(absent.payloads("t/1"))) == ones
        bystanders.check(lossy=True, timeout=RECOVERY)
    assert "Traceback" not in local.log


@pytest.mark.slow
def test_it_goes_away_again_and_again(server: NatsServer, local: Gateway) -> None:
    """Also in the middle of a recovery."""
    with Bystanders(local.port) as bystanders:
        for number in range(6):
            eventually(lambda n=number: len(bystanders.delays) > 10 * n, RECOVERY)  # type: ignore[misc]
            server.kill()
            eventually(lambda n=number: local.log.count("connection to NATS is lost") > n)  # type: ignore[misc]
            server.start()
            if number % 2:
                eventually(lambda n=number: local.log.count("connected to NATS again") > n // 2, RECOVERY)  # type: ignore[misc]
        bystanders.check(lossy=True, timeout=RECOVERY)
    assert "Traceback" not in local.log


@pytest.fixture
def flood() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Runs a function in a thread until the test ends."""
    threads: list[threading.Thread] = []

    def start(work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        threads.append(thread)

    yield start
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.slow
def test_publishing_at_full_speed_while_nats_is_gone(
    server: NatsServer, local: Gateway, flood: Callable[[Callable[[], None]], None]
) -> None:
    """The gateway stops reading from publishers instead of buffering without limit; nothing acknowledged is lost."""
    topic = f"flood/{secrets.token_hex(4)}"
    payload = bytes(10_000)
    total = 12_000
    with (
        Paho(local.port, "flooded", clean=False) as subscriber,
        Raw.connected(local.port, "flooder", patience=RECOVERY) as publisher,
        Raw.connected(local.port, "zero", patience=RECOVERY) as zero,
    ):
        subscriber.subscribe(topic, 1)
        server.kill()
        eventually(lambda: "connection to NATS is lost" in local.log)
        before = rss(local.pid)
        data = b"".join(publish(topic, b"%05d" % n + payload, qos=1, id=n % 60_000 + 1) for n in range(total))
        publisher.socket.settimeout(RECOVERY)
        zero.socket.settimeout(RECOVERY)
        flood(lambda: publisher.send(data))
        nothing = publish("flood/nobody", payload) * 10_000
        flood(lambda: zero.send(nothing))
        deadline = time.monotonic() + 4
        eventually(lambda: time.monotonic() > deadline)
        assert rss(local.pid) - before < 200 * 1024 * 1024
        server.start()
        for number in range(total):
            assert publisher.expect(raw.PUBACK).id == number % 60_000 + 1
        eventually(lambda: len(set(subscriber.payloads(topic))) == total, RECOVERY)
        once = list(dict.fromkeys(one[:5] for one in subscriber.payloads(topic)))
        assert once == [b"%05d" % number for number in range(total)]


def rss(pid: int) -> int:
    """Resident memory in bytes."""
    import psutil

    found: int = psutil.Process(pid).memory_info().rss
    return found
