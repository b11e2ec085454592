# SPDX-License-Identifier: Apache-2.0
"""Retained messages: set, replace, clear, replay, and their order with new messages."""

import pytest
from nats.js.errors import NotFoundError

from mqtt_nats.codec import Ack, PingReq, PingResp, Publish, Suback, Subscribe, Subscription, Unsubscribe
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient, topic_of
from tests.integration.conftest import Connector, Stored, until

MANY = 1300
"""More than JetStream's multi_last answers at once (1,024)."""

KINDS = pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])


async def replayed(client: RawClient, *filters: str, qos: int = 2) -> list[tuple[str, bytes, int]]:
    """Subscribe; topic, payload and QoS of the retained messages that follow."""
    codes = await client.subscribe(*filters, qos=qos)
    assert codes == (qos,) * len(filters)
    got: list[Publish] = []
    client.send(PingReq())  # what is small enough comes right behind SUBACK
    while isinstance(packet := await client.packet(), Publish):
        assert packet.retain
        assert not packet.dup
        got.append(packet)
    assert isinstance(packet, PingResp)
    for one in got:
        await client.complete(one)
    return [(topic_of(one), one.payload, one.qos) for one in got]


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_set_replace_clear(connect: Connector, name: str, stored: Stored, qos: int) -> None:
    """[MQTT-3.3.1-5], [MQTT-3.3.1-6], [MQTT-3.3.1-7], [MQTT-3.3.1-10], [MQTT-3.3.1-11], [MQTT-3.3.1-12]"""
    publisher = await connect(f"{name}-publisher")
    listener = await connect(f"{name}-listener")
    await listener.subscribe(name, qos=2)
    subject = f"$MQTT.rmsgs.{name}"

    async def last(expected: bytes | None) -> None:
        client = await connect(f"{name}-late")
        await client.subscribe(name, qos=2)
        if expected is not None:
            await client.receive(name, expected, retain=True, qos=qos)
        await client.quiet()
        await client.disconnect()

    for payload in (b"first", b"second"):
        await publisher.deliver(name, payload, qos, retain=True)
        await listener.receive(name, payload, retain=False, qos=qos)  # [MQTT-3.3.1-9]
        if not qos:
            await until(lambda payload=payload: _holds(stored, name, payload))  # type: ignore[misc]
        await last(payload)
    await publisher.deliver(name, b"passing", 2)
    await listener.receive(name, b"passing", retain=False)
    await last(b"second")
    assert await stored.count("$MQTT_rmsgs", subject) == 1
    await publisher.deliver(name, b"", 0)  # empty, but not retained: clears nothing
    await listener.receive(name, b"")
    await last(b"second")
    await publisher.deliver(name, b"", qos, retain=True)
    await listener.receive(name, b"", retain=False, qos=qos)

    async def no_tombstone() -> None:
        assert await stored.count("$MQTT_rmsgs", subject) == 0

    await until(no_tombstone)
    await last(None)
    await publisher.deliver(name, b"", 1, retain=True)  # nothing there to clear
    await until(no_tombstone)


async def _holds(stored: Stored, name: str, payload: bytes) -> None:
    assert await stored.count("$MQTT_rmsgs", f"$MQTT.rmsgs.{name}") == 1
    try:
        message = await stored.js.get_msg("$MQTT_rmsgs", subject=f"$MQTT.rmsgs.{name}")
    except NotFoundError:
        raise AssertionError("nothing is retained yet") from None
    assert message.data == payload


async def test_lower_qos_of_the_two(connect: Connector, name: str) -> None:
    """[MQTT-3.8.4-6], [MQTT-3.3.1-8]"""
    publisher = await connect(f"{name}-publisher")
    for qos in (0, 1, 2):
        await publisher.deliver(f"{name}/{qos}", b"%d" % qos, qos, retain=True)
    for clean in (True, False):
        for granted in (0, 1, 2):
            client = await connect(f"{name}-{clean}-{granted}", clean=clean)
            assert sorted(await replayed(client, f"{name}/+", qos=granted)) == [
                (f"{name}/{qos}", b"%d" % qos, min(qos, granted)) for qos in (0, 1, 2)
            ]
    for qos in (0, 1, 2):
        await publisher.deliver(f"{name}/{qos}", b"", 1, retain=True)


@KINDS
async def test_every_subscribe_replays(connect: Connector, name: str, stored: Stored, clean: bool) -> None:
    """[MQTT-3.8.4-3]: a repeated SUBSCRIBE gets them again; a resumed session does not."""
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"kept", 1, retain=True)
    client = await connect(f"{name}-c", clean=clean)
    for _ in range(3):
        assert await replayed(client, name) == [(name, b"kept", 1)]
    assert await replayed(client, f"{name}/#") == [(name, b"kept", 1)]
    if not clean:

        async def noted() -> None:
            assert not (await stored.record(f"{name}-c"))["v5"].get("replay")

        await until(noted)
        client.drop()
        client = await connect(f"{name}-c", clean=False)
        await client.quiet()
    await publisher.deliver(name, b"", 1, retain=True)


