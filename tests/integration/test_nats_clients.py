# SPDX-License-Identifier: Apache-2.0
"""NATS clients on the same topics: subjects, headers, and delivery at QoS 1."""

import asyncio
import re

import pytest
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

from mqtt_nats.codec import Will
from tests.conftest import GatewayFactory
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBREC, PUBREL
from tests.integration.conftest import Connector, Stored

KINDS = pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])


async def incoming(stored: Stored, subject: str) -> "asyncio.Queue[Msg]":
    """What a NATS client gets on a subject."""
    queue: asyncio.Queue[Msg] = asyncio.Queue()
    await stored.nats.subscribe(subject, cb=queue.put)
    await fence(stored.nats)
    return queue


async def following(queue: "asyncio.Queue[Msg]") -> Msg:
    async with asyncio.timeout(30):
        return await queue.get()


@KINDS
async def test_nats_publish_arrives_at_qos_0(
    connect: Connector, name: str, stored: Stored, second_gateway: Gateway, clean: bool
) -> None:
    """Whatever QoS was granted; headers of the publisher's own change nothing, and no stored copy is made."""
    here = await connect(f"{name}-here", clean=clean)
    there = await connect(f"{name}-there", clean=clean, to=second_gateway)
    wild = await connect(f"{name}-wild", clean=clean)
    await here.subscribe(f"{name}/#", qos=2)
    await there.subscribe(f"{name}/a/+", qos=1)
    await wild.subscribe("+/a/b", qos=1)
    stream = await stored.last_sequence()
    await stored.nats.publish(f"{name}.a.b", b"plain")
    await stored.nats.publish(f"{name}.a.b", b"headers", headers={"Own": "1", "Nmqtt-Pub": "0"})
    await stored.nats.publish(f"{name}.a.b", b"reply", reply="_INBOX.somewhere")
    await stored.nats.publish(f"{name}.a.b", b"")
    for client in (here, there, wild):
        for payload in (b"plain", b"headers", b"reply", b""):
            await client.message(f"{name}/a/b", payload, qos=0, retain=False)
        await client.quiet()
    assert await stored.last_sequence() == stream


@KINDS
async def test_nats_publish_at_qos_1(
    connect: Connector, name: str, stored: Stored, second_gateway: Gateway, clean: bool
) -> None:
    """Both copies with ``Nmqtt-Pub: 1``: once, at QoS 1 at most; an absent durable session gets it later."""
    clients = [
        await connect(f"{name}-{granted}-{index}", clean=clean, to=to)
        for index, to in enumerate((None, second_gateway))
        for granted in (0, 1, 2)
    ]
    for index, client in enumerate(clients):
        await client.subscribe(f"{name}/+", qos=index % 3)
    absent = await connect(f"{name}-absent", clean=False)
    await absent.subscribe(f"{name}/+", qos=1)
    await absent.disconnect()
    headers = {"Nmqtt-Pub": "1"}
    for index in range(5):
        await stored.nats.publish(f"{name}.a", b"%d" % index, headers=headers)
        await stored.js.publish(f"$MQTT.msgs.{name}.a", b"%d" % index, headers=headers)
    for index, client in enumerate(clients):
        for count in range(5):
            await client.receive(f"{name}/a", b"%d" % count, qos=min(index % 3, 1))
        await client.quiet()
    absent = await connect(f"{name}-absent", clean=False)
    for count in range(5):
        await absent.receive(f"{name}/a", b"%d" % count, qos=1)
    await absent.quiet()


