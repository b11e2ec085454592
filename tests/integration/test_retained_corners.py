# SPDX-License-Identifier: Apache-2.0
"""Replays of retained messages: subscriptions that change meanwhile, many at once, and none left to be sent."""

import asyncio
import itertools
from collections import Counter

import psutil
import pytest

from mqtt_nats.codec import Ack, Publish, Suback, Subscribe, Subscription
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector, Connector5, Stored, until
from tests.integration.test_retained import take


async def test_subscribing_again_at_qos_0_during_a_replay(connect5: Connector5, name: str) -> None:
    """[MQTT-3.8.4-4] (5.0): no message is lost for that; what was not sent yet comes at either QoS."""
    publisher = await connect5(f"{name}-publisher")
    topics = [f"{name}/{index:03}" for index in range(300)]
    for topic in topics:
        await publisher.deliver(topic, b"x", 1, retain=True)
    client = await connect5(name, session_expiry_interval=60, receive_maximum=5)
    await client.subscribe5(Subscription(f"{name}/#", 1))
    first = [await client.expect(Publish) for _ in range(5)]
    await asyncio.sleep(0.2)  # one more waits for its place
    await client.subscribe5(Subscription(f"{name}/#", 0, retain_handling=2))
    found = [topic_of(one) for one in first]
    for one in first:
        client.ack(PUBACK, one.packet_id)
    while len(found) < len(topics):
        found += [topic_of(one) for one in await take(client)]
    assert sorted(found) == topics
    for topic in topics:
        await publisher.deliver(topic, b"", 1, retain=True)


async def test_many_filters_with_large_messages(connect5: Connector5, name: str) -> None:
    """Each has little that is retained, all together more than may wait for a client that takes one at a time."""
    publisher = await connect5(f"{name}-publisher")
    topics = [f"{name}/{index:02}" for index in range(40)]
    payload = bytes(500_000)
    for topic in topics:
        await publisher.deliver(topic, payload, 1, retain=True)
    client = await connect5(name, receive_maximum=1)
    await client.subscribe(*topics, qos=1)
    found = [topic_of(one) for _ in topics for one in await take(client)]
    assert sorted(found) == topics
    await client.quiet()
    for topic in topics:
        await publisher.deliver(topic, b"", 1, retain=True)


async def test_a_replay_that_goes_on_has_nothing_left(
    connect: Connector, name: str, second_gateway: Gateway, stored: Stored
) -> None:
    """It has ended then: what is retained later is not sent for it, however often the client comes back."""
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(f"{name}/a", b"x", 1, retain=True)
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/#", qos=1)
    await client.message(f"{name}/a", b"x")
    client.drop()
    await publisher.deliver(f"{name}/a", b"", 0, retain=True)
    client = await connect(name, clean=False, to=second_gateway)

    async def ended() -> None:
        record = await stored.record(name)
        assert not record["v5"].get("replay")

    await until(ended)
    client.drop()
    await publisher.deliver(f"{name}/b", b"y", 0, retain=True)
    client = await connect(name, clean=False)
    await client.quiet()
    await publisher.deliver(f"{name}/b", b"", 0, retain=True)


def overlapping(root: str, levels: int) -> list[str]:
    """Filters that all match what is below ``root`` and as many levels that are called 1."""
    return [f"{root}/{'/'.join(one)}/+" for one in itertools.product("1+", repeat=levels)]


@pytest.mark.long
async def test_many_filters_of_a_client_that_does_not_read(connect: Connector, name: str, gateway: Gateway) -> None:
    """10 MB that match each of them: a page for each would be hundreds of megabytes, for one client."""
    publisher = await connect(f"{name}-publisher")
    topics = [f"{name}/1/1/1/1/1/1/{index}" for index in range(500)]
    for topic in topics:
        await publisher.deliver(topic, bytes(20_000), 1, retain=True)
    process = psutil.Process(gateway.pid)
    before = process.memory_info().rss
    client = await connect(name)
    client.send(Subscribe(1, tuple(Subscription(one, 0) for one in overlapping(name, 6))))
    peak = 0
    for _ in range(20):
        await asyncio.sleep(0.1)
        peak = max(peak, process.memory_info().rss)
    assert peak - before < 150_000_000
    client.drop()
    for topic in topics:
        await publisher.deliver(topic, b"", 1, retain=True)


