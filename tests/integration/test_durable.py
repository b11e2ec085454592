# SPDX-License-Identifier: Apache-2.0
"""Messages to durable sessions: packet ids, what is sent again and how, the in-flight window."""

import asyncio

import pytest

from mqtt_nats.codec import Publish
from tests.conftest import GatewayFactory
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient, topic_of
from tests.integration.conftest import Connector, Stored, until

IDS = 49151


async def absent(connect: Connector, name: str, *filters: str, qos: int) -> None:
    """Make a durable session that is not connected."""
    client = await connect(name, clean=False)
    await client.subscribe(*filters, qos=qos)
    await client.disconnect()


async def test_messages_for_an_absent_client(connect: Connector, name: str) -> None:
    """[MQTT-3.1.2-5], [MQTT-4.5.0-1]: QoS 1 and 2 are kept in order, QoS 0 is not."""
    await absent(connect, name, f"{name}/+", qos=2)
    publisher = await connect(f"{name}-publisher")
    for index in range(30):
        await publisher.deliver(f"{name}/{index % 3}", b"%d" % index, index % 3)
    client = await connect(name, clean=False)
    assert client.session_present
    for index in range(30):
        if index % 3:
            await client.receive(f"{name}/{index % 3}", b"%d" % index, qos=index % 3, dup=False)
    await client.quiet()


