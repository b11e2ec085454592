# SPDX-License-Identifier: Apache-2.0
"""What happens to sessions of the shared reader while something is missing, or while more comes than they take."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from mqtt_nats.codec import Publish
from mqtt_nats.delivery import durable
from mqtt_nats.delivery.slow_clients import stall_session
from mqtt_nats.sessions.quotas import Quotas
from mqtt_nats.shared_reader.sessions import SharedReaderSessions
from mqtt_streams.consumers import delete_consumer
from mqtt_streams.hashing import name_hash
from tests.base.support import PATIENCE, Inside, running
from tests.conftest import GatewayFactory, _gateway_factory
from tests.harness import raw
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import aeventually, eventually
from tests.integration.conftest import Connector, Stored, position


@pytest.fixture(scope="module")
def gateway(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a shared reader."""
    with _gateway_factory(tmp_path_factory.mktemp("gateway")) as start:
        yield start(nats_server)


@pytest.mark.long
@pytest.mark.parametrize("killed", [False, True])
async def test_a_dormant_consumer_is_gone(
    connect: Connector,
    name: str,
    stored: Stored,
    gateway: Gateway,
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
    killed: bool,
) -> None:
    """nats-server answers nothing where one is to be set: the session goes on from its position all the same."""
    near = gateway_factory(nats_server)
    client = await connect(name, clean=False, to=near)
    await client.subscribe(name, qos=1)
    await stored.live(name)
    if killed:
        near.kill()
    client.drop()
    await stored.detached(name, killed=killed)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"meanwhile", 1)
    for consumer in await stored.session_consumers(name):
        await stored.js.delete_consumer("$MQTT_msgs", consumer.name)
    client = await connect(name, clean=False, to=gateway)
    assert client.session_present
    await client.receive(name, b"meanwhile", qos=1)
    await publisher.deliver(name, b"new", 1)
    await client.receive(name, b"new", qos=1)
    await client.quiet()


async def test_two_filters_of_one_subject(connect: Connector, name: str, stored: Stored) -> None:
    """`a` and `a/#` read the same subject; one more subscription ends, then the connection."""
    client = await connect(name, clean=False)
    for text in (name, f"{name}/#", "another"):
        await client.subscribe(text, qos=1)
    await stored.live(name, 4)
    await client.unsubscribe("another")
    await stored.live(name, 3)
    await client.disconnect()
    await stored.detached(name)
    client = await connect(name, clean=False)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"once", 1)
    await client.receive(name, b"once", qos=1)
    await client.quiet()
    await stored.settled(name)


async def test_a_session_begins_while_much_comes(connect: Connector, name: str, stored: Stored) -> None:
    """In order, once, and without a pause until the publisher has one."""
    publisher = await connect(f"{name}-publisher")
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    done = asyncio.Event()
    sent = 0

    async def publish() -> None:
        nonlocal sent
        while not done.is_set():
            await publisher.deliver_all(name, [b"%d" % number for number in range(sent, sent + 50)], 1)
            sent += 50
        await publisher.deliver(name, b"end", 1)

    got: list[Publish] = []

    async def receive() -> None:
        while not got or got[-1].payload != b"end":
            (one,) = await client.messages(1, timeout=PATIENCE)
            got.append(one)
            await client.complete(one)

    publishing, receiving = asyncio.create_task(publish()), asyncio.create_task(receive())
    await stored.live(name)
    before = len(got)
    await aeventually(lambda: len(got) > before + 500, PATIENCE)
    done.set()
    await asyncio.gather(publishing, receiving)
    assert [one.payload for one in got] == [*(b"%d" % number for number in range(sent)), b"end"]
    assert not any(one.dup for one in got)


@pytest.fixture(scope="module")
def inside(nats_server: NatsServer) -> Iterator[Inside]:
    """A gateway that can be looked into, and passes over what is more than ten."""
    with running(nats_server.url, max_backlog=10) as found:
        yield found


def served(inside: Inside) -> SharedReaderSessions:
    """The sessions that its reader serves."""
    broker = inside.gateway.own.broker
    assert broker is not None
    assert broker.live is not None
    return broker.live


def count(inside: Inside, client_id: str) -> int:
    """How many subscriptions of a session are live."""
    side = inside.client(client_id).durable_side
    assert side is not None
    return len(side.bindings) if side.live else 0