async def test_retained_outlives_session_and_gateway(
    connect: Connector, name: str, nats_server: NatsServer, gateway_factory: GatewayFactory
) -> None:
    """[MQTT-3.1.2-7]: a gateway that starts later has it, from a client that is gone, clean session or not."""
    first = gateway_factory(nats_server)
    for clean in (True, False):
        client = await connect(f"{name}-{clean}", clean=clean, to=first)
        await client.deliver(f"{name}/{clean}", b"kept", 2, retain=True)
    assert first.term() == 0
    second = gateway_factory(nats_server)
    client = await connect(f"{name}-late", to=second)
    assert sorted(await replayed(client, f"{name}/#")) == [
        (f"{name}/False", b"kept", 2),
        (f"{name}/True", b"kept", 2),
    ]
    for clean in (True, False):
        await client.unsubscribe(f"{name}/#")
        await client.deliver(f"{name}/{clean}", b"", 1, retain=True)


async def test_set_here_seen_there(connect: Connector, name: str, second_gateway: Gateway) -> None:
    """A retained message is on every gateway when it is acknowledged, and gone from every one when cleared."""
    here = await connect(f"{name}-here")
    for payload in (b"one", b"two", b""):
        await here.deliver(name, payload, 1, retain=True)
        there = await connect(f"{name}-there", to=second_gateway)
        assert await replayed(there, name) == ([(name, payload, 1)] if payload else [])


async def test_wildcards_leave_dollar_topics_out(connect: Connector, name: str) -> None:
    """[MQTT-4.7.2-1] holds for the replay, too."""
    client = await connect(name)
    await client.deliver(f"${name}/a", b"hidden", 1, retain=True)
    assert await replayed(client, "#") == []
    assert await replayed(client, "+/a") == []
    assert await replayed(client, f"${name}/#") == [(f"${name}/a", b"hidden", 1)]
    await client.unsubscribe("#", "+/a", f"${name}/#")
    await client.deliver(f"${name}/a", b"", 1, retain=True)


async def test_several_filters(connect: Connector, name: str) -> None:
    """[MQTT-3.8.4-4]: every filter of a SUBSCRIBE brings its own matches."""
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(f"{name}/a", b"a", 1, retain=True)
    await publisher.deliver(f"{name}/b", b"b", 1, retain=True)
    client = await connect(name)
    got = await replayed(client, f"{name}/a", f"{name}/none", f"{name}/+")
    assert sorted(set(got)) == [(f"{name}/a", b"a", 1), (f"{name}/b", b"b", 1)]
    for topic in (f"{name}/a", f"{name}/b"):
        await publisher.deliver(topic, b"", 1, retain=True)


# -- many -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def many(gateway: Gateway) -> str:
    """The root of 1,300 retained messages at QoS 0, 1 and 2 in turn."""
    root = "many"
    async with await RawClient.connect(gateway.port, "fills-many") as client:
        for index in range(MANY):
            client.publish(f"{root}/{index}/x", b"%d" % index, index % 3, retain=True)
        todo = MANY - len(range(0, MANY, 3))
        while todo:
            ack = await client.expect(Ack)
            if ack.kind == PUBREC:
                client.ack(PUBREL, ack.packet_id)
            else:
                todo -= 1
    return root


def check_many(got: list[Publish], granted: int) -> None:
    """Every message once, with its payload and QoS."""
    assert len(got) == MANY
    for one in got:
        index = int(one.payload)
        assert topic_of(one) == f"many/{index}/x"
        assert (one.qos, one.retain) == (min(index % 3, granted), True)
    assert len({one.payload for one in got}) == MANY


@KINDS
@pytest.mark.parametrize("pattern", ["many/#", "many/+/x"])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_replay_of_many(
    connect: Connector, name: str, many: str, second_gateway: Gateway, clean: bool, pattern: str, qos: int
) -> None:
    """[MQTT-3.3.1-6]: as many as there are, at the QoS of each."""
    client = await connect(name, clean=clean, to=second_gateway)
    await client.subscribe(pattern, qos=qos)
    got: list[Publish] = []
    released = 0
    while len(got) < MANY or released < sum(one.qos == 2 for one in got):
        one = await take(client)
        got += one
        released += not one
    check_many(got, qos)
    await client.quiet()
    await client.unsubscribe(pattern)
    await client.quiet()


