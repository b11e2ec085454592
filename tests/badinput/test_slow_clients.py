# SPDX-License-Identifier: Apache-2.0
"""Clients that stop reading, and floods: bounded memory, and nobody else waits."""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.conftest import GatewayFactory
from tests.harness import raw
from tests.harness.bystanders import FEW, MANY, Bystanders
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, connect, packet, publish, subscribe
from tests.harness.waiting import eventually

pytestmark = pytest.mark.usefixtures("unharmed")

MIB = 1024 * 1024

PATIENCE = 60.0


def rss(gateway: Gateway) -> int:
    found: int = psutil.Process(gateway.pid).memory_info().rss
    return found


@pytest.fixture
def sender() -> Iterator[Callable[[Raw, bytes], threading.Thread]]:
    """Sends in a thread: the gateway may stop reading."""
    threads: list[threading.Thread] = []

    def start(client: Raw, data: bytes) -> threading.Thread:
        client.socket.settimeout(PATIENCE)

        def send() -> None:
            with contextlib.suppress(OSError):
                client.send(data)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        threads.append(thread)
        return thread

    yield start
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@contextlib.contextmanager
def repeatedly(act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` ten times a second, in a thread."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.1):
            act()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PATIENCE)


def unblock(client: Raw) -> None:
    """End a connection in which a thread is still sending."""
    client.socket.shutdown(socket.SHUT_RDWR)


class Latency:
    """How long bystanders wait from now on. They publish no more than the machine has time for."""

    def __init__(self, bystanders: Bystanders) -> None:
        self._bystanders = bystanders
        bystanders.most = FEW
        eventually(lambda: bystanders.waiting <= FEW, PATIENCE)
        self._since = len(bystanders.delays)
        self._begun = time.monotonic()

    def check(self, count: int, least: float) -> None:
        """After so many more measurements: the longest is below ``least`` seconds, or a fraction of the whole time.

        Who had to wait for the flood to end would wait for most of it.
        """
        eventually(lambda: len(self._bystanders.delays) > self._since + count, PATIENCE)
        self._bystanders.most = MANY
        elapsed = time.monotonic() - self._begun
        assert max(self._bystanders.delays[self._since :]) < max(least, elapsed / 2)


@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
def test_qos_0_flood_to_a_client_that_does_not_read(
    gateway: Gateway, bystanders: Bystanders, sender: Callable[[Raw, bytes], threading.Thread], clean: bool
) -> None:
    """What does not fit is dropped; a reader beside it gets everything."""
    topic = f"flood/{secrets.token_hex(4)}"
    payload = bytes(8_000)
    count = 10_000
    with (
        Raw.connected(gateway.port, f"stuck-{clean}", clean=clean, receive_buffer=4096) as stuck,
        Raw.connected(gateway.port, patience=PATIENCE) as reader,
        Raw.connected(gateway.port, patience=PATIENCE) as publisher,
    ):
        for client in (stuck, reader):
            assert client.subscribe((topic, 0)) == [0]
        before = rss(gateway)
        latency = Latency(bystanders)
        for start in range(0, count, 500):  # no faster than the reader reads
            sent = range(start, start + 500)
            sender(publisher, b"".join(publish(topic, b"%08d" % number + payload) for number in sent))
            for number in sent:
                assert reader.expect(raw.PUBLISH).payload[:8] == b"%08d" % number
        assert rss(gateway) - before < 100 * MIB
        latency.check(5, 1.0)
        # It reads again: what had been kept, in order, and what is new.
        publisher.ping()
        last = -1
        seen = 0
        with repeatedly(
            lambda: publisher.send(publish(topic, b"99999999"))
        ):  # as long as there is no room it is dropped
            while last < 99999999:
                number = int(stuck.expect(raw.PUBLISH, PATIENCE).payload[:8])
                assert number > last
                last = number
                seen += 1
        assert 100 < seen < count
    Raw.connected(gateway.port, f"stuck-{clean}").close()


def test_a_regular_session_that_does_not_acknowledge(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """Its queue is full: it cannot keep its promise any more and ends; the publisher is not slowed down."""
    gateway = gateway_factory(nats_server, env={"MQTT_NATS_MAX_QUEUED": "500", "MQTT_NATS_MAX_INFLIGHT": "10"})
    with (
        Bystanders(gateway.port) as bystanders,
        Raw.connected(gateway.port, "silent") as silent,
        Raw.connected(gateway.port, "acker") as acker,
        Raw.connected(gateway.port, patience=PATIENCE) as publisher,
    ):
        for client in (silent, acker):
            assert client.subscribe(("overflow", 1)) == [1]
        for number in range(600):
            publisher.send(publish("overflow", b"%d" % number, qos=1, id=number + 1))
            assert publisher.expect(raw.PUBACK).id == number + 1
            one = acker.expect(raw.PUBLISH)
            assert one.payload == b"%d" % number
            acker.send(raw.ack(raw.PUBACK, one.id))
        found = silent.expect_closed()
        assert [one.payload for one in found] == [b"%d" % number for number in range(10)]
        bystanders.check()


def test_large_messages_for_a_regular_session_that_does_not_acknowledge(
    gateway: Gateway, bystanders: Bystanders, sender: Callable[[Raw, bytes], threading.Thread]
) -> None:
    """The queue is bounded in bytes too."""
    payload = bytes(200_000)
    with (
        Raw.connected(gateway.port, "hoarder") as hoarder,
        Raw.connected(gateway.port, patience=PATIENCE) as publisher,
    ):
        assert hoarder.subscribe(("large", 1)) == [1]
        before = rss(gateway)
        sender(publisher, b"".join(publish("large", payload, qos=1, id=number + 1) for number in range(500)))
        for number in range(500):
            assert publisher.expect(raw.PUBACK).id == number + 1
        assert rss(gateway) - before < 150 * MIB
        while hoarder.socket.recv(MIB):  # cut off, perhaps in the middle of a packet
            pass


def test_a_durable_session_that_does_not_acknowledge(
    gateway: Gateway, bystanders: Bystanders, sender: Callable[[Raw, bytes], threading.Thread]
) -> None:
    """Its messages wait in the stream, however many; it gets all of them when it goes on."""
    payload = bytes(2_000)
    total = 5_000
    with (
        Raw.connected(gateway.port, "sleeper", clean=False, patience=PATIENCE) as sleeper,
        Raw.connected(gateway.port, patience=PATIENCE) as publisher,
    ):
        assert sleeper.subscribe(("backlog", 1)) == [1]
        before = rss(gateway)
        sender(publisher, b"".join(publish("backlog", b"%d " % n + payload, qos=1, id=n + 1) for n in range(total)))
        for number in range(total):
            assert publisher.expect(raw.PUBACK).id == number + 1
        assert rss(gateway) - before < 60 * MIB
        for number in range(total):
            one = sleeper.expect(raw.PUBLISH)
            assert one.payload.split()[0] == b"%d" % number if b" " in one.payload else True
            sleeper.send(raw.ack(raw.PUBACK, one.id))
    Raw.connected(gateway.port, "sleeper").close()


@pytest.mark.parametrize(
    "data",
    [packet(0xC0), subscribe(("flood/subscribe", 0)), raw.unsubscribe("flood/none"), raw.ack(raw.PUBREL, 7)],
    ids=["PINGREQ", "SUBSCRIBE", "UNSUBSCRIBE", "PUBREL"],
)
def test_requests_whose_answers_nobody_reads(
    gateway: Gateway, bystanders: Bystanders, sender: Callable[[Raw, bytes], threading.Thread], data: bytes
) -> None:
    """Nothing more is read from who does not read: the answers would pile up."""
    count = 32 * MIB // len(data)
    with Raw.connected(gateway.port, receive_buffer=4096, patience=PATIENCE) as client:
        before = rss(gateway)
        latency = Latency(bystanders)
        thread = sender(client, data * count)
        latency.check(60, 3.0)
        assert rss(gateway) - before < 64 * MIB
        unblock(client)
        thread.join(PATIENCE)


def test_one_packet_id_over_and_over_at_qos_2(gateway: Gateway, bystanders: Bystanders) -> None:
    """A publish that is repeated is answered again, and stored once."""
    topic = f"same/{secrets.token_hex(4)}"
    bystanders.regular.subscribe(topic, 2)
    with Raw.connected(gateway.port, patience=PATIENCE) as client:
        before = rss(gateway)
        client.send(publish(topic, bytes(10_000), qos=2, id=7))
        assert client.expect(raw.PUBREC).id == 7
        for _ in range(20):
            client.send(publish(topic, bytes(10_000), qos=2, id=7, flags=8) * 100)
            for _ in range(100):
                assert client.expect(raw.PUBREC).id == 7
        assert rss(gateway) - before < 20 * MIB
        client.send(raw.ack(raw.PUBREL, 7))
        assert client.expect(raw.PUBCOMP).id == 7
    eventually(lambda: len(bystanders.regular.payloads(topic)) == 1)
    bystanders.check()
    assert len(bystanders.regular.payloads(topic)) == 1


@pytest.mark.slow
def test_every_packet_id_is_held(
    gateway: Gateway, bystanders: Bystanders, sender: Callable[[Raw, bytes], threading.Thread]
) -> None:
    """10,000 publishes at QoS 2 without PUBREL, all that may be: held by JetStream, removed with the session."""
    with Raw.connected(gateway.port, "holder", patience=PATIENCE) as client:
        before = rss(gateway)
        sender(client, b"".join(publish("held", b"x" * 100, qos=2, id=number) for number in range(1, 10_001)))
        for number in range(1, 10_001):
            assert client.expect(raw.PUBREC).id == number
        assert rss(gateway) - before < 150 * MIB
        client.send(raw.ack(raw.PUBREL, 10_000))
        assert client.expect(raw.PUBCOMP).id == 10_000
        client.send(publish("held", b"again", qos=2, id=65_535))
        assert client.expect(raw.PUBREC).id == 65_535
    with Raw.connected(gateway.port, "holder", patience=PATIENCE) as client:
        # A clean session holds nothing of the former one [MQTT-3.1.2-6].
        client.send(publish("held", b"new", qos=2, id=1))
        assert client.expect(raw.PUBREC).id == 1


def test_half_open_connections_and_slow_ones(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """500 connections without a CONNECT, half of them with one that trickles in."""
    gateway = gateway_factory(nats_server, env={"MQTT_NATS_CONNECT_TIMEOUT": "3"})
    with Bystanders(gateway.port) as bystanders:
        before = rss(gateway)
        clients = [Raw(gateway.port) for _ in range(500)]
        try:
            data = connect("slow", flags=0x06, tail=("will", bytes(60_000)))
            for client in clients[::2]:
                client.send(data[:50_000])
            with Raw.connected(gateway.port) as newcomer:
                newcomer.ping()
            assert rss(gateway) - before < 60 * MIB
            for client in clients:
                assert client.expect_closed(PATIENCE) == []
        finally:
            for client in clients:
                client.close()
        bystanders.check()
        eventually(lambda: psutil.Process(gateway.pid).num_fds() < 60)


def test_connections_that_come_and_go(gateway: Gateway, bystanders: Bystanders) -> None:
    """500 in a row with one client id, none of which waits for its CONNACK."""
    for _ in range(500):
        with Raw(gateway.port) as client:
            client.send(connect("flapping", clean=False) + packet(0xE0))

    def stays() -> bool:
        """While others still claim the session, it may be refused, or be taken over."""
        with Raw.connected(gateway.port, "flapping", patience=PATIENCE) as client:
            deadline = time.monotonic() + 0.5
            return eventually(lambda: client.ping() == [] and time.monotonic() > deadline)

    eventually(stays, PATIENCE)


def test_who_does_not_read_and_does_not_ping_is_closed(gateway: Gateway) -> None:
    """Keepalive holds for a client whose answers wait for it."""
    with Raw.connected(gateway.port, keepalive=1, receive_buffer=4096, patience=PATIENCE) as client:
        client.socket.settimeout(PATIENCE)
        client.send(packet(0xC0))
        client.expect(raw.PINGRESP)
        assert client.expect_closed(PATIENCE) == []