@pytest.mark.long
async def test_many_filters_get_all_of_it(connect: Connector, name: str) -> None:
    publisher = await connect(f"{name}-publisher")
    topics = [f"{name}/1/1/1/1/{index}" for index in range(300)]
    for topic in topics:
        await publisher.deliver(topic, bytes(1000), 1, retain=True)
    client = await connect(name, clean=False)
    filters = overlapping(name, 4)
    client.send(Subscribe(1, tuple(Subscription(one, index % 2) for index, one in enumerate(filters))))
    await client.expect(Suback)
    found = [topic_of(one) for _ in range(len(filters) * len(topics)) for one in await take(client)]
    assert Counter(found) == dict.fromkeys(topics, len(filters))
    await client.quiet()
    for topic in topics:
        await publisher.deliver(topic, b"", 1, retain=True)


async def following(client: RawClient5) -> Publish:
    """The next message; each PUBREL before it is answered."""
    while not isinstance(packet := await client.packet(), Publish):
        assert isinstance(packet, Ack)
        client.ack(PUBCOMP, packet.packet_id)
    return packet


@pytest.mark.parametrize("end", ["disconnected", "broken", "killed"])
async def test_what_is_complete_of_a_replay_does_not_come_again(
    connect5: Connector5,
    name: str,
    gateway: Gateway,
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
    stored: Stored,
    end: str,
) -> None:
    """[MQTT-4.3.3-6] (5.0): at QoS 2, whatever connection goes on with it, and how often; the rest comes."""
    near = gateway_factory(nats_server)
    publisher = await connect5(f"{name}-publisher")
    payloads = [b"%d" % index for index in range(5)]
    for payload in payloads:
        await publisher.deliver(f"{name}/{payload.decode()}", payload, 2, retain=True)
    client = await connect5(name, to=near, session_expiry_interval=60, receive_maximum=1)
    await client.subscribe(f"{name}/#", qos=2)
    for payload in payloads[:2]:
        one = await client.expect(Publish, payload=payload, dup=False)
        client.ack(PUBREC, one.packet_id)
        await client.released(one.packet_id)
    first = (await stored.js.get_last_msg("$MQTT_rmsgs", f"$MQTT.rmsgs.{name}.0")).seq
    assert first is not None

    async def noted() -> None:
        assert (await stored.record(name))["v5"]["replay"][f"{name}.>"] > first

    if end == "killed":
        await until(noted)
    waiting = (await client.expect(Publish, payload=payloads[2], dup=False)).packet_id
    client.ack(PUBREC, waiting)
    await client.expect_ack(PUBREL, waiting)
    if end == "disconnected":
        await client.disconnect5()
    elif end == "killed":
        near.kill()
    client.drop()
    for _ in range(2):  # the second time, of what was complete before the first message was sent again
        client = await connect5(name, to=gateway, clean=False, session_expiry_interval=60, receive_maximum=1)
        one = await following(client)
        assert (one.payload, one.dup) == (payloads[3], True)
        client.drop()
    client = await connect5(name, clean=False, session_expiry_interval=60)
    for payload in payloads[3:]:
        one = await following(client)
        assert one.payload == payload
        await client.complete(one)

    async def ended() -> None:
        assert not (await stored.record(name))["v5"].get("replay")

    await until(ended)
    await stored.settled(name)
    await client.quiet()


async def test_a_retained_message_that_is_removed_half_way(connect5: Connector5, name: str) -> None:
    """The client knows its identifier, and takes another message for a repetition unless it gives that up first."""
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver(f"{name}/r", b"old", 2, retain=True)
    client = await connect5(name, session_expiry_interval=60)
    await client.subscribe(f"{name}/r", qos=2)
    known = (await client.message(f"{name}/r", b"old")).packet_id
    client.drop()
    await publisher.deliver(f"{name}/r", b"", 0, retain=True)
    client = await connect5(name, clean=False, session_expiry_interval=60)
    await client.released(known)
    await client.subscribe(f"$share/group/{name}/s", qos=2)
    for number in range(3):
        await publisher.deliver(f"{name}/s", b"%d" % number, 2)
        await client.receive(f"{name}/s", b"%d" % number)
    await client.quiet()
