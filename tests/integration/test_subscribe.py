# SPDX-License-Identifier: Apache-2.0
"""SUBSCRIBE and UNSUBSCRIBE: filters of every form, overlaps, changes of QoS."""

import pytest

from mqtt_nats.codec import Ack, Publish, Suback, Subscribe, Subscription, Unsuback, Unsubscribe
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector, Stored, until

KINDS = pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])

# Filter, topics that it matches, topics that it does not; N stands for a name of the test's own.
FILTERS = [
    ("N", ["N"], ["N/", "/N", "N/a", "n"]),
    ("N/#", ["N", "N/", "N/a", "N/a/b/c", "N//"], ["Na", "/N", "N a"]),
    ("N/a/#", ["N/a", "N/a/", "N/a/b"], ["N", "N/b", "N/ab"]),
    ("N/+", ["N/a", "N/", "N/a b", "N/a.b", "N/*"], ["N", "N/a/b", "N/a/"]),
    ("N/+/#", ["N/a", "N/a/b", "N//"], ["N", "Na/b"]),
    ("+/N", ["a/N", "/N", "a b/N"], ["N", "a/b/N", "$a/N", "N/N/N"]),
    ("+/N/#", ["a/N", "a/N/b", "/N"], ["N/a", "$a/N"]),
    ("+/+/N", ["a/b/N", "//N", "/a/N"], ["a/N", "$a/b/N"]),
    ("N/+/+/b", ["N/a/a/b", "N///b"], ["N/a/b", "N/a/a/a/b"]),
    ("N/", ["N/"], ["N", "N//", "N/a"]),
    ("/N", ["/N"], ["N", "//N"]),
    ("//N", ["//N"], ["/N", "N"]),
    ("N//", ["N//"], ["N/", "N///"]),
    ("N//+", ["N//a", "N//"], ["N/a", "N/a/b"]),
    ("/N/#", ["/N", "/N/a"], ["N/a", "//N"]),
    ("N/a b", ["N/a b"], ["N/a_b", "N/a", "N/ab"]),
    ("N/ ", ["N/ "], ["N/", "N/  "]),
    ("N/a.b/c", ["N/a.b/c"], ["N/a/b/c", "N/a.b.c"]),
    ("N/.", ["N/."], ["N/", "N/.."]),
    ("N/*", ["N/*"], ["N/a", "N/**"]),
    ("N/>", ["N/>"], ["N/a", "N/a/b"]),
    ("N/*/>", ["N/*/>"], ["N/a/b"]),
    ("N/\t\r\n\v\f\x7f", ["N/\t\r\n\v\f\x7f"], ["N/"]),
    ("N/é/\U0001f321", ["N/é/\U0001f321"], ["N/e\u0301/\U0001f321"]),
    ("$N/#", ["$N", "$N/a"], ["N/a"]),
    ("$N/+", ["$N/a"], ["$N", "$N/a/b"]),
    ("N/$SYS/a", ["N/$SYS/a"], ["N/a"]),
    ("N/_INBOX/$JS", ["N/_INBOX/$JS"], []),
]


@KINDS
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_filters_of_emqx(connect: Connector, gateway: Gateway, name: str, clean: bool, qos: int) -> None:
    """They would be granted, and no message would ever come: refused in both versions, shared too."""
    wanted = (f"$exclusive/{name}", f"$queue/{name}", f"$share/g/$exclusive/{name}", f"$exclusively/{name}")
    old = await connect(f"{name}-old", clean=clean)
    assert await old.subscribe(*wanted, qos=qos) == (0x80, 0x80, 0x80, qos)
    async with await RawClient5.connect5(gateway.port, f"{name}-new", clean=clean) as new:
        assert await new.subscribe(*wanted, qos=qos) == (0x8F, 0x8F, 0x8F, qos)


