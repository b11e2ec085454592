# SPDX-License-Identifier: Apache-2.0
"""Subscriptions that never have a consumer: the position of their session is stored before SUBACK."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import pytest
from nats.aio.msg import Msg

from mqtt_nats.codec import Publish, Suback, Subscribe, Subscription
from mqtt_streams.hashing import name_hash
from mqtt_streams.positions import Position
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory, _gateway_factory
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient, topic_of
from tests.harness.waiting import aeventually
from tests.integration.conftest import Connector, Connector5, Stored, position, until
from tests.integration.resuming import received
from tests.integration.test_session_positions import RECORDS, absent, consumerless, created

PUBREC, PUBREL, PUBCOMP = 5, 6, 7
INFO = "$JS.API.STREAM.INFO."
READER = "$JS.API.CONSUMER.CREATE.$MQTT_msgs."
RECORD = "$MQTT.sess."
POSITION = "$MQTT.pos."


@pytest.fixture(scope="module")
def gateway(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose sessions have no consumers."""
    with _gateway_factory(tmp_path_factory.mktemp("gateway")) as start:
        yield start(nats_server, *RECORDS)


class Mortal(NamedTuple):
    """A gateway that may die, and what is between it and nats-server."""

    gateway: Gateway
    proxy: NatsProxy


@contextlib.asynccontextmanager
async def started(server: NatsServer, factory: GatewayFactory, *options: str) -> AsyncIterator[Mortal]:
    proxy = NatsProxy(server.port, lambda: dies.kill())
    await proxy.start()
    dies = factory(proxy.url, "--gateway-lease", "60", *options, start=False)
    await asyncio.to_thread(dies.start)
    yield Mortal(dies, proxy)
    dies.kill()
    await proxy.close()


@pytest.fixture
async def mortal(nats_server: NatsServer, gateway_factory: GatewayFactory) -> AsyncIterator[Mortal]:
    """One more, whose words to nats-server may be held up, or not come there at all."""
    async with started(nats_server, gateway_factory, *RECORDS) as found:
        yield found


@pytest.fixture
async def mortal_keeping(nats_server: NatsServer, gateway_factory: GatewayFactory) -> AsyncIterator[Mortal]:
    """The same, but its sessions have consumers."""
    async with started(nats_server, gateway_factory) as found:
        yield found


@contextlib.asynccontextmanager
async def publishing(client: RawClient, topic: str, qos: int) -> AsyncIterator[list[bytes]]:
    """Publish numbers one after the other; the list has those that are acknowledged."""
    done: list[bytes] = []
    over = asyncio.Event()

    async def publish() -> None:
        while not over.is_set():
            payload = b"%d" % len(done)
            await client.deliver(topic, payload, qos)
            done.append(payload)

    task = asyncio.create_task(publish())
    try:
        yield done
    finally:
        over.set()
        await task


async def subscribe(client: RawClient, *filters: Subscription) -> list[Publish]:
    """Subscribe, and acknowledge the messages that come before SUBACK; these are returned."""
    packet_id = client.next_id()
    client.send(Subscribe(packet_id, filters))
    got: list[Publish] = []
    while not isinstance(packet := await client.packet(), Suback):
        assert isinstance(packet, Publish)
        got.append(packet)
        await client.complete(packet)
    assert packet.packet_id == packet_id
    assert packet.codes == tuple(one.qos for one in filters)
    return got


async def reads(stored: Stored, topic: str) -> None:
    """Wait until the shared reader of a gateway has a filter."""

    async def has() -> None:
        found = await stored.js.consumers_info("$MQTT_msgs")
        readers = [one.config.filter_subjects or [] for one in found if one.config.deliver_subject]
        readers += [[one.config.filter_subject] for one in found if one.config.filter_subject]
        assert any(f"$MQTT.msgs.{topic.replace('/', '.')}" in filters for filters in readers)

    await until(has)


async def take(client: RawClient, count: int) -> list[bytes]:
    """Take and acknowledge messages that come for the first time; their payloads."""
    payloads = []
    for _ in range(count):
        (one,) = await received(client, 1)
        assert not one.dup
        payloads.append(one.payload)
        await client.complete(one)
    return payloads


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_session_never_has_a_consumer(connect: Connector, name: str, stored: Stored, qos: int) -> None:
    """Not while it subscribes, is served, is absent, or comes back; what is published after SUBACK comes."""
    new = await created(stored)
    publisher = await connect(f"{name}-publisher")
    client = await connect(name, clean=False)
    assert await client.subscribe(name, qos=qos) == (qos,)
    for number in range(2):
        payloads = [b"%d" % one for one in range(5)]
        await publisher.deliver_all(name, payloads, qos)
        assert await take(client, 5) == payloads
        await consumerless(stored, name)
        await client.disconnect()
        await absent(stored, name)
        await publisher.deliver(name, b"absent %d" % number, qos)
        client = await connect(name, clean=False)
        assert await take(client, 1) == [b"absent %d" % number]
        await client.quiet()
    await stored.settled(name)
    assert new.of(name) == []