async def test_stored_message_without_header(connect: Connector, name: str, stored: Stored) -> None:
    """A message in the stream without ``Nmqtt-Pub`` is passed over, and holds nothing up."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    await stored.js.publish(f"$MQTT.msgs.{name}", b"no header")
    await stored.js.publish(f"$MQTT.msgs.{name}", b"next", headers={"Nmqtt-Pub": "1"})
    await client.receive(name, b"next")
    await client.quiet()
    await stored.settled(name)


async def test_mqtt_publishes_reach_nats(connect: Connector, name: str, stored: Stored) -> None:
    """Subject and headers of every QoS; the stored copy has the same."""
    plain = await incoming(stored, f"{name}.>")
    copies = await incoming(stored, f"$MQTT.msgs.{name}.>")
    client = await connect(f"{name} publisher/é")
    await client.deliver(f"{name}/a", b"0", 0)
    message = await following(plain)
    assert (message.subject, message.data, message.headers) == (f"{name}.a", b"0", None)
    await client.deliver(f"{name}/a", b"1", 1)
    client.publish(f"{name}/a", b"2", 2, packet_id=77)
    await client.expect_ack(PUBREC, 77)
    assert plain.qsize() <= 1
    client.ack(PUBREL, 77)
    await client.expect_ack(7, 77)
    ids = set()
    for qos in (1, 2):
        for queue, subject in ((plain, f"{name}.a"), (copies, f"$MQTT.msgs.{name}.a")):
            message = await following(queue)
            headers = dict(message.headers or {})
            assert (message.subject, message.data) == (subject, b"%d" % qos)
            identifier = headers.pop("Nmqtt-Id")
            assert re.fullmatch("[0-9a-f]{32}", identifier)
            ids.add(identifier)
            if qos == 2:
                assert headers.pop("Nats-Msg-Id").startswith("q2-")
            assert headers.pop("Nmqtt-Subject", None) == (f"{name}.a" if queue is plain else None)
            assert headers == {"Nmqtt-Pub": str(qos), "Nmqtt-Client": f"{name}%20publisher%2F%C3%A9"}
    assert len(ids) == 2
    assert plain.empty()
    assert copies.empty()


async def test_client_id_can_be_kept_from_nats(
    connect: Connector, name: str, stored: Stored, nats_server: NatsServer, gateway_factory: GatewayFactory
) -> None:
    """``publish_client_id = false``: no header names the publisher."""
    gateway = gateway_factory(nats_server, env={"MQTT_NATS_PUBLISH_CLIENT_ID": "false"})
    plain = await incoming(stored, name)
    client = await connect(f"{name}-publisher", to=gateway)
    await client.deliver(name, b"x", 1)
    found = (await following(plain)).headers or {}
    assert found.keys() == {"Nmqtt-Pub", "Nmqtt-Id", "Nmqtt-Subject"}


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_will_names_its_publisher_to_nats(connect: Connector, name: str, stored: Stored, qos: int) -> None:
    plain = await incoming(stored, name)
    client = await connect(f"{name} a", will=Will(name, b"farewell", qos, False))
    client.drop()
    assert ((await following(plain)).headers or {})["Nmqtt-Client"] == f"{name}%20a"


@pytest.mark.parametrize(
    ("topic", "subject"),
    [
        ("N/a.b", "N.a//b"),
        ("N/with space", "N.with/_space"),
        ("N/", "N./"),
        ("/N", "/.N"),
        ("N//x", "N./.x"),
        ("N/*/>", "N./~s./~g"),
        ("N/é", "N.é"),
        ("$N/a", "$N.a"),
    ],
)
async def test_subjects(connect: Connector, name: str, stored: Stored, topic: str, subject: str) -> None:
    """Topics and subjects correspond both ways, also where a character has to be escaped."""
    topic, subject = topic.replace("N", name), subject.replace("N", name)
    queue = await incoming(stored, subject)
    client = await connect(name)
    await client.subscribe(topic)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(topic, b"to NATS")
    assert (await following(queue)).data == b"to NATS"
    await client.message(topic, b"to NATS")
    await stored.nats.publish(subject, b"from NATS")
    await client.message(topic, b"from NATS")
    await client.quiet()


async def test_another_subject_that_leads_to_a_topic(connect: Connector, name: str, stored: Stored) -> None:
    """What is published on the topic afterwards has the topic's own subject all the same."""
    everything = await connect(f"{name}-everything")
    await everything.subscribe("#")
    durable = await connect(f"{name}-durable", clean=False)
    await durable.subscribe(f"{name}/x", qos=1)
    queue = await incoming(stored, f"{name}.x")
    await stored.nats.publish(f"{name}.x/", b"x")
    await everything.message(f"{name}/x", b"x")
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(f"{name}/x", b"y", 1)
    await durable.receive(f"{name}/x", b"y", qos=1)
    assert (await following(queue)).data == b"y"