@pytest.mark.parametrize("row", FILTERS, ids=[repr(row[0]) for row in FILTERS])
async def test_filter(
    connect: Connector, name: str, second_gateway: Gateway, row: tuple[str, list[str], list[str]]
) -> None:
    """[MQTT-3.3.2-3], [MQTT-4.7.1-2], [MQTT-4.7.1-3], [MQTT-4.7.2-1], [MQTT-4.7.3-4]."""
    pattern, yes, no = (row[0].replace("N", name), *([t.replace("N", name) for t in one] for one in row[1:]))
    clients = [
        await connect(f"{name}-here"),
        await connect(f"{name}-here-durable", clean=False),
        await connect(f"{name}-there", to=second_gateway),
        await connect(f"{name}-there-durable", clean=False, to=second_gateway),
    ]
    for client in clients:
        assert await client.subscribe(pattern, f"{name}-fence", qos=1) == (1, 1)
    publisher = await connect(f"{name}-publisher")
    for qos in (0, 1):
        for topic in no + yes:
            publisher.publish(topic, topic.encode(), qos)
    await publisher.expect_ack(PUBACK, *range(1, len(yes + no) + 1))
    await publisher.deliver_all(f"{name}-fence", [b"end"] * 2, 1)
    for client in clients:
        got: dict[int, list[str]] = {0: [], 1: []}
        ends = 0
        while ends < 2 or len(got[0]) + len(got[1]) < 2 * len(yes):
            one = await client.expect(Publish)
            await client.complete(one)
            if topic_of(one) == f"{name}-fence":
                ends += 1
            else:
                assert one.payload == topic_of(one).encode()
                got[one.qos].append(topic_of(one))
        assert sorted(got[0]) == sorted(yes)
        assert sorted(got[1]) == sorted(yes)
        await client.unsubscribe(pattern)
    ids = [publisher.publish(topic, topic.encode(), 1, retain=True) for topic in yes + no]
    await publisher.expect_ack(PUBACK, *ids)
    for client in clients:
        await client.subscribe(pattern, qos=1)
        replayed = await client.messages(len(yes))
        for one in replayed:
            await client.complete(one)
        assert sorted(map(topic_of, replayed)) == sorted(yes)
        await client.quiet()
    ids = [publisher.publish(topic, b"", 1, retain=True) for topic in yes + no]
    await publisher.expect_ack(PUBACK, *ids)


@KINDS
async def test_everything(connect: Connector, name: str, clean: bool, second_gateway: Gateway) -> None:
    """[MQTT-4.7.2-1]: ``#`` and ``+/#`` bring every topic once, but none that begins with ``$``."""
    one = await connect(f"{name}-1", clean=clean)
    two = await connect(f"{name}-2", clean=clean, to=second_gateway)
    await one.subscribe("#", qos=1)
    await two.subscribe("+/#", "#", qos=1)
    publisher = await connect(f"{name}-publisher")
    for qos in (0, 1, 2):
        await publisher.deliver(f"$hidden/{name}", b"x", qos)
        await publisher.deliver(f"{name}/a/{qos}", b"y", qos)
        await publisher.deliver("/", b"z", qos)
    expected = sorted([(f"{name}/a/{qos}", min(qos, 1)) for qos in (0, 1, 2)] + [("/", qos) for qos in (0, 1, 1)])
    for client in (one, two):
        got = await client.messages(6)
        for message in got:
            await client.complete(message)
        assert sorted((topic_of(message), message.qos) for message in got) == expected
        await client.quiet()


async def test_many_filters_in_one_packet(connect: Connector, name: str) -> None:
    """[MQTT-3.8.4-1], [MQTT-3.8.4-2], [MQTT-3.8.4-4], [MQTT-3.8.4-5], [MQTT-3.9.3-1]: one SUBACK, a code for each."""
    for clean in (True, False):
        client = await connect(f"{name}-{clean}", clean=clean)
        filters = [Subscription(f"{name}/{index}/+", index % 3) for index in range(60)]
        bad = ["$MQTT/#", "$JS/API/INFO", "_INBOX/x", "$share/g/$JS/x", "a" * 5000, "a/" * 200]
        for index, one in enumerate(bad):
            filters.insert(index * 5, Subscription(one, 1))
        client.send(Subscribe(9, tuple(filters)))
        suback = await client.expect(Suback, packet_id=9)
        assert suback.codes == tuple(0x80 if one.topic_filter in bad else one.qos for one in filters)
        for index in (0, 1, 2, 58):
            await client.deliver(f"{name}/fence", b"", 1)
            client.publish(f"{name}/{index}/x", b"x", 0)
            await client.message(f"{name}/{index}/x", b"x")


async def test_equal_filters_in_one_packet(connect: Connector, name: str) -> None:
    """[MQTT-3.8.4-3], [MQTT-3.8.4-4]: the last one counts, and the message comes once."""
    client = await connect(name)
    client.send(Subscribe(1, (Subscription(name, 2), Subscription(name, 0), Subscription(name, 1))))
    await client.expect(Suback, packet_id=1, codes=(2, 0, 1))
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"x", 2)
    await client.receive(name, b"x", qos=1)
    await client.quiet()