async def take(client: RawClient) -> list[Publish]:
    """The next packet, answered; what it brought, if it is a PUBLISH."""
    packet = await client.packet()
    if isinstance(packet, Publish):
        if packet.qos:
            client.ack(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id)
        return [packet]
    assert isinstance(packet, Ack)
    assert packet.kind == PUBREL
    client.ack(PUBCOMP, packet.packet_id)
    return []


@KINDS
async def test_replay_to_a_slow_reader(connect: Connector, name: str, many: str, clean: bool) -> None:
    """A client that reads late gets all of it, and keeps nobody else waiting."""
    slow = await connect(name, clean=clean)
    slow.send(Subscribe(1, (Subscription("many/#", 1),)))
    other = await connect(f"{name}-other")
    for index in range(50):
        await other.deliver(f"{name}/x", b"%d" % index, 1)
    await slow.expect(Suback, codes=(1,))
    got: list[Publish] = []
    while len(got) < MANY:
        got += await take(slow)
    check_many(got, 1)


@pytest.mark.long
@pytest.mark.parametrize("qos", [1, 2])
async def test_replay_of_large_messages_to_a_slow_reader(connect: Connector, name: str, qos: int) -> None:
    """60 MB for a client that does not read: it is not held in memory, and nobody else waits."""
    publisher = await connect(f"{name}-publisher")
    payload = bytes(200_000)
    for index in range(300):
        await publisher.deliver(f"{name}/{index}", payload, 1, retain=True)
    slow = await connect(name)
    slow.send(Subscribe(1, (Subscription(f"{name}/#", 0 if qos == 1 else 2),)))
    for index in range(100):
        await publisher.deliver(f"{name}-other", b"%d" % index, 1)
    await slow.expect(Suback)
    topics: set[str] = set()
    while len(topics) < 300:
        for one in await take(slow):
            assert one.payload == payload
            topics.add(topic_of(one))
    for topic in topics:
        await publisher.deliver(topic, b"", 1, retain=True)


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("after", [0, 90, 700])
async def test_replay_goes_on_after_a_disconnect(
    connect: Connector, name: str, many: str, second_gateway: Gateway, qos: int, after: int
) -> None:
    """[MQTT-4.4.0-1], [MQTT-3.3.1-6]: broken off, and continued on another gateway: all come, again only with DUP."""
    client = await connect(name, clean=False)
    await client.subscribe("many/#", qos=qos)
    ids: dict[bytes, int] = {}
    finished: set[int] = set()

    def note(one: Publish) -> None:
        assert one.retain
        if one.qos:
            assert one.dup or one.payload not in ids
            assert ids.setdefault(one.payload, one.packet_id) == one.packet_id

    while len(ids) < after:
        for one in await take(client):
            note(one)
    unread = [await client.packet() for _ in range(40)]
    publishes = [packet for packet in unread if isinstance(packet, Publish)]
    for one in publishes:
        note(one)
    received = [one for one in publishes if one.qos == 2][:5]
    for one in received:  # PUBREL is owed for these, so they must not come again
        client.ack(PUBREC, one.packet_id)
        await client.released(one.packet_id, answer=False)
        finished.add(one.packet_id)
    client.drop()
    client = await connect(name, clean=False, to=second_gateway)
    assert client.session_present
    todo = {b"%d" % index for index in range(MANY) if index % 3} - ids.keys()
    while todo or finished:
        packet = await client.packet()
        if isinstance(packet, Publish):
            assert not packet.qos or packet.packet_id not in finished
            note(packet)
            todo.discard(packet.payload)
            if packet.qos:
                client.ack(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id)
        else:
            assert isinstance(packet, Ack)
            finished.discard(packet.packet_id)
            client.ack(PUBCOMP, packet.packet_id)


async def test_replay_goes_on_with_what_was_not_read_yet(
    connect: Connector, name: str, second_gateway: Gateway
) -> None:
    """Nothing on the first page has to be acknowledged, and the client leaves before there is another."""
    publisher = await connect(f"{name}-publisher")
    topics = [f"{name}/{index:03}" for index in range(330)]
    for index, topic in enumerate(topics):
        await publisher.deliver(topic, b"%d" % index, int(index >= 300), retain=True)
    client = await connect(name, clean=False)
    client.send(Subscribe(1, (Subscription(f"{name}/#", 1),)))
    await client.expect(Suback)
    client.drop()
    client = await connect(name, clean=False, to=second_gateway)
    todo = set(topics[300:])
    while todo:
        todo -= {topic_of(one) for one in await take(client)}
    for topic in topics:
        await publisher.deliver(topic, b"", 1, retain=True)


