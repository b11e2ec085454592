# SPDX-License-Identifier: Apache-2.0
"""Floods: whatever one client sends, others are served meanwhile, and memory and processor time stay bounded.

Each attack runs against a gateway with its default limits, while bystanders publish and subscribe at every QoS. What it
may cost is in the table: processor time does not depend on how busy the machine is.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import statistics
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil
import pytest

from tests.base.support import PATIENCE, memory
from tests.conftest import _gateway_factory
from tests.harness import raw, raw5
from tests.harness.bystanders import Bystanders
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import ALIAS, USER, Raw5, prop
from tests.harness.waiting import eventually
from tests.transport.support import ports, write_config
from tests.transport.web import BINARY, Web, frame, length

MIB = 1024 * 1024
TIMEOUT = 6.0
"""`connect_timeout` of this gateway, in seconds."""

LATE = 30.0
"""Seconds that a bystander's message takes in the median at most, on a machine that is shared with other tests."""


FILES = 12_000
"""Files that are open at the same time."""


class Target(NamedTuple):
    gateway: Gateway
    port: int
    web: int
    bystanders: Bystanders


@pytest.fixture(scope="module")
def target(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))  # the gateway has it from here
    directory = tmp_path_factory.mktemp("attacks")
    config = write_config(directory / "gateway.toml", {"listen": "127.0.0.1:0", "type": "ws"})
    with _gateway_factory(directory) as start:
        gateway = start(nats_server, "--config", config, "--connect-timeout", str(TIMEOUT))
        with Bystanders(gateway.port) as bystanders:
            yield Target(gateway, gateway.port, ports(gateway, "WS")[0], bystanders)


def gone(client: Raw) -> None:
    """Wait until the gateway has closed the connection, with whatever last words."""
    with contextlib.suppress(ConnectionError):
        while client.receive(PATIENCE) is not None:
            pass


def half_open(target: Target) -> None:
    """5,000 connections that begin a CONNECT, and never go on."""
    begun = raw.connect("half-open", flags=0x06, tail=("will", bytes(2000)))[:1000]
    clients: list[Raw] = []
    try:
        for _ in range(5000):
            clients.append(Raw(target.port, patience=PATIENCE))
            clients[-1].send(begun)
            if len(clients) % 1000 == 0:
                with Raw.connected(target.port, patience=PATIENCE) as other:
                    other.ping()
        for client in clients:
            assert client.expect_closed(60) == []
    finally:
        for client in clients:
            client.close()


def trickle(target: Target) -> None:
    """A CONNECT that comes byte by byte, too slowly."""
    data = raw.connect("trickle" * 10)
    clients = [Raw(target.port, patience=PATIENCE) for _ in range(50)]
    with contextlib.ExitStack() as stack:
        for client in clients:
            stack.enter_context(client)
        for byte in data[:20]:
            for client in clients:
                client.send(bytes((byte,)))
        for client in clients:
            assert client.expect_closed(60) == []


def trickled_packet(target: Target) -> None:
    """A packet of the largest size that comes byte by byte, from a client that keeps its connection alive by that."""
    with Raw.connected(target.port, keepalive=1, patience=PATIENCE) as client:
        client.send(b"\x30" + raw.remaining_length(MIB - 5) + b"\0\x04slow")
        for _ in range(3000):
            client.send(b"x")


def huge_packet(target: Target) -> None:
    """A remaining length of 256 MiB, before CONNECT and after."""
    for first in (0x10, 0x30, 0x82):
        with Raw(target.port, patience=PATIENCE) as client:
            client.send(bytes((first,)) + b"\xff\xff\xff\x7f" + bytes(100_000))
            gone(client)
        with Raw.connected(target.port, patience=PATIENCE) as client:
            client.send(bytes((first,)) + b"\xff\xff\xff\x7f" + bytes(100_000))
            gone(client)
    with Raw5.open(target.port) as five:
        five.send(b"\x30\xff\xff\xff\x7f" + bytes(100_000))
        five.ended(0x95)