async def test_unsubscribe(connect: Connector, name: str) -> None:
    """[MQTT-3.10.4-1], [MQTT-3.10.4-2], [MQTT-3.10.4-4], [MQTT-3.10.4-5], [MQTT-3.10.4-6]"""
    for clean in (True, False):
        client = await connect(f"{name}-{clean}", clean=clean)
        await client.subscribe(f"{name}/+", f"{name}/#", f"{name}/a", qos=1)
        client.send(Unsubscribe(500, (f"{name}/+", f"{name}/never", "$JS/#", f"{name}/#")))
        await client.expect(Unsuback, packet_id=500)
        await client.deliver(f"{name}/b", b"not any more", 1)
        await client.quiet()
        client.publish(f"{name}/a", b"still", 0)
        await client.message(f"{name}/a", b"still")
        await client.unsubscribe(f"{name}/a")
        await client.deliver(f"{name}/a", b"not any more", 2)
        await client.unsubscribe(f"{name}/a")
        await client.quiet()


async def test_unsubscribed_is_forgotten(connect: Connector, name: str, stored: Stored) -> None:
    """[MQTT-3.10.4-2]: in the stored session, too; nothing is kept for it."""
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/#", f"{name}/+", qos=2)
    await client.unsubscribe(f"{name}/#", f"{name}/+")
    client.drop()
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(f"{name}/a", b"x", 1)
    assert "consumers" not in await stored.traces(name)
    client = await connect(name, clean=False)
    assert client.session_present
    await publisher.deliver(f"{name}/a", b"x", 1)
    await client.quiet()


# -- overlapping filters --------------------------------------------------------------------------


@KINDS
async def test_overlap_is_delivered_once(connect: Connector, name: str, clean: bool, second_gateway: Gateway) -> None:
    """[MQTT-3.3.5-1]: once, at the highest QoS of the matching filters, wherever it is published."""
    client = await connect(f"{name}-c", clean=clean)
    await client.subscribe(f"{name}/#", qos=0)
    await client.subscribe(f"{name}/+", f"{name}/a", f"+/{name}/#", qos=1)
    await client.subscribe("+/a", f"{name}/+/#", qos=2)
    here = await connect(f"{name}-here")
    there = await connect(f"{name}-there", to=second_gateway)
    for publisher in (here, there):
        for qos in (0, 1, 2):
            await publisher.deliver(f"{name}/a", b"%d" % qos, qos)
            await client.receive(f"{name}/a", b"%d" % qos, qos=qos)
            await publisher.deliver(f"{name}/a/b", b"%d" % qos, qos)
            await client.receive(f"{name}/a/b", b"%d" % qos, qos=qos)
            await publisher.deliver(name, b"%d" % qos, qos)
            await client.message(name, b"%d" % qos, qos=0)
    await client.quiet()
    await client.unsubscribe(f"{name}/#", "+/a", f"{name}/+/#")
    await here.deliver(f"{name}/a", b"x", 2)
    await client.receive(f"{name}/a", b"x", qos=1)
    await client.quiet()


async def test_overlap_across_resume(connect: Connector, name: str, stored: Stored, second_gateway: Gateway) -> None:
    """[MQTT-3.3.5-1], [MQTT-4.4.0-1]: still once when the session is taken up elsewhere, in flight and queued."""
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/#", qos=1)
    await client.subscribe(f"{name}/+", qos=2)
    await client.subscribe(f"{name}/a", qos=0)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver_all(f"{name}/a", [b"%d" % index for index in range(10)], 2)
    flying = await client.messages(10)
    assert [one.qos for one in flying] == [2] * 10
    for one in flying[:4]:
        await client.complete(one)
    await stored.settled(name, inflight=6)
    client.drop()
    await stored.detached(name)
    await publisher.deliver_all(f"{name}/a", [b"%d" % index for index in range(10, 20)], 2)
    client = await connect(name, clean=False, to=second_gateway)
    again = await client.messages(16)
    assert [one.payload for one in again] == [b"%d" % index for index in range(4, 20)]
    assert [one.packet_id for one in again[:6]] == [one.packet_id for one in flying[4:]]
    for one in again:
        await client.complete(one)
    await client.quiet()