@pytest.mark.parametrize("qos", [1, 2])
async def test_packet_ids_follow_the_stream(connect: Connector, name: str, stored: Stored, qos: int) -> None:
    """A durable delivery's packet id is its stream sequence modulo 49151, plus 1."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=qos)
    publisher = await connect(f"{name}-publisher")
    for index in range(10):
        await publisher.deliver(name, b"%d" % index, qos)
        sequence = await stored.last_sequence()
        await client.receive(name, b"%d" % index, packet_id=sequence % IDS + 1)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same gateway", "other gateway"])
@pytest.mark.parametrize("qos", [1, 2])
async def test_unacknowledged_is_sent_again(
    connect: Connector,
    name: str,
    stored: Stored,
    second_gateway: Gateway,
    gateway: Gateway,
    qos: int,
    elsewhere: bool,
) -> None:
    """[MQTT-4.4.0-1], [MQTT-3.3.1-1], [MQTT-4.6.0-1]: same packet ids, DUP, in order, before what is new, at once."""
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/#", qos=qos)
    publisher = await connect(f"{name}-publisher")
    payloads = [b"%d" % index for index in range(20)]
    await publisher.deliver_all(f"{name}/a", payloads, qos)
    first = await client.messages(20)
    assert [one.payload for one in first] == payloads
    assert not any(one.dup for one in first)
    for index in (3, 4, 11):  # complete, so not sent again
        await client.complete(first[index])
    await client.quiet()
    await stored.settled(name, inflight=17)
    client.drop()
    await stored.detached(name)
    await publisher.deliver_all(f"{name}/b", [b"new"], qos)
    rest = [one for index, one in enumerate(first) if index not in (3, 4, 11)]
    for attempt in range(3):
        where = second_gateway if elsewhere and attempt % 2 == 0 else gateway
        client = await connect(name, clean=False, to=where)
        again = await client.messages(18)
        assert [(one.payload, one.packet_id, one.dup) for one in again[:17]] == [
            (one.payload, one.packet_id, True) for one in rest
        ]
        assert (topic_of(again[17]), again[17].payload) == (f"{name}/b", b"new")
        assert again[17].dup is (attempt > 0)
        await client.quiet()
        client.drop()
    client = await connect(name, clean=False)
    for one in await client.messages(18):
        await client.complete(one)
    await client.quiet()
    await stored.settled(name)
    await client.disconnect()
    client = await connect(name, clean=False)
    await client.quiet()


@pytest.mark.parametrize("where", ["same gateway", "other gateway", "gateway killed"])
@pytest.mark.parametrize("step", ["before PUBREC", "after PUBREC", "after PUBREL", "after PUBCOMP"])
async def test_qos2_out_across_reconnect(
    connect: Connector,
    name: str,
    stored: Stored,
    gateway: Gateway,
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
    step: str,
    where: str,
) -> None:
    """[MQTT-4.4.0-1], [MQTT-4.3.3-1]: each step of the handshake goes on where it was, on any gateway."""
    near = gateway_factory(nats_server)
    far = near if where == "same gateway" else gateway
    client = await connect(name, clean=False, to=near)
    await client.subscribe(name, qos=2)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"once", 2)
    publish = await client.message(name, b"once", qos=2, dup=False)
    packet_id = publish.packet_id
    if step != "before PUBREC":
        client.ack(PUBREC, packet_id)
        if step != "after PUBREC":
            await client.expect_ack(PUBREL, packet_id)
        else:
            await stored.settled(name, owed=1)
    if step == "after PUBCOMP":
        client.ack(PUBCOMP, packet_id)
        await client.quiet()
        await stored.settled(name)
    if where == "gateway killed":
        near.kill()
    client.drop()
    killed = where == "gateway killed"
    await stored.detached(name, killed=killed)
    await publisher.deliver(name, b"next", 2)
    client = await connect(name, clean=False, to=far)
    assert client.session_present
    if step == "before PUBREC":
        await client.receive(name, b"once", packet_id=packet_id, dup=True)
    elif step != "after PUBCOMP":
        await client.expect_ack(PUBREL, packet_id)
        client.ack(PUBCOMP, packet_id)
    following = await client.receive(name, b"next")
    assert killed or not following.dup  # a gateway that was killed may have sent it
    await client.quiet()
    await stored.settled(name)


async def test_pubrels_come_first(connect: Connector, name: str, stored: Stored, second_gateway: Gateway) -> None:
    """[MQTT-4.4.0-1], [MQTT-4.6.0-4]: owed PUBRELs in order, then publishes with DUP, then new ones."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=2)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver_all(name, [b"%d" % index for index in range(10)], 2)
    first = await client.messages(10)
    released = [first[index].packet_id for index in (1, 2, 5, 8)]
    client.ack(PUBREC, *released)
    await client.expect_ack(PUBREL, *released)
    client.drop()
    await publisher.deliver(name, b"new", 2)
    client = await connect(name, clean=False, to=second_gateway)
    await client.expect_ack(PUBREL, *released)
    again = await client.messages(7)
    assert [one.packet_id for one in again[:6]] == [one.packet_id for one in first if one.packet_id not in released]
    assert [one.dup for one in again] == [True] * 6 + [False]
    assert again[6].payload == b"new"
    client.ack(PUBCOMP, *released)
    for one in again:
        await client.complete(one)
    await client.quiet()
    await stored.settled(name)
    client.drop()
    client = await connect(name, clean=False)
    await client.quiet()


async def test_repeated_pubrec_and_pubcomp(connect: Connector, name: str) -> None:
    """[MQTT-4.3.3-1]: PUBREC is answered with PUBREL every time; strays do no harm."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=2)
    await client.deliver(f"{name}/fence", b"", 1)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"once", 2)
    publish = await client.message(name, b"once")
    client.ack(PUBREC, publish.packet_id)
    await client.expect_ack(PUBREL, publish.packet_id)
    client.ack(PUBREC, publish.packet_id)
    await client.expect_ack(PUBREL, publish.packet_id)
    client.ack(PUBCOMP, publish.packet_id, publish.packet_id)
    client.ack(PUBACK, 4711)
    client.ack(PUBCOMP, 4711)
    await client.quiet()
    await publisher.deliver(name, b"next", 2)
    await client.receive(name, b"next")


async def test_nothing_is_sent_again_to_a_connected_client(connect: Connector, name: str, stored: Stored) -> None:
    """[MQTT-4.4.0-1]: only a reconnect makes the gateway send again; here its readers have to read again."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=2)
    await stored.live(name)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"1", 1)
    await publisher.deliver(name, b"2", 2)
    first = await client.messages(2)
    client.ack(PUBREC, first[1].packet_id)
    await client.expect_ack(PUBREL, first[1].packet_id)
    for consumer in await stored.consumers("$MQTT_msgs"):
        await stored.js.delete_consumer("$MQTT_msgs", consumer)
    await publisher.deliver(name, b"3", 1)
    await client.receive(name, b"3", dup=False)
    await client.complete(first[0])
    client.ack(PUBCOMP, first[1].packet_id)
    await client.quiet()


