# SPDX-License-Identifier: Apache-2.0
"""Durable sessions that come back to much that was published meanwhile, and read it by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from mqtt_nats.client.client import Client
from mqtt_nats.codec import Publish
from mqtt_nats.shared_reader.catch_up import PAGE_BYTES, CatchUpReader
from mqtt_nats.shared_reader.sessions import SharedReaderSessions
from tests.base.support import PATIENCE, Inside, running
from tests.conftest import GatewayFactory, _gateway_factory
from tests.harness import raw
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.rawclient import RawClient
from tests.harness.waiting import eventually
from tests.integration.conftest import Connector, Stored, position, until

MANY = 3000


@pytest.fixture(scope="module")
def gateway(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a shared reader."""
    with _gateway_factory(tmp_path_factory.mktemp("gateway")) as start:
        yield start(nats_server)


async def away(connect: Connector, stored: Stored, name: str, *filters: str, qos: int) -> None:
    """A session, with these subscriptions, whose client is gone."""
    client = await connect(name, clean=False)
    for text in filters:
        await client.subscribe(text, qos=qos)
    await client.disconnect()
    await stored.detached(name)


async def publish(publisher: RawClient, numbers: range, *topics: str, qos: int) -> None:
    """Publish the numbers, on each topic in turn."""
    for start in range(numbers.start, numbers.stop, 200):
        several = range(start, min(start + 200, numbers.stop))
        for place, topic in enumerate(topics):
            mine = [b"%d" % number for number in several if number % len(topics) == place]
            await publisher.deliver_all(topic, mine, qos)


async def take(client: RawClient, count: int) -> list[Publish]:
    """Receive messages, and complete each."""
    found = []
    for _ in range(count):
        (one,) = await client.messages(1, timeout=PATIENCE)
        found.append(one)
        await client.complete(one)
    return found


async def only_the_shared_reader(stored: Stored) -> None:
    """Wait until a session's own reader is gone."""

    async def gone() -> None:
        readers = [one.name for one in await stored.js.consumers_info("$MQTT_msgs") if "_reader_" in one.name]
        assert len(readers) <= 2, readers  # one for each gateway that a test has

    await until(gone)


@pytest.mark.parametrize("qos", [1, 2])
async def test_what_was_missed_is_read_without_its_consumers(
    connect: Connector, name: str, stored: Stored, qos: int
) -> None:
    """In order, once, no faster than the client acknowledges; then the shared reader goes on."""
    await away(connect, stored, name, f"{name}/#", qos=qos)
    publisher = await connect(f"{name}-publisher")
    await publish(publisher, range(MANY), f"{name}/a/b", qos=qos)
    last = await stored.last_sequence()
    client = await connect(name, clean=False)
    at = await stored.live(name, 2, own=True)
    assert at.reached < last - MANY // 2
    got = await take(client, MANY)
    assert [int(one.payload) for one in got] == [*range(MANY)]
    assert not any(one.dup for one in got)
    await publish(publisher, range(MANY, MANY + 50), f"{name}/a/b", qos=qos)
    assert [int(one.payload) for one in await take(client, 50)] == [*range(MANY, MANY + 50)]
    await client.quiet()
    await stored.settled(name)
    for info in await stored.session_consumers(name):
        assert info.delivered is not None
        assert info.delivered.consumer_seq < MANY // 2
    await only_the_shared_reader(stored)


@pytest.mark.parametrize("end", ["killed", "lost"])
async def test_a_session_goes_on_elsewhere_in_the_middle(
    connect: Connector,
    name: str,
    stored: Stored,
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
    end: str,
) -> None:
    """At QoS 2 nothing that was complete comes again, and nothing is left out [MQTT-4.3.3-1]."""
    near = gateway_factory(nats_server)
    await away(connect, stored, name, name, qos=2)
    publisher = await connect(f"{name}-publisher")
    await publish(publisher, range(MANY), name, qos=1)
    again = range(MANY, MANY + 300)
    await publish(publisher, again, name, qos=2)
    client = await connect(name, clean=False, to=near)
    await stored.live(name, own=True)
    before = await take(client, MANY + 100)
    assert [int(one.payload) for one in before] == [*range(MANY + 100)]
    reached = [one for one in before if one.qos == 2]
    assert len(reached) == 100
    if end == "killed":

        async def complete() -> None:
            at = await position(stored.js, name)
            assert not at.released

        await until(complete)
        near.kill()
    client.drop()
    await stored.detached(name, killed=end == "killed")
    client = await connect(name, clean=False)
    rest = [one for one in await take(client, 200) if one.qos == 2]
    assert [int(one.payload) for one in rest] == [*again][100:]
    await client.quiet()
    await stored.settled(name)