async def test_what_a_new_session_asks_and_stores(connect: Connector, name: str, stored: Stored) -> None:
    """One question for a session, one for retained messages; each record is written as often as it must be."""
    key = name_hash(name)
    found, states = Counter[str](), Counter[str]()

    async def count(message: Msg) -> None:
        subject, body = message.subject, message.data.decode()
        if key in subject or key in body:
            found[subject.replace(key, "KEY")] += 1
        elif subject.startswith(INFO):
            states[subject.removeprefix(INFO)] += 1

    for subject in ("$JS.API.>", "$MQTT.>"):
        await stored.nats.subscribe(subject, cb=count)
    await fence(stored.nats)
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/+", qos=1)
    await reads(stored, f"{name}/*")
    await client.disconnect()
    await aeventually(lambda: "$MQTT.timers.expiry.KEY" in found and found["$MQTT.pos.KEY"] > 1)
    await fence(stored.nats)
    notes = [found.pop(subject) for subject in list(found) if subject.startswith("$MQTT.shared.quota.")]
    claims = [found.pop(subject) for subject in list(found) if subject.startswith("$MQTT.JSA.")]
    assert notes == [2]  # none, then one consumer
    assert claims == [1, 1]
    # A gateway asks whose the session is when it leaves it; a position may be written meanwhile.
    assert found.pop("$JS.API.STREAM.MSG.GET.$MQTT_sess") == 1
    assert 2 <= found.pop("$MQTT.pos.KEY") <= 3
    assert found == {"$MQTT.sess.KEY": 2, "$MQTT.timers.expiry.KEY": 1}
    # A gateway's report each minute asks for three streams.
    assert 1 <= states["$MQTT_rmsgs"] <= 1 + max(states["$MQTT_msgs"], states["$MQTT_sess"])


async def test_sessions_that_subscribe_at_the_same_time_share_a_question(
    connect: Connector, name: str, stored: Stored
) -> None:
    """The state of the stream of retained messages is read after each SUBSCRIBE, not once for each."""
    asked: list[str] = []

    async def count(message: Msg) -> None:
        asked.append(message.subject)

    await stored.nats.subscribe("$JS.API.STREAM.INFO.$MQTT_rmsgs", cb=count)
    await fence(stored.nats)
    clients = [await connect(f"{name}-{number}", clean=False) for number in range(20)]
    answers = await asyncio.gather(*(one.subscribe(f"{name}/{at}/+", qos=1) for at, one in enumerate(clients)))
    assert answers == [(1,)] * 20
    await fence(stored.nats)
    assert 0 < len(asked) < 20


async def test_a_position_that_a_former_session_has_left(connect: Connector, name: str, stored: Stored) -> None:
    """It is overwritten, although it is not read before."""
    former = Position("former", live=["nothing"], reached=1, pending={1: 1})
    await stored.js.publish(f"$MQTT.pos.{name_hash(name)}", former.encode())
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    await consumerless(stored, name)
    assert (await position(stored.js, name)).id != "former"
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"new", 1)
    assert await take(client, 1) == [b"new"]
    await client.quiet()


@pytest.mark.parametrize("qos", [1, 2])
async def test_subscriptions_while_messages_come(connect: Connector, name: str, stored: Stored, qos: int) -> None:
    """Each filter brings all messages since its SUBACK, once and in order, beside those that the client has already."""
    new = await created(stored)
    client = await connect(name, clean=False)
    topics = [f"{name}/{number}" for number in range(4)]
    got: list[Publish] = []
    since: dict[str, int] = {}
    async with contextlib.AsyncExitStack() as stack:
        sent = {}
        for topic in topics:
            publisher = await connect(f"{topic}-publisher")
            sent[topic] = await stack.enter_async_context(publishing(publisher, topic, qos))
        for topic in topics:
            got += await subscribe(client, Subscription(topic, qos))
            since[topic] = len(sent[topic]) + 1  # one may have been stored before, whose acknowledgement is on its way
            for one in await received(client, 20):
                got.append(one)
                await client.complete(one)

    def by_topic(topic: str) -> list[bytes]:
        return [one.payload for one in got if topic_of(one) == topic]

    while not all(by_topic(topic)[-1:] == sent[topic][-1:] for topic in topics):
        (one,) = await received(client, 1)
        got.append(one)
        await client.complete(one)
    for topic in topics:
        payloads = by_topic(topic)
        assert payloads == sent[topic][int(payloads[0]) :]
        assert int(payloads[0]) <= since[topic]
    assert not any(one.dup for one in got)
    await client.quiet()
    await stored.settled(name)
    assert new.of(name) == []


