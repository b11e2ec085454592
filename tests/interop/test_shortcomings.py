# SPDX-License-Identifier: Apache-2.0
"""What nats-server 2.15.1's own MQTT listener gets wrong, done right by the gateway.

docs/compatibility.md lists these. The scripts run on the gateway; each needs nothing but the port of an MQTT listener.
"""

import nats as nats_py
import pytest
from nats.aio.msg import Msg

from mqtt_nats.codec import Ack, Publish
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.interop.support import unique

PROMPT = 15.0
"""Seconds in which the gateway sends a packet at once, however slow the machine; nats-server's listener waits for its
ack_wait of 30."""


async def test_topics_may_have_spaces(gateway: Gateway) -> None:
    """nats-server closes the connection."""
    async with await RawClient.connect(gateway.port, unique("sub")) as client:
        for topic in ("living room/temperature", " ", "a\tb", "two  spaces/ /x"):
            assert await client.subscribe(topic, qos=1) == (1,)
            client.publish(topic, b"x", 1)
            packets = [await client.packet(), await client.packet()]
            assert sum(isinstance(packet, Ack) for packet in packets) == 1
            publish = next(packet for packet in packets if isinstance(packet, Publish))
            assert publish.key[2:].decode() == topic
            client.ack(PUBACK, publish.packet_id)


@pytest.mark.parametrize("client_id", ["sensor.1", "sensor 1", "sensor*1", "sensor>1", "*", ">"])
async def test_client_ids_may_have_any_character(gateway: Gateway, client_id: str) -> None:
    """nats-server answers with return code 2."""
    topic = unique("id/")
    async with await RawClient.connect(gateway.port, "bystander", clean=False) as bystander:
        bystander.publish("held/by/another", b"x", 2, packet_id=1)
        await bystander.expect_ack(PUBREC, 1)
        async with await RawClient.connect(gateway.port, client_id, clean=False) as client:
            await client.subscribe(topic, qos=2)
            client.publish(topic, b"x", 2, packet_id=1)
            await client.expect_ack(PUBREC, 1)
            client.drop()
        async with await RawClient.connect(gateway.port, client_id, clean=False) as client:
            assert client.session_present
            client.ack(PUBREL, 1)
            packets = [await client.packet(), await client.packet()]
            assert Ack(PUBCOMP, 1, 0) in packets
            assert any(isinstance(packet, Publish) and packet.payload == b"x" for packet in packets)
        (await RawClient.connect(gateway.port, client_id)).drop()  # discards its own session and nobody else's
        bystander.ack(PUBREL, 1)
        await bystander.expect_ack(PUBCOMP, 1)
        async with await RawClient.connect(gateway.port, "bystander") as bystander:
            pass


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_shared_filter_is_shared(gateway: Gateway, qos: int) -> None:
    """nats-server grants `$share/...` to MQTT 3.1.1 clients and delivers nothing."""
    topic = unique("shared/")
    async with await RawClient.connect(gateway.port, unique("sub")) as client:
        assert await client.subscribe(f"$share/group/{topic}", qos=qos) == (qos,)
        async with await RawClient.connect(gateway.port, unique("pub")) as publisher:
            await publisher.deliver(topic, b"x", qos)
        await client.receive(topic, b"x", qos=qos)


async def test_a_clean_start_drops_held_publishes(gateway: Gateway) -> None:
    """nats-server delivers the old payload and loses the new one [MQTT-3.1.2-6]."""
    topic, client_id = unique("held/"), unique("pub")
    async with await RawClient.connect(gateway.port, unique("watch")) as watcher:
        await watcher.subscribe(topic, qos=2)
        async with await RawClient.connect(gateway.port, client_id, clean=False) as publisher:
            publisher.publish(topic, b"old", 2, packet_id=1)
            await publisher.expect_ack(PUBREC, 1)
        async with await RawClient.connect(gateway.port, client_id) as publisher:
            publisher.publish(topic, b"new", 2, packet_id=1)
            await publisher.expect_ack(PUBREC, 1)
            publisher.ack(PUBREL, 1)
            await publisher.expect_ack(PUBCOMP, 1)
        await watcher.receive(topic, b"new", qos=2)
        await watcher.quiet()