async def test_acknowledged_pages_are_not_replayed_again(
    connect: Connector, name: str, many: str, second_gateway: Gateway, stored: Stored
) -> None:
    """The session record knows how far a replay is; when it is complete, nothing comes on resume."""
    client = await connect(name, clean=False)
    await client.subscribe("many/#", qos=1)
    for _ in range(900):
        await take(client)

    async def noted() -> None:
        record = await stored.record(name)
        assert min(record["v5"]["replay"].values()) > 1

    await until(noted)
    client.drop()
    client = await connect(name, clean=False, to=second_gateway)
    count = 0
    last = b"%d" % (MANY - 2)  # the last one at QoS 1 or 2
    while (one := await client.expect(Publish)).payload != last:
        count += 1
        await client.complete(one)
    assert count < 1100  # a page is 256
    client.drop()
    client = await connect(name, clean=False)
    while (again := (await take(client))[0]).payload != last:
        pass
    assert again.dup

    async def done() -> None:
        record = await stored.record(name)
        assert not record["v5"].get("replay")

    await until(done)
    client.drop()
    client = await connect(name, clean=False)
    await client.quiet()


@KINDS
async def test_unsubscribe_ends_a_replay(connect: Connector, name: str, clean: bool) -> None:
    """[MQTT-3.10.4-2]: what was not sent before UNSUBACK does not come, and a new SUBSCRIBE brings all of it."""
    publisher = await connect(f"{name}-publisher")
    payload = bytes(100_000)
    for index in range(100):
        await publisher.deliver(f"{name}/{index}", payload, 1, retain=True)
    client = await connect(name, clean=clean)
    await client.subscribe(f"{name}/#", qos=0)
    client.send(Unsubscribe(99, (f"{name}/#",)))
    count = 0
    while isinstance(await client.packet(), Publish):
        count += 1
    assert count < 100
    await client.deliver(f"{name}/fence", b"", 1)
    await client.quiet()
    await client.subscribe(f"{name}/#", qos=0)
    assert len({topic_of(one) for one in await client.messages(100)}) == 100
    await client.quiet()
    for index in range(100):
        await publisher.deliver(f"{name}/{index}", b"", 1, retain=True)


@KINDS
@pytest.mark.parametrize("qos", [0, 1])
async def test_new_messages_come_after_retained_ones(
    connect: Connector, name: str, many: str, clean: bool, qos: int
) -> None:
    """The last message that a new subscriber sees on a topic is the newest, however long the replay takes."""
    publisher = await connect(f"{name}-publisher")
    client = await connect(name, clean=clean)
    client.send(Subscribe(1, (Subscription("many/#", 1),)))
    for index in range(0, MANY, 13):
        publisher.publish(f"many/{index}/x", b"early", qos)  # some of them before the subscription
    await client.expect(Suback)
    for index in range(0, MANY, 13):
        publisher.publish(f"many/{index}/x", b"new", qos)
    seen: set[str] = set()
    new = old = 0
    while new < len(range(0, MANY, 13)) or old < MANY:
        for one in await take(client):
            if one.retain:
                old += 1
                assert topic_of(one) not in seen, "an older message after a newer one"
            else:
                new += one.payload == b"new"
                seen.add(topic_of(one))
    assert (old, new) == (MANY, len(range(0, MANY, 13)))


@KINDS
async def test_subscribing_again_during_a_replay(connect: Connector, name: str, many: str, clean: bool) -> None:
    """[MQTT-3.8.4-3]: the second SUBSCRIBE replays too; new messages come once, after both."""
    publisher = await connect(f"{name}-publisher")
    client = await connect(name, clean=clean)
    client.send(Subscribe(1, (Subscription("many/#", 0),)), Subscribe(2, (Subscription("many/#", 0),)))
    subacks = old = 0
    while subacks < 2:
        packet = await client.packet()
        subacks += isinstance(packet, Suback)
        old += isinstance(packet, Publish)
    await publisher.deliver("many/0/x", b"new", 0)
    while (one := await client.expect(Publish)).payload != b"new":
        old += 1
        assert one.retain
    assert old == 2 * MANY
    await client.quiet()


async def test_unacknowledged_replay_does_not_hold_up_other_requests(
    connect: Connector, name: str, second_gateway: Gateway
) -> None:
    """[MQTT-3.8.4-1]: SUBSCRIBE is answered while the client owes PUBACKs for retained messages."""
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"kept", 1, retain=True)
    client = await connect(f"{name}-c", clean=False)
    await client.subscribe(name, qos=1)
    one = await client.message(name, b"kept")
    await client.subscribe(f"{name}/other", qos=1)
    await publisher.deliver(f"{name}/other", b"x", 1)
    await client.receive(f"{name}/other", b"x")
    await client.unsubscribe(f"{name}/other")
    client.drop()
    client = await connect(f"{name}-c", clean=False, to=second_gateway)
    await client.receive(name, b"kept", dup=True, packet_id=one.packet_id, retain=True)
    await client.subscribe(f"{name}/other", qos=1)
    await publisher.deliver(name, b"", 1, retain=True)