def underflow(target: Target) -> None:
    """Every kind of packet, with fewer bytes than it must have."""
    for first in (*range(0x10, 0x100, 0x10), 0x32, 0x34, 0x62, 0x82, 0xA2):
        for size in range(3):
            for version in (4, 5):
                with Raw(target.port, patience=PATIENCE) as client:
                    client.send((raw5 if version == 5 else raw).connect())
                    client.send(raw.packet(first, bytes(size)) + raw.packet(0xE0))
                    gone(client)


def deep_topics(target: Target) -> None:
    """Topics and filters with 65,535 levels, or 65,535 bytes, and wills on them."""
    for topic in (b"/" * 65_535, b"x" * 65_535, b"x/" * 32_767, b"\xf0\x9f\x98\x80" * 16_383):
        for data in (raw.publish(topic, b"x"), raw.publish(topic, b"x", qos=2)):
            with Raw.connected(target.port, patience=PATIENCE) as client:
                client.send(data)
                gone(client)
        with Raw.connected(target.port, patience=PATIENCE) as client:
            assert client.subscribe((topic, 0), (topic, 1), (topic.replace(b"x/", b"+/"), 2)) == [0x80] * 3
        with Raw(target.port, patience=PATIENCE) as client:
            client.send(raw.connect("deep", flags=0x06, tail=(topic, b"x")))
            gone(client)


def many_filters(target: Target) -> None:
    """11,000 filters in one SUBSCRIBE and UNSUBSCRIBE; as many as are allowed, until no more are."""
    filters = [f"many/{number}/+/#" for number in range(11_000)]
    with Raw.connected(target.port, patience=PATIENCE) as client:
        client.send(raw.subscribe(*((text, 2) for text in filters)))
        gone(client)
    with Raw5.open(target.port) as five:
        five.send(raw5.unsubscribe(*filters))
        five.ended(0x97)
    with Raw.connected(target.port, patience=PATIENCE) as client:
        for start in range(0, 11_000, 1000):
            codes = client.subscribe(*((text, 0) for text in filters[start : start + 1000]), id=start + 1)
            assert codes == [0 if start < 10_000 else 0x80] * 1000


def many_properties(target: Target) -> None:
    """65,535 user properties, and one of all that a packet holds, wherever one may stand."""
    many = prop(USER, ("", "")) * 65_535
    long = prop(USER, ("x" * 65_535, "y" * 65_535)) * 5
    for parts in (many, long):
        for data in (
            raw5.publish("user", b"x", parts),
            raw5.subscribe(("user", 0), parts=parts),
            raw5.unsubscribe("user", parts=parts),
            raw5.ack(raw5.PUBREL, 1, 0, parts),
            raw5.disconnect(0, parts),
        ):
            with Raw5.open(target.port) as client:
                client.send(data)
                client.ended(0x97)
        for data in (raw5.connect("u", parts), raw5.connect("u", flags=4, tail=raw5.will("w", b"x", parts))):
            with Raw(target.port, patience=PATIENCE) as stranger:
                stranger.send(data)
                gone(stranger)


def patterns(target: Target) -> None:
    """Filters with every combination of wildcards, and topics that match half of every one of them."""
    filters = ["/".join(levels) for levels in itertools.product("a+", repeat=9)]
    with Raw.connected(target.port, patience=PATIENCE) as reader, Raw.connected(target.port) as writer:
        for start in range(0, len(filters), 128):
            some = filters[start : start + 128]
            assert reader.subscribe(*((text, 0) for text in some), id=start + 1) == [0] * len(some)
        for number in range(2000):
            writer.send(raw.publish("a/" * 8 + f"b{number}", b"no") + raw.publish("a/" * 100 + "a", b"no"))
        writer.send(raw.publish("a/a/a/a/a/a/a/a/a", b"once"))
        found = reader.expect(raw.PUBLISH, PATIENCE)
        while found.payload != b"once":
            found = reader.expect(raw.PUBLISH, PATIENCE)
        writer.ping()


def same_id(target: Target) -> None:
    """One packet identifier at QoS 2, over and over."""
    with Raw.connected(target.port, patience=PATIENCE) as client:
        client.send(raw.publish("same", bytes(2000), qos=2, id=7))
        assert client.expect(raw.PUBREC).id == 7
        for _ in range(50):
            client.send(raw.publish("same", bytes(2000), qos=2, id=7, flags=8) * 200)
            for _ in range(200):
                assert client.expect(raw.PUBREC).id == 7