async def test_while_others_publish(connect: Connector, name: str, stored: Stored) -> None:
    """From what was missed to what comes now there is no gap, nothing twice, and no change of order."""
    await away(connect, stored, name, f"{name}/+", f"{name}/#", qos=1)
    publisher = await connect(f"{name}-publisher")
    await publish(publisher, range(2 * MANY), f"{name}/a", qos=1)
    client = await connect(name, clean=False)
    publishing = asyncio.create_task(publish(publisher, range(2 * MANY, 4 * MANY), f"{name}/a", qos=1))
    got = await take(client, 4 * MANY)
    await publishing
    assert [int(one.payload) for one in got] == [*range(4 * MANY)]
    await client.quiet()
    await stored.live(name, 3)
    await stored.settled(name)
    await only_the_shared_reader(stored)


async def test_large_messages(connect: Connector, name: str, stored: Stored) -> None:
    """A page has fewer of them."""
    await away(connect, stored, name, name, qos=1)
    publisher = await connect(f"{name}-publisher")
    await publish(publisher, range(1200), name, qos=1)
    large = [b"%d" % number + bytes(200_000) for number in range(40)]
    for payload in large:
        await publisher.deliver(name, payload, 1)
    client = await connect(name, clean=False)
    await stored.live(name, own=True)
    await take(client, 1200)
    assert [one.payload for one in await take(client, 40)] == large
    await client.quiet()


# -- seen from inside ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inside(nats_server: NatsServer) -> Iterator[Inside]:
    """A gateway that can be looked into."""
    with running(nats_server.url) as found:
        yield found


def missed(inside: Inside, client_id: str, *topics: str, count: int = MANY) -> Raw:
    """A client that has come back to so many messages, and has acknowledged nothing of them yet."""
    with Raw.connected(inside.ports[0], client_id, clean=False) as client:
        assert client.subscribe(*((topic, 1) for topic in topics)) == [1] * len(topics)
        client.send(raw.packet(0xE0))
        client.expect_closed(PATIENCE)
    with Raw.connected(inside.ports[0]) as writer:
        for start in range(0, count, 100):
            for number in range(start, start + 100):
                topic = topics[number % len(topics)]
                writer.send(raw.publish(topic, b"%d" % number, qos=1, id=number % 100 + 1))
            for _ in range(100):
                writer.expect(raw.PUBACK, PATIENCE)
    return Raw.connected(inside.ports[0], client_id, clean=False)


def reader_of(client: Client) -> CatchUpReader | None:
    feed, side = client.delivery.feed, client.durable_side
    assert isinstance(feed, SharedReaderSessions)
    return feed.catching.get(side) if side is not None else None


def catching(inside: Inside, client_id: str) -> CatchUpReader | None:
    return reader_of(inside.client(client_id))


def taken(client: Raw, count: int) -> list[int]:
    """The numbers of the next messages, each acknowledged."""
    found = []
    for _ in range(count):
        one = client.expect(raw.PUBLISH, PATIENCE)
        found.append(int(one.payload))
        client.send(raw.ack(raw.PUBACK, one.id))
    return found


@pytest.mark.parametrize("broken", ["deaf", "gap", "deleted"])
def test_a_reader_that_breaks_is_made_again(inside: Inside, broken: str) -> None:
    """It goes on where it was."""
    with missed(inside, f"broken-{broken}", f"broken/{broken}") as client:
        eventually(lambda: catching(inside, f"broken-{broken}") is not None, PATIENCE)
        found = catching(inside, f"broken-{broken}")
        assert found is not None
        assert taken(client, 500) == [*range(500)]
        account = inside.gateway.account
        assert account is not None

        def harm() -> None:
            match broken:
                case "deaf":
                    account.services.nats.link.unsubscribe_raw(found._sid)
                case "gap":
                    found._next += 1
                case _:
                    account.services.nats.link.out.append(
                        b"PUB $JS.API.CONSUMER.DELETE.$MQTT_msgs.%b _INBOX.x 0\r\n\r\n" % name
                    )

        name = found._name.encode()
        inside.call(harm)
        assert taken(client, MANY - 500) == [*range(500, MANY)]
        eventually(lambda: catching(inside, f"broken-{broken}") is None, PATIENCE)
        assert found._name.encode() != name


def test_subscriptions_change_meanwhile(inside: Inside) -> None:
    """One ends, and nothing more of it comes; one begins, and becomes live when the others are where the stream is."""
    with missed(inside, "changing", "changing/a", "changing/b") as client:
        eventually(lambda: catching(inside, "changing") is not None, PATIENCE)
        found = taken(client, 200)
        client.send(raw.unsubscribe("changing/b", id=7))
        client.send(raw.subscribe(("changing/c", 1), id=8))
        answers: set[int] = set()
        # A fast gateway has sent everything before it is asked to stop.
        while MANY - 2 not in found[-2:] or answers != {raw.UNSUBACK, raw.SUBACK}:
            packet = client.receive(PATIENCE)
            assert packet is not None
            if packet.kind != raw.PUBLISH:
                answers.add(packet.kind)
                continue
            found.append(int(packet.payload))
            assert found[-1] % 2 == 0 or raw.UNSUBACK not in answers
            client.send(raw.ack(raw.PUBACK, packet.id))
        assert [number for number in found if number % 2 == 0] == [*range(0, MANY, 2)]
        odd = [number for number in found if number % 2]
        assert odd == [*range(1, 2 * len(odd), 2)]
        side = inside.client("changing").durable_side
        assert side is not None
        eventually(lambda: inside.call(lambda: len(side.bindings)) == 2)
        with Raw.connected(inside.ports[0]) as writer:
            for topic in "abc":
                writer.send(raw.publish(f"changing/{topic}", b"%d" % ord(topic), qos=1, id=ord(topic)))
                writer.expect(raw.PUBACK, PATIENCE)
        assert taken(client, 2) == [ord("a"), ord("c")]