@pytest.mark.parametrize("qos", [1, 2])
async def test_what_was_not_acknowledged_comes_again_at_once_and_first(gateway: Gateway, qos: int) -> None:
    """nats-server is silent for 30 seconds, and sends newer messages meanwhile [MQTT-4.4.0-1] [MQTT-4.6.0-1]."""
    topic, client_id = unique("again/"), unique("sub")
    async with await RawClient.connect(gateway.port, unique("pub")) as publisher:
        async with await RawClient.connect(gateway.port, client_id, clean=False) as subscriber:
            await subscriber.subscribe(topic, qos=qos)
            await publisher.deliver_all(topic, [b"0", b"1", b"2"], qos)
            before = await subscriber.messages(3)
        await publisher.deliver(topic, b"3", qos)
        async with await RawClient.connect(gateway.port, client_id, clean=False) as subscriber:
            again = [await subscriber.expect(Publish, PROMPT) for _ in range(4)]
            assert [one.payload for one in again] == [b"0", b"1", b"2", b"3"]
            assert all(one.dup for one in again[:3])
            assert [one.packet_id for one in again[:3]] == [one.packet_id for one in before]
            for one in again:
                await subscriber.complete(one)
            await subscriber.quiet()


async def test_after_a_crash_exchanges_go_on_at_once_and_no_id_is_used_twice(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory
) -> None:
    """nats-server takes up to 30 seconds, and sends a new message under the identifier of an owed PUBREL.

    A correct receiver takes that message for a repetition and discards it [MQTT-2.3.1-4].
    """
    gateway = gateway_factory(nats_factory())
    publisher = await RawClient.connect(gateway.port, "pub")
    subscriber = await RawClient.connect(gateway.port, "sub", clean=False)
    await subscriber.subscribe("crash", qos=2)
    await publisher.deliver_all("crash", [b"0", b"1", b"2"], 2)
    ids = [message.packet_id for message in await subscriber.messages(3)]
    subscriber.ack(PUBREC, *ids[:2])
    await subscriber.expect_ack(PUBREL, *ids[:2])

    gateway.kill()
    subscriber.drop()
    publisher.drop()
    gateway.start()

    async with (
        await RawClient.connect(gateway.port, "pub") as publisher,
        await RawClient.connect(gateway.port, "sub", clean=False) as subscriber,
    ):
        await subscriber.expect_ack(PUBREL, *ids[:2], timeout=PROMPT)
        await subscriber.message("crash", b"2", PROMPT, packet_id=ids[2], dup=True)
        await publisher.deliver_all("crash", [b"3", b"4", b"5"], 2)
        fresh = await subscriber.messages(3)
        assert [one.payload for one in fresh] == [b"3", b"4", b"5"]
        assert not {one.packet_id for one in fresh} & set(ids)
        subscriber.ack(PUBCOMP, *ids[:2])


async def test_overlapping_filters_deliver_once(gateway: Gateway) -> None:
    """nats-server delivers a copy per filter, which MQTT 3.1.1 allows."""
    topic = unique("overlap/")
    for clean in (True, False):
        async with await RawClient.connect(gateway.port, unique("sub"), clean=clean) as client:
            await client.subscribe(topic, qos=1)
            await client.subscribe("overlap/+", qos=2)
            await client.subscribe("overlap/#", qos=0)
            async with await RawClient.connect(gateway.port, unique("pub")) as publisher:
                for qos in (0, 1, 2):
                    await publisher.deliver(topic, b"x", qos)
                    await client.receive(topic, b"x", qos=qos)
                    await client.quiet()


@pytest.mark.parametrize(
    ("topic", "code"),
    [
        ("$MQTT/sess/x", 0x80),
        ("$JS/API/INFO", 0x80),
        ("$KV/x", 0x80),
        ("_INBOX/x", 0x80),
        ("$SYS/REQ/SERVER/PING", 1),  # the gateways' own $SYS topics, elsewhere in NATS
    ],
)
async def test_subjects_of_the_system_are_out_of_reach(
    gateway: Gateway, nats_server: NatsServer, topic: str, code: int
) -> None:
    """nats-server publishes them for any client, and `#` receives replies to requests of the whole account."""
    nats = await nats_py.connect(nats_server.url)
    heard: list[bytes] = []

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    async with await RawClient.connect(gateway.port, unique("sub")) as client:
        assert await client.subscribe(topic, "#", qos=1) == (code, 1)
        await nats.subscribe(topic.replace("/", "."), cb=hear)
        await nats.publish(topic.replace("/", "."), b"of the system")
        await fence(nats)
        await client.quiet()
        async with await RawClient.connect(gateway.port, unique("pub")) as publisher:
            publisher.publish(topic, b"of a client", 1)
            await publisher.expect_closed()
        await client.quiet()
    await fence(nats)
    assert b"of a client" not in heard
    await nats.close()