def held(target: Target) -> None:
    """Every packet identifier at QoS 2, and no PUBREL."""
    with Raw.connected(target.port, patience=PATIENCE) as client:
        client.send(b"".join(raw.publish("held", b"x" * 50, qos=2, id=number) for number in range(1, 20_000)))
        gone(client)


def aliases(target: Target) -> None:
    """Aliases above what is allowed, and all that are allowed with topics that change all the time."""
    with Raw5.open(target.port) as client:
        client.send(raw5.publish("alias", b"x", prop(ALIAS, 65_535)))
        client.ended(0x94)
    with Raw5.open(target.port) as client:
        for turn in range(100):
            for alias in range(1, 33):
                client.send(raw5.publish(f"alias/{turn}/{alias}/" + "x" * 3000, b"x", prop(ALIAS, alias)))
            client.quiet()


def wills(target: Target) -> None:
    """Wills with as many properties as there may be, of clients that come and go."""
    parts = [prop(USER, ("name" * 10, "value" * 90))] * 13
    for number in range(300):
        with Raw(target.port, patience=PATIENCE) as client:
            client.send(raw5.connect(f"will-{number}", flags=4, tail=raw5.will("wills/x", bytes(1000), *parts)))
            assert raw5.answer(client.expect(raw.CONNACK)).reason == 0
            if number % 2:
                client.send(raw5.disconnect())
                gone(client)


def bomb(target: Target) -> None:
    """A frame that would be 100 MiB when it is unpacked, and one that says it has more than there is."""
    packed = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = packed.compress(bytes(100 * MIB)) + packed.flush()
    for sent in (frame(data, bits=0x40), bytes((0x80 | BINARY,)) + length(1 << 62) + bytes(4) + bytes(MIB)):
        with Web(target.web) as client:
            client.wire(sent)
            client.closed()


def pings(target: Target) -> None:
    """PINGREQ by the million, from who reads no answer."""
    with Raw.connected(target.port, receive_buffer=4096, patience=PATIENCE) as client:
        client.socket.settimeout(3)
        with contextlib.suppress(TimeoutError):
            client.socket.sendall(raw.packet(0xC0) * 4_000_000)


ATTACKS: list[tuple[Callable[[Target], None], int, float]] = [
    (half_open, 100, 15),
    (trickle, 20, 10),
    (trickled_packet, 20, 10),
    (huge_packet, 20, 5),
    (underflow, 20, 10),
    (deep_topics, 30, 10),
    (many_filters, 40, 5),
    (many_properties, 40, 10),
    (patterns, 40, 10),
    (same_id, 20, 10),
    (held, 40, 10),
    (aliases, 150, 15),  # topics are remembered, up to 256 MiB for all clients
    (wills, 40, 15),
    (bomb, 30, 10),
    (pings, 60, 10),
]
"""What is done, the MiB that the gateway may grow by, and the seconds of processor time that it may take."""


@pytest.mark.parametrize(("attack", "mebibytes", "seconds"), ATTACKS, ids=[attack.__name__ for attack, *_ in ATTACKS])
def test_flood(target: Target, attack: Callable[[Target], None], mebibytes: int, seconds: float) -> None:
    process = psutil.Process(target.gateway.pid)
    delays = target.bystanders.delays
    since, before = len(delays), memory(process.pid)
    times = process.cpu_times()
    attack(target)
    grown = (memory(process.pid) - before) / MIB
    now = process.cpu_times()
    spent = now.user + now.system - times.user - times.system
    eventually(lambda: len(delays) > since + 5, PATIENCE, what="messages of bystanders")
    late = statistics.median(delays[since:])
    print(f"{attack.__name__}: {grown:.1f} MiB, {spent:.2f} s of processor time, bystanders {late * 1000:.1f} ms")
    target.bystanders.check(timeout=60)
    assert grown < mebibytes
    assert spent < seconds
    assert late < LATE
    eventually(lambda: process.num_fds() < 100, PATIENCE, what="the end of the attacker's connections")