async def test_subjects_that_are_no_topics(connect: Connector, name: str, stored: Stored) -> None:
    """A NATS subject whose topic would have a wildcard character reaches nobody, and harms nobody."""
    client = await connect(name)
    await client.subscribe(f"{name}/#", "#")
    for token in ("a+b", "a#", "+", "#"):
        await stored.nats.publish(f"{name}.{token}", b"x")
    await stored.nats.publish(f"{name}.ok", b"x")
    await client.message(f"{name}/ok", b"x")
    await client.quiet()


async def test_retained_only_from_mqtt(connect: Connector, name: str, stored: Stored) -> None:
    """What a NATS client publishes is not retained, and takes no retained message away."""
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"kept", 1, retain=True)
    await stored.nats.publish(name, b"passing")
    await stored.nats.publish(name, b"")
    await fence(stored.nats)
    client = await connect(name)
    await client.subscribe(name, qos=1)
    await client.receive(name, b"kept", retain=True)
    await publisher.deliver(name, b"", 1, retain=True)


@KINDS
async def test_inner_traffic_is_not_shown(connect: Connector, name: str, stored: Stored, clean: bool) -> None:
    """[MQTT-4.7.2-1]: ``#`` shows no request, reply, acknowledgement or copy that the gateways or NATS make."""
    spy = await connect(f"{name}-spy", clean=clean)
    await spy.subscribe("#", "+/+", "+/#", qos=1)
    durable = await connect(f"{name}-durable", clean=False)
    await durable.subscribe(f"{name}/#", qos=2)
    publisher = await connect(f"{name}-publisher")
    replies = await incoming(stored, f"{name}.service")

    async def answer() -> None:
        await (await following(replies)).respond(b"answer")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer())
        assert (await stored.nats.request(f"{name}.service", b"question", timeout=30)).data == b"answer"
    # Of different publishers: a client of the same gateway may else overtake what still is on its way from NATS.
    await durable.message(f"{name}/service", b"question")
    await spy.receive(f"{name}/service", b"question")
    for qos in (0, 1, 2):
        await publisher.deliver(f"{name}/a", b"%d" % qos, qos, retain=qos == 1)
    for qos in (0, 1, 2):
        await durable.receive(f"{name}/a", b"%d" % qos)
    pull = await stored.js.pull_subscribe(f"$MQTT.msgs.{name}.>", stream="$MQTT_msgs")
    for message in await pull.fetch(2, timeout=30):
        await message.ack_sync()
    await pull.unsubscribe()
    await publisher.deliver(f"{name}/a", b"", 1, retain=True)
    for payload in (b"0", b"1", b"2", b""):
        await spy.receive(f"{name}/a", payload)
    await spy.quiet()


async def test_push_consumer_on_a_topic(connect: Connector, name: str, stored: Stored) -> None:
    """A push consumer whose deliver subject is an MQTT topic does not show its deliveries to MQTT clients."""
    client = await connect(name)
    await client.subscribe(f"{name}/#", qos=1)
    config = ConsumerConfig(
        durable_name=f"{name}-push",
        deliver_subject=f"{name}.deliveries",
        filter_subject=f"$MQTT.msgs.{name}-other",
        ack_policy=AckPolicy.EXPLICIT,
    )
    await stored.js.add_consumer("$MQTT_msgs", config)
    seen = await incoming(stored, f"{name}.deliveries")
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(f"{name}-other", b"x", 1)
    assert (await following(seen)).data == b"x"
    await publisher.deliver(f"{name}/last", b"y", 1)
    await client.receive(f"{name}/last", b"y")
    await stored.js.delete_consumer("$MQTT_msgs", f"{name}-push")


async def test_level_above_a_multi_level_wildcard(connect: Connector, name: str, stored: Stored) -> None:
    """``a/#`` is two subjects in NATS, ``a`` and ``a.>``: NATS messages on either come once."""
    for clean in (True, False):
        client = await connect(f"{name}-{clean}", clean=clean)
        await client.subscribe(f"{name}/#", f"{name}/b/#", qos=1)
        for subject in (name, f"{name}.b", f"{name}.b.c"):
            await stored.nats.publish(subject, b"x", headers={"Nmqtt-Pub": "1"})
            await stored.js.publish(f"$MQTT.msgs.{subject}", b"x", headers={"Nmqtt-Pub": "1"})
            await client.receive(subject.replace(".", "/"), b"x", qos=1)
        await client.quiet()