# -- changes --------------------------------------------------------------------------------------


@KINDS
async def test_qos_changes(connect: Connector, name: str, clean: bool) -> None:
    """[MQTT-3.8.4-3]: the new QoS holds from SUBACK on, up and down; no message is lost or doubled on the way."""
    client = await connect(name, clean=clean)
    publisher = await connect(f"{name}-publisher")
    for step, qos in enumerate((0, 2, 1, 0, 1, 2, 0)):
        assert await client.subscribe(f"{name}/+", qos=qos) == (qos,)
        await publisher.deliver(f"{name}/a", b"%d" % step, 2)
        await client.receive(f"{name}/a", b"%d" % step, qos=qos)
    await client.quiet()


@KINDS
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 0), (1, 0)])
async def test_qos_change_with_messages_in_flight(
    connect: Connector, name: str, clean: bool, before: int, after: int, stored: Stored
) -> None:
    """[MQTT-3.8.4-3]: what was sent is completed at its own QoS; it keeps it when it is sent again."""
    client = await connect(name, clean=clean)
    await client.subscribe(name, qos=before)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver_all(name, [b"0", b"1", b"2"], 2)
    flying = await client.messages(3)
    assert [one.qos for one in flying] == [before] * 3
    await client.subscribe(name, qos=after)
    await publisher.deliver(name, b"3", 2)
    await client.receive(name, b"3", qos=after)
    await client.complete(flying[0])
    if not clean:
        await stored.settled(name, inflight=2)
        client.drop()
        client = await connect(name, clean=False)
        again = await client.messages(2)
        assert [(one.payload, one.packet_id, one.qos, one.dup) for one in again] == [
            (one.payload, one.packet_id, before, True) for one in flying[1:]
        ]
    for one in flying[1:]:
        await client.complete(one)
    await publisher.deliver(name, b"4", 2)
    await client.receive(name, b"4", qos=after)
    await client.quiet()


@KINDS
@pytest.mark.parametrize("qos", [1, 2])
async def test_unsubscribe_with_messages_in_flight(
    connect: Connector, name: str, clean: bool, qos: int, stored: Stored
) -> None:
    """[MQTT-3.10.4-2], [MQTT-3.10.4-3]: what was sent is completed, nothing new comes; nothing is left."""
    client = await connect(name, clean=clean)
    await client.subscribe(f"{name}/#", qos=qos)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver_all(f"{name}/a", [b"%d" % index for index in range(5)], 2)
    flying = await client.messages(5)
    await client.complete(flying[2])
    await client.unsubscribe(f"{name}/#")
    await publisher.deliver(f"{name}/a", b"new", 2)
    await client.complete(flying[0])
    await client.quiet()
    if not clean:
        await stored.settled(name, inflight=3)
        client.drop()
        client = await connect(name, clean=False)
        again = await client.messages(3)
        assert [(one.packet_id, one.dup) for one in again] == [(flying[index].packet_id, True) for index in (1, 3, 4)]
    for index in (1, 3, 4):
        await client.complete(flying[index])
    await client.quiet()

    async def gone() -> None:
        traces = await stored.traces(name)
        assert not traces.keys() - {"record", "pubrel consumer"}, traces

    await until(gone)
    await publisher.deliver(f"{name}/a", b"new", 2)
    await client.quiet()