def publish(writer: Raw, topic: str, numbers: range) -> None:
    for number in numbers:
        writer.send(raw.publish(topic, b"%d" % number, qos=1, id=number + 1))
        assert writer.expect(raw.PUBACK, PATIENCE).id == number + 1


def take(client: Raw, numbers: range) -> None:
    for number in numbers:
        found = client.expect(raw.PUBLISH, PATIENCE)
        assert found.payload == b"%d" % number
        client.send(raw.ack(raw.PUBACK, found.id))


def test_a_second_subscription_waits_for_what_the_first_has_to_get(inside: Inside) -> None:
    """It becomes live where the reader is, and not where the stream is, or the first one's messages would be done."""
    live = served(inside)
    reader = live.reader
    with Raw.connected(inside.ports[0], "second", clean=False) as client, Raw.connected(inside.ports[0]) as writer:
        assert client.subscribe(("first/a", 1)) == [1]
        eventually(lambda: count(inside, "second") == 1, PATIENCE)
        inside.call(
            lambda: live.services.nats.link.unsubscribe_raw(reader._sid)
        )  # it hears nothing until it is made again
        publish(writer, "first/a", range(5))
        assert client.subscribe(("first/b", 1)) == [1]
        side = inside.client("second").durable_side
        assert side is not None
        position_writer = side.position_writer
        assert position_writer is not None

        def wrong() -> bool:
            return position_writer.ledger.reached > reader.position

        eventually(lambda: inside.call(wrong) or count(inside, "second") == 2, PATIENCE)
        assert not inside.call(wrong)
        take(client, range(5))


async def test_a_consumer_that_was_made_again_elsewhere(connect: Connector, name: str, stored: Stored) -> None:
    """Whoever has done it did not live to write that into the record: the session goes on with it."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    await stored.live(name)
    await client.disconnect()
    await stored.detached(name)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver_all(name, [b"passed", b"new"], 1)
    (consumer,) = await stored.session_consumers(name)
    at = await position(stored.js, name)
    at.live, at.reached = [], await stored.last_sequence() - 1
    await stored.js.publish(f"$MQTT.pos.{name_hash(name)}", at.encode())
    await stored.js.delete_consumer("$MQTT_msgs", consumer.name)
    consumer.config.opt_start_seq = at.reached + 1
    await stored.js.add_consumer("$MQTT_msgs", consumer.config)
    client = await connect(name, clean=False)
    await client.receive(name, b"new", qos=1)
    await client.quiet()


def test_a_client_stops_reading_while_it_subscribes(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The SUBSCRIBE goes on, and the position passes nothing that was not given to the session."""
    port, let, waiting = inside.ports[0], asyncio.Event(), list[str]()

    async def pace(quotas: Quotas, key: str) -> None:
        waiting.append(key)
        await let.wait()

    with (
        Raw.connected(port, "stops", clean=False) as client,
        Raw.connected(port, "goes on", clean=False) as other,
        Raw.connected(port) as writer,
    ):
        assert client.subscribe(("stops/a", 1)) == other.subscribe(("stops/a", 1)) == [1]
        eventually(lambda: not inside.call(lambda: served(inside).catching), PATIENCE)
        monkeypatch.setattr(Quotas, "pace", pace)
        client.send(raw.subscribe(("stops/b", 1), id=7))
        eventually(lambda: waiting, PATIENCE)
        stalling = inside.client("stops")
        side = stalling.durable_side
        assert side is not None
        inside.call(lambda: stall_session(stalling, side))
        publish(writer, "stops/a", range(5))
        take(other, range(5))  # the shared reader has passed them
        inside.call(let.set)
        assert client.expect(raw.SUBACK, PATIENCE).body[2:] == b"\1"
        take(client, range(5))
        publish(writer, "stops/b", range(5, 6))
        take(client, range(5, 6))
        assert client.ping() == []
    assert [one.getMessage() for one in caplog.records if one.exc_info] == []


class Defect:
    """In place of what a session keeps back."""

    def keep_back(self, sequence: int, message: object) -> None:
        """Fail."""
        raise RuntimeError("a defect")