async def test_a_message_right_behind_subscribe(connect: Connector, name: str, stored: Stored) -> None:
    """SUBSCRIBE takes effect before the next packet of the client, also in a session that is served already."""
    new = await created(stored)
    client = await connect(name, clean=False)
    for number in range(30):
        topic = f"{name}/{number}"
        packet_id = client.next_id()
        client.send(Subscribe(packet_id, (Subscription(topic, 1),)))
        client.publish(topic, b"own", 1)
    own: list[str] = []
    while len(own) < 30:
        packet = await client.packet()
        if isinstance(packet, Publish):
            own.append(topic_of(packet))
            await client.complete(packet)
    assert sorted(own) == sorted(f"{name}/{number}" for number in range(30))
    await consumerless(stored, name, 30)
    assert new.of(name) == []


@pytest.mark.parametrize("action", [Action.BEFORE, Action.AFTER])
@pytest.mark.parametrize("write", [POSITION, RECORD])
@pytest.mark.parametrize("served", [False, True])
async def test_a_gateway_dies_before_suback(
    connect: Connector, name: str, stored: Stored, mortal: Mortal, write: str, action: Action, served: bool
) -> None:
    """The client subscribes once more elsewhere; its other subscription loses nothing, and nothing needs a consumer."""
    new = await created(stored)
    publisher = await connect(f"{name}-publisher")
    client = await connect(name, clean=False, to=mortal.gateway)
    if served:
        await client.subscribe(f"{name}/a", qos=2)
        await consumerless(stored, name)
    trap = mortal.proxy.set("up", write, action)
    client.send(Subscribe(client.next_id(), (Subscription(f"{name}/b", 2),)))
    await asyncio.wait_for(trap.sprung.wait(), 30)
    await client.expect_closed()
    topics = (f"{name}/a", f"{name}/b")
    for topic in topics:
        await publisher.deliver(topic, b"1", 2)
    client = await connect(name, clean=False)
    assert client.session_present
    got = await subscribe(client, Subscription(f"{name}/b", 2))
    for topic in topics:
        await publisher.deliver(topic, b"2", 2)
    await publisher.deliver(f"{name}/b", b"3", 2)
    last = {(f"{name}/b", b"3"), *([(f"{name}/a", b"2")] if served else [])}
    while not last <= {(topic_of(one), one.payload) for one in got}:
        (one,) = await received(client, 1)
        got.append(one)
        await client.complete(one)
    payloads = {topic: [one.payload for one in got if topic_of(one) == topic] for topic in topics}
    assert payloads[f"{name}/a"] == ([b"1", b"2"] if served else [])
    assert payloads[f"{name}/b"] in ([b"2", b"3"], [b"1", b"2", b"3"])
    await client.quiet()
    await stored.settled(name)
    assert new.of(name) == []


@pytest.mark.parametrize("served", [False, True])
async def test_a_gateway_dies_before_its_reader_has_the_filter(
    connect: Connector, name: str, stored: Stored, mortal: Mortal, served: bool
) -> None:
    """What is published after SUBACK is not lost: the stored position is before it."""
    new = await created(stored)
    publisher = await connect(f"{name}-publisher")
    client = await connect(name, clean=False, to=mortal.gateway)
    if served:
        await client.subscribe(f"{name}/a", qos=2)
        await reads(stored, f"{name}/a")
        await publisher.deliver(f"{name}/a", b"served", 2)
        await take(client, 1)
    trap = mortal.proxy.set("up", READER, Action.HOLD)
    await client.subscribe(f"{name}/b", qos=2)
    await asyncio.wait_for(trap.sprung.wait(), 30)
    for number in range(3):
        await publisher.deliver(f"{name}/b", b"%d" % number, 2)
    mortal.proxy.crash()
    await client.expect_closed()
    client = await connect(name, clean=False)
    got = await received(client, 3)
    assert [one.payload for one in got] == [b"0", b"1", b"2"]
    for one in got:
        await client.complete(one)
    await client.quiet()
    await stored.settled(name)
    assert new.of(name) == []