def test_a_window_that_was_full(inside: Inside) -> None:
    """Who comes back in the middle has what was not acknowledged first, and no more is taken than has a place."""
    client = missed(inside, "window", "window/a")
    eventually(lambda: catching(inside, "window") is not None, PATIENCE)
    client.expect(raw.PUBLISH, PATIENCE)
    client.close()
    with Raw.connected(inside.ports[0], "window", clean=False) as again:
        side = inside.client("window").durable_side
        assert side is not None
        first = taken(again, 150)
        eventually(lambda: catching(inside, "window") is not None, PATIENCE)
        eventually(lambda: inside.call(lambda: catching_kept(inside, "window")) > 0, PATIENCE)
        assert inside.call(lambda: side.machine.crowd) <= 200
        assert first + taken(again, MANY - 150) == [*range(MANY)]


def catching_kept(inside: Inside, client_id: str) -> int:
    """How many messages wait in a session's own reader."""
    account = inside.gateway.account
    assert account is not None
    found = reader_of(account.registry.clients[client_id])
    return len(found._kept) if found is not None else 0


def test_a_client_that_acknowledges_nothing(inside: Inside) -> None:
    """Of large messages few are read ahead."""
    size, count = 50_000, 1200
    with Raw.connected(inside.ports[0], "silent", clean=False) as client:
        assert client.subscribe(("silent", 1)) == [1]
        client.send(raw.packet(0xE0))
        client.expect_closed(PATIENCE)
    with Raw.connected(inside.ports[0]) as writer:
        for start in range(0, count, 100):
            for number in range(start, start + 100):
                writer.send(raw.publish("silent", b"%d" % number + bytes(size), qos=1, id=number % 100 + 1))
            for _ in range(100):
                writer.expect(raw.PUBACK, PATIENCE)
    with Raw.connected(inside.ports[0], "silent", clean=False) as client:
        eventually(lambda: catching(inside, "silent") is not None, PATIENCE)
        found = catching(inside, "silent")
        assert found is not None
        eventually(lambda: inside.call(lambda: found._kept and not found._asked), PATIENCE)
        assert inside.call(lambda: found._bytes) <= PAGE_BYTES + size + 10
        got = []
        for _ in range(count):
            one = client.expect(raw.PUBLISH, PATIENCE)
            got.append(int(one.payload.rstrip(b"\0")))
            client.send(raw.ack(raw.PUBACK, one.id))
            if len(got) % 50 == 0:
                assert inside.call(lambda: found._bytes) <= PAGE_BYTES + size + 10
        assert got == [*range(count)]


def test_what_is_too_much_is_passed_over_first(nats_server: NatsServer) -> None:
    """Nothing of that is sent because the session becomes live meanwhile."""
    most, count = 1200, 12_000  # to pass over the rest takes longer than to become live
    with (
        running(nats_server.url, max_backlog=most) as inside,
        missed(inside, "too-much", "too/much", count=count) as client,
    ):
        assert taken(client, most) == [*range(count - most, count)]
        assert client.ping() == []


def test_the_last_subscription_ends(inside: Inside) -> None:
    """Nothing is read any more."""
    with missed(inside, "ending", "ending/a") as client:
        eventually(lambda: catching(inside, "ending") is not None, PATIENCE)
        found = catching(inside, "ending")
        assert found is not None
        client.send(raw.unsubscribe("ending/a", id=9))
        while (packet := client.receive(PATIENCE)) is not None and packet.kind != raw.UNSUBACK:
            client.send(raw.ack(raw.PUBACK, packet.id))
        eventually(lambda: catching(inside, "ending") is None, PATIENCE)
        account = inside.gateway.account
        assert account is not None
        eventually(lambda: inside.call(lambda: found._sid not in account.services.nats.link.handlers), PATIENCE)
        assert client.subscribe(("ending/a", 1)) == [1]
        with Raw.connected(inside.ports[0]) as writer:
            writer.send(raw.publish("ending/a", b"7", qos=1))
            writer.expect(raw.PUBACK, PATIENCE)
        assert taken(client, 1) == [7]