def test_one_session_that_fails_takes_nothing_from_the_others(inside: Inside, caplog: pytest.LogCaptureFixture) -> None:
    """It ends, and has the message when it comes back."""
    live = served(inside)
    port = inside.ports[0]
    with (
        Raw.connected(port, "fails", clean=False) as fails,
        Raw.connected(port, "other", clean=False) as other,
        Raw.connected(port) as writer,
    ):
        for client in (fails, other):
            assert client.subscribe(("failing", 2)) == [2]
        eventually(lambda: count(inside, "fails") == count(inside, "other") == 1, PATIENCE)
        failing: Any = live.members[inside.client("fails")]
        inside.call(lambda: setattr(failing, "handover", Defect()))
        publish(writer, "failing", range(1))
        assert other.expect(raw.PUBLISH, PATIENCE).payload == b"0"
        assert fails.expect_closed(PATIENCE) == []
        assert "a defect" in caplog.text
        with Raw.connected(port, "fails", clean=False) as again:
            assert again.expect(raw.PUBLISH, PATIENCE).payload == b"0"


def held_up(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Have sessions wait for the shared reader, which reads their filters already, until the event is set."""
    live, let = served(inside), asyncio.Event()
    ready = live.reader.ready

    async def late() -> int:
        last = await ready()
        await let.wait()
        return last

    monkeypatch.setattr(live.reader, "ready", late)
    return let


def kept_back(inside: Inside, client_id: str) -> int:
    """How many messages of the shared reader are kept for a session until its handover."""
    handover = served(inside).members[inside.client(client_id)].handover
    return inside.call(lambda: len(handover.kept)) if handover is not None else 0


def test_what_is_kept_back_comes_in_order(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than may wait for a session: what came from the reader during the handover is given all the same."""
    let = held_up(inside, monkeypatch)
    with Raw.connected(inside.ports[0], "crowded", clean=False) as client, Raw.connected(inside.ports[0]) as writer:
        assert client.subscribe(("crowded", 1)) == [1]
        publish(writer, "crowded", range(100))
        eventually(lambda: kept_back(inside, "crowded") == 100, PATIENCE)
        inside.call(let.set)
        take(client, range(100))
        publish(writer, "crowded", range(100, 103))
        take(client, range(100, 103))
        assert client.ping() == []


def test_a_message_that_fails_as_a_session_is_handed_over(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session ends, and has that one and what was kept back behind it when it comes back."""
    let, port = held_up(inside, monkeypatch), inside.ports[0]
    with Raw.connected(port, "switched", clean=False) as client, Raw.connected(port) as writer:
        assert client.subscribe(("switched/+", 1), ("other", 1)) == [1, 1]
        side: Any = inside.client("switched").durable_side
        inside.call(lambda: side.overlap._matching.update({"switched.a": [None]}))
        publish(writer, "switched/a", range(1))
        publish(writer, "switched/b", range(1, 3))
        eventually(lambda: kept_back(inside, "switched") == 3, PATIENCE)
        inside.call(let.set)
        assert client.expect_closed(PATIENCE) == []
    with Raw.connected(port, "switched", clean=False) as again:
        take(again, range(3))


def test_a_subscription_that_is_being_removed(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages do not come through the one that is left: rules may deny them from now on."""
    let = asyncio.Event()
    waiting: list[str] = []

    async def delete(inbox: Any, stream: str, name: str) -> bool:
        waiting.append(name)
        await let.wait()
        return await delete_consumer(inbox, stream, name)

    port = inside.ports[0]
    with Raw.connected(port, "removes", clean=False) as client, Raw.connected(port) as writer:
        assert client.subscribe(("removed/a", 1), ("removed/b", 1)) == [1, 1]
        eventually(lambda: count(inside, "removes") == 2, PATIENCE)
        publish(writer, "removed/b", range(1))
        take(client, range(1))
        monkeypatch.setattr(durable, "delete_for_good", delete)
        client.send(raw.unsubscribe("removed/a", id=2))
        eventually(lambda: waiting, PATIENCE)
        publish(writer, "removed/a", range(1, 2))
        publish(writer, "removed/b", range(2, 3))
        take(client, range(2, 3))
        inside.call(let.set)
        client.expect(raw.UNSUBACK, PATIENCE)
        client.ping()