async def test_unsubscribe_with_a_pubrel_owed(connect: Connector, name: str, second_gateway: Gateway) -> None:
    """[MQTT-3.10.4-3], [MQTT-4.4.0-1]: the handshake outlives the subscription and the connection."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=2)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"x", 2)
    one = await client.message(name, b"x")
    client.ack(PUBREC, one.packet_id)
    await client.expect_ack(PUBREL, one.packet_id)
    await client.unsubscribe(name)
    client.drop()
    client = await connect(name, clean=False, to=second_gateway)
    await client.expect_ack(PUBREL, one.packet_id)
    client.ack(PUBCOMP, one.packet_id)
    await client.quiet()


@KINDS
async def test_subscription_of_another_client_is_untouched(connect: Connector, name: str, clean: bool) -> None:
    """[MQTT-3.10.4-1]: equal filters of two clients, on one gateway, are two subscriptions."""
    one = await connect(f"{name}-1", clean=clean)
    two = await connect(f"{name}-2", clean=clean)
    for client in (one, two):
        await client.subscribe(f"{name}/#", qos=1)
    await one.unsubscribe(f"{name}/#")
    await one.deliver(f"{name}/a", b"x", 1)
    await two.receive(f"{name}/a", b"x")
    one.drop()
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(f"{name}/a", b"y", 1)
    await two.receive(f"{name}/a", b"y")


async def test_subscriptions_survive_a_resume(connect: Connector, name: str, second_gateway: Gateway) -> None:
    """[MQTT-3.1.2-4]: every form of filter is found again, at its QoS."""
    patterns = [
        (f"{name}/#", 0),
        (f"{name} with space/+", 1),
        (f"{name}.dots/a.b/#", 2),
        (f"/{name}//", 1),
        (f"{name}/*/>", 2),
        (f"+/{name}", 1),
        (f"${name}/#", 2),
    ]
    client = await connect(name, clean=False)
    for pattern, qos in patterns:
        await client.subscribe(pattern, qos=qos)
    client.drop()
    client = await connect(name, clean=False, to=second_gateway)
    assert client.session_present
    publisher = await connect(f"{name}-publisher")
    for topic, qos in [
        (name, 0),
        (f"{name} with space/x", 1),
        (f"{name}.dots/a.b", 2),
        (f"{name}.dots/a.b/c", 2),
        (f"/{name}//", 1),
        (f"{name}/*/>", 2),
        (f"x/{name}", 1),
        (f"${name}", 2),
    ]:
        await publisher.deliver(topic, topic.encode(), 2)
        await client.receive(topic, topic.encode(), qos=qos)
    await client.unsubscribe(*(pattern for pattern, _ in patterns))
    await publisher.deliver(f"{name} with space/x", b"", 2)
    await client.quiet()


async def test_own_messages_come_back(connect: Connector, name: str) -> None:
    """A 3.1.1 client that is subscribed to what it publishes gets it, whatever comes first."""
    client = await connect(name)
    await client.subscribe(name, qos=2)
    client.publish(name, b"0")
    await client.message(name, b"0", qos=0)
    client.publish(name, b"1", 1, packet_id=7)
    packets = [await client.packet() for _ in range(2)]
    assert Ack(PUBACK, 7, 0) in packets
    publish = next(packet for packet in packets if isinstance(packet, Publish))
    assert (publish.payload, publish.qos) == (b"1", 1)
    await client.complete(publish)
    client.publish(name, b"2", 2, packet_id=8)
    await client.expect_ack(PUBREC, 8)
    client.ack(PUBREL, 8)
    packets = [await client.packet() for _ in range(2)]
    assert Ack(PUBCOMP, 8, 0) in packets
    publish = next(packet for packet in packets if isinstance(packet, Publish))
    assert (publish.payload, publish.qos) == (b"2", 2)
    await client.complete(publish)
    await client.quiet()


async def test_unsubscribe_leaves_the_overlapping_filter_its_messages(
    connect: Connector, name: str, nats_server: NatsServer, gateway_factory: GatewayFactory, stored: Stored
) -> None:
    """[MQTT-3.3.5-1]: what waited behind the window for one filter still comes for the other that matches it."""
    narrow = gateway_factory(nats_server, env={"MQTT_NATS_MAX_INFLIGHT": "5"})
    client = await connect(name, clean=False, to=narrow)
    await client.subscribe(f"{name}/#", qos=1)
    await client.subscribe(f"{name}/a", qos=1)
    publisher = await connect(f"{name}-publisher")
    for index in range(20):
        await publisher.deliver(f"{name}/a", b"%d" % index, 1)
        await publisher.deliver(f"{name}/b", b"%d" % index, 1)
    flying = await client.messages(15)  # the window of each of three consumers: `#` has two
    await client.quiet()
    await client.unsubscribe(f"{name}/#")
    got = [(topic_of(one), one.payload) for one in flying]
    for one in flying:
        await client.complete(one)
    while (f"{name}/a", b"19") not in got:
        one = await client.expect(Publish)
        got.append((topic_of(one), one.payload))
        await client.complete(one)
    assert [payload for topic, payload in got if topic == f"{name}/a"] == [b"%d" % index for index in range(20)]
    await publisher.deliver(f"{name}/b", b"new", 1)
    await publisher.deliver(f"{name}/a", b"new", 1)
    await client.receive(f"{name}/a", b"new")
    await client.quiet()
    await stored.live(name)