@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
@pytest.mark.parametrize("qos", [1, 2])
async def test_inflight_window(
    connect: Connector, name: str, nats_server: NatsServer, gateway_factory: GatewayFactory, qos: int, clean: bool
) -> None:
    """Not more than ``max_inflight`` unacknowledged messages are sent; the next go as places get free, in order."""
    narrow = gateway_factory(nats_server, env={"MQTT_NATS_MAX_INFLIGHT": "5"})
    client = await connect(name, clean=clean, to=narrow)
    await client.subscribe(name, qos=qos)
    publisher = await connect(f"{name}-publisher", to=narrow)
    payloads = [b"%d" % index for index in range(23)]
    await publisher.deliver_all(name, payloads, 2)
    window = await client.messages(5)
    got = [one.payload for one in window]
    await client.quiet()
    while window:
        one = window.pop(0)
        if qos == 1:
            client.ack(PUBACK, one.packet_id)
        else:
            client.ack(PUBREC, one.packet_id)
            await client.released(one.packet_id)
        if len(got) < len(payloads):
            window.append(await client.expect(Publish))
            got.append(window[-1].payload)
        await client.quiet()
    assert got == payloads


async def test_packet_ids_stay_unique_beyond_their_space(connect: Connector, name: str, stored: Stored) -> None:
    """[MQTT-2.3.1-4]: a message whose packet identifier is in use gets another one, and waits for nothing."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"old", 1)
    old = await client.message(name, b"old")
    sequence = await stored.last_sequence()
    await skip_to(stored, name, sequence + IDS)
    await publisher.deliver(name, b"another", 1)
    await publisher.deliver(name, b"its own", 1)
    assert await stored.last_sequence() == sequence + IDS + 1
    another = await client.message(name, b"another")  # [MQTT-4.6.0-6]
    own = await client.message(name, b"its own")
    assert old.packet_id != another.packet_id
    assert own.packet_id == old.packet_id % IDS + 1
    for message in (another, own, old):
        await client.complete(message)
    await client.quiet()


async def test_quiet_subscriptions_do_not_stop_a_session(connect: Connector, name: str, stored: Stored) -> None:
    """One that has never had a message, which began when the stream had messages: also when identifiers begin anew."""
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(f"{name}/other", b"", 1)
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/busy", f"{name}/quiet/#", qos=2)
    for _ in range(2):
        await skip_to(stored, name, await stored.last_sequence() + IDS + 2)
        for number in range(3):
            await publisher.deliver(f"{name}/busy", b"%d" % number, 2)
            await client.receive(f"{name}/busy", b"%d" % number)
        await client.quiet()


async def skip_to(stored: Stored, name: str, sequence: int) -> None:
    """Fill the stream with what nobody gets, so that the next message has ``sequence``."""
    missing = sequence - 1 - await stored.last_sequence()
    subject = f"$MQTT.msgs.{name}.filler"
    for start in range(0, missing, 5000):
        for _ in range(min(5000, missing - start)):
            await stored.nats.publish(subject, b"")
        await fence(stored.nats)

    async def filled() -> None:
        assert await stored.last_sequence() == sequence - 1

    await until(filled, 20)
    await stored.js.purge_stream("$MQTT_msgs", subject=subject)


async def test_qos0_needs_no_consumer(connect: Connector, name: str, stored: Stored) -> None:
    """A durable session's QoS 0 subscription lives in NATS only, and comes back with the session."""
    await absent(connect, name, name, qos=0)
    assert "consumers" not in await stored.traces(name)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"missed", 1)
    client = await connect(name, clean=False)
    await publisher.deliver(name, b"seen", 1)
    await client.message(name, b"seen", qos=0)
    await client.quiet()