async def test_retained_messages_come_first(connect5: Connector5, name: str, stored: Stored) -> None:
    """Then what was stored meanwhile, without what the client has published itself, and nothing twice."""
    new = await created(stored)
    publisher = await connect5(f"{name}-publisher")
    for number in range(3):
        await publisher.deliver(f"{name}/{number}", b"retained", 1, retain=True)
    client = await connect5(name, clean=False, session_expiry_interval=300)
    async with publishing(publisher, f"{name}/0", 1) as sent:
        await aeventually(lambda: len(sent) > 5)
        await client.subscribe5(
            Subscription(f"{name}/+", 1, no_local=True), Subscription(f"{name}/0", 2, retain_handling=2)
        )
        await aeventually(lambda: len(sent) > 50)
    client.publish(f"{name}/1", b"own", 1)
    got = await received(client, 3)
    assert sorted((topic_of(one), one.payload) for one in got) == [
        (f"{name}/{number}", b"retained") for number in range(3)
    ]
    for one in got:
        await client.complete(one)
    while got[-1].payload != sent[-1]:
        packet = await client.packet()
        if isinstance(packet, Publish):
            got.append(packet)
            await client.complete(packet)
    payloads = [one.payload for one in got[3:]]
    assert payloads == sent[int(payloads[0]) :]
    await stored.settled(name)

    async def replayed() -> None:
        assert not (await stored.record(name))["v5"].get("replay")

    await until(replayed)
    client.drop()
    await absent(stored, name)
    await publisher.deliver(f"{name}/0", b"absent", 2)
    client = await connect5(name, clean=False, session_expiry_interval=300)
    (one,) = await received(client, 1)
    assert (one.payload, one.qos, one.dup) == (b"absent", 2, False)
    await client.complete(one)
    await client.quiet()
    assert new.of(name) == []


@pytest.fixture(scope="module")
def keeping(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose sessions have consumers."""
    with _gateway_factory(tmp_path_factory.mktemp("keeping")) as start:
        yield start(nats_server)


async def test_a_gateway_dies_before_it_removes_a_consumer(
    connect: Connector, name: str, stored: Stored, mortal: Mortal, keeping: Gateway
) -> None:
    """The next gateway removes the consumer, which the position speaks for."""
    client = await connect(name, clean=False, to=keeping)
    await client.subscribe(name, qos=1)
    await client.disconnect()
    trap = mortal.proxy.set("up", f"$JS.API.CONSUMER.DELETE.$MQTT_msgs.{name_hash(name)}", Action.BEFORE)
    client = await connect(name, clean=False, to=mortal.gateway)
    await asyncio.wait_for(trap.sprung.wait(), 30)
    await client.expect_closed()
    assert (await position(stored.js, name)).present
    assert len(await stored.session_consumers(name)) == 1
    new = await created(stored)
    client = await connect(name, clean=False)
    await consumerless(stored, name)
    assert new.of(name) == []

    async def noted() -> None:
        assert not (await position(stored.js, name)).present

    await until(noted)


async def test_a_gateway_dies_when_it_has_created_a_consumer(
    connect: Connector, name: str, stored: Stored, mortal_keeping: Mortal
) -> None:
    """Before the record says that the consumer counts: the next gateway removes it, and reads from the position."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    client.drop()
    create = f"$JS.API.CONSUMER.DURABLE.CREATE.$MQTT_msgs.{name_hash(name)}"
    trap = mortal_keeping.proxy.set("answer", create, Action.AFTER)
    client = await connect(name, clean=False, to=mortal_keeping.gateway)
    await asyncio.wait_for(trap.sprung.wait(), 30)
    await client.expect_closed()
    assert len(await stored.session_consumers(name)) == 1
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"1", 1)
    new = await created(stored)
    client = await connect(name, clean=False)
    (one,) = await received(client, 1)
    assert one.payload == b"1"
    await client.complete(one)
    await consumerless(stored, name)
    await stored.settled(name)
    assert new.of(name) == []