async def test_gateway_restart_between(
    connect: Connector, name: str, nats_server: NatsServer, gateway_factory: GatewayFactory, stored: Stored
) -> None:
    """[MQTT-4.1.0-1]: sessions, queued and retained messages are in JetStream, so a new gateway has all of them."""
    gateway = gateway_factory(nats_server)
    client = await connect(name, clean=False, to=gateway)
    await client.subscribe(f"{name}/#", qos=2)
    publisher = await connect(f"{name}-publisher", to=gateway)
    await publisher.deliver(f"{name}/a", b"in flight", 2)
    flying = await client.message(f"{name}/a", b"in flight")
    await publisher.deliver(f"elsewhere/{name}", b"kept", 1, retain=True)
    gateway.restart()
    await client.expect_closed()
    publisher = await connect(f"{name}-publisher", to=gateway)
    await publisher.deliver(f"{name}/a", b"queued", 1)
    client = await connect(name, clean=False, to=gateway)
    assert client.session_present
    await client.receive(f"{name}/a", b"in flight", packet_id=flying.packet_id, dup=True)
    await client.receive(f"{name}/a", b"queued", dup=False)
    await client.subscribe(f"elsewhere/{name}", qos=1)
    await client.receive(f"elsewhere/{name}", b"kept", retain=True)
    await stored.settled(name)
    gateway.restart(kill=True)
    client = await connect(name, clean=False, to=gateway)
    assert client.session_present
    await client.quiet()


async def test_offline_backlog_is_larger_than_the_window(connect: Connector, name: str) -> None:
    """[MQTT-3.1.2-5], [MQTT-4.6.0-6]: 1,000 queued messages come in order while the client acknowledges."""
    await absent(connect, name, f"{name}/#", qos=1)
    publisher = await connect(f"{name}-publisher")
    payloads = [b"%d" % index for index in range(1000)]
    await publisher.deliver_all(f"{name}/a", payloads, 1)
    client = await connect(name, clean=False)
    for payload in payloads:
        await client.receive(f"{name}/a", payload, dup=False)
    await client.quiet()


async def test_resume_while_messages_are_published(connect: Connector, name: str, gateway: Gateway) -> None:
    """[MQTT-4.6.0-6], [MQTT-4.3.3-1]: reconnects in the middle of a stream lose and double nothing at QoS 2."""
    await absent(connect, name, name, qos=2)
    total = 400
    publisher = await connect(f"{name}-publisher")
    got: list[bytes] = []

    async def publish() -> None:
        for start in range(0, total, 20):
            await publisher.deliver_all(name, [b"%d" % index for index in range(start, start + 20)], 2)

    async def receive() -> None:
        known: set[int] = set()
        while len(got) < total:
            async with await RawClient.connect(gateway.port, name, clean=False) as client:
                for _ in range(60):
                    packet = await client.packet()
                    if isinstance(packet, Publish):
                        if packet.packet_id not in known:  # what a receiver at QoS 2 does
                            known.add(packet.packet_id)
                            got.append(packet.payload)
                        client.ack(PUBREC, packet.packet_id)
                    else:
                        known.discard(packet.packet_id)  # type: ignore[union-attr]  # an Ack: PUBREL
                        client.ack(PUBCOMP, packet.packet_id)  # type: ignore[union-attr]
                    if len(got) == total:
                        return

    await asyncio.gather(publish(), receive())
    assert got == [b"%d" % index for index in range(total)]