async def test_consumers_of_a_session_that_has_subscribed_far_behind(
    connect: Connector, connect5: Connector5, name: str, stored: Stored, keeping: Gateway
) -> None:
    """The position is before the subscription: its consumer does not bring what was published before SUBSCRIBE."""
    publisher = await connect(f"{name}-publisher")
    client = await connect5(name, clean=False, session_expiry_interval=300, receive_maximum=1)
    await client.subscribe5(Subscription(f"{name}/a", 1))
    await publisher.deliver(f"{name}/a", b"1", 1)
    await received(client, 1)
    client.drop()
    await absent(stored, name)
    await publisher.deliver_all(f"{name}/a", [b"2", b"3"], 1)
    client = await connect5(name, clean=False, session_expiry_interval=300, receive_maximum=1)
    await received(client, 1)
    await publisher.deliver(f"{name}/b", b"before", 1)
    await client.subscribe5(Subscription(f"{name}/b", 1))
    await client.unsubscribe(f"{name}/a")
    client.drop()
    await absent(stored, name)
    client = await connect5(name, clean=False, session_expiry_interval=300, receive_maximum=1, to=keeping)
    (one,) = await received(client, 1)
    assert (one.payload, one.dup) == (b"1", True)
    await client.complete(one)
    await publisher.deliver(f"{name}/b", b"after", 1)
    assert await take(client, 1) == [b"after"]


@pytest.mark.parametrize("killed", [False, True])
async def test_pubrel_that_is_owed_to_an_absent_client(
    connect: Connector, name: str, stored: Stored, mortal: Mortal, killed: bool
) -> None:
    """The position has it: neither stream has a consumer of the session."""
    client = await connect(name, clean=False, to=mortal.gateway)
    await client.subscribe(name, qos=2)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver_all(name, [b"1", b"2"], 2)
    ids = [one.packet_id for one in await received(client, 2)]
    client.ack(PUBREC, ids[0])
    await client.expect_ack(PUBREL, ids[0])
    if killed:
        mortal.proxy.crash()
    client.drop()
    if not killed:
        await absent(stored, name)
    assert await stored.consumers("$MQTT_out", f"$MQTT_PUBREL_{name_hash(name)}") == []
    client = await connect(name, clean=False)
    await client.expect_ack(PUBREL, ids[0])
    client.ack(PUBCOMP, ids[0])
    (one,) = await received(client, 1)
    assert (one.payload, one.packet_id, one.dup) == (b"2", ids[1], True)
    await client.complete(one)
    await client.quiet()
    await stored.settled(name)
    assert await stored.consumers("$MQTT_out", f"$MQTT_PUBREL_{name_hash(name)}") == []


async def test_pubrel_of_a_retained_message(connect: Connector, name: str, stored: Stored, mortal: Mortal) -> None:
    """Its record has a consumer before it is stored: the next gateway finds it."""
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"retained", 2, retain=True)
    client = await connect(name, clean=False, to=mortal.gateway)
    await client.subscribe(name, qos=2)
    (one,) = await received(client, 1)
    assert one.retain
    client.ack(PUBREC, one.packet_id)
    await client.expect_ack(PUBREL, one.packet_id)
    mortal.proxy.crash()
    client.drop()
    client = await connect(name, clean=False)
    await client.expect_ack(PUBREL, one.packet_id)
    client.ack(PUBCOMP, one.packet_id)
    await client.quiet()
    await stored.settled(name)


@pytest.mark.parametrize("qos", [1, 2])
async def test_what_waits_for_retained_messages_comes_after_them_on_the_next_connection(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, qos: int
) -> None:
    """It was taken for the client, and never sent: its topic's retained message is the older one [MQTT-4.6.0-1]."""
    topics = [f"{name}/{number}" for number in range(40)]
    publisher = await connect5(f"{name}-publisher", to=gateway)
    for topic in topics:
        await publisher.deliver(topic, b"old", qos, retain=True)
    client = await connect5(name, to=gateway, receive_maximum=2, session_expiry_interval=300)
    assert await client.subscribe(f"{name}/#", qos=qos) == (qos,)
    assert [one.retain for one in await received(client, 2)] == [True, True]  # more have no place in its window
    await publisher.deliver(topics[-1], b"new", qos)
    last = await stored.last_sequence()

    async def taken() -> None:
        assert (await position(stored.js, name)).reached >= last

    await until(taken)
    client.drop()
    await stored.detached(name)
    client = await connect5(name, to=gateway, clean=False, session_expiry_interval=300)
    assert client.session_present
    found: list[Publish] = []
    while len(found) < 41:
        found += await received(client, 1)
        await client.complete(found[-1])
    assert [one.payload for one in found if topic_of(one) == topics[-1]] == [b"old", b"new"]
    assert {topic_of(one) for one in found} == set(topics)
    await client.quiet()
