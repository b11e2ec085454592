# SPDX-License-Identifier: Apache-2.0
"""Reports of others about brokers, reproduced here; each test names the report (project and number)."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest

from mqtt_nats.codec import (
    Connack,
    Disconnect,
    Publish,
    Suback,
    Subscribe,
    Subscription,
    Will,
)
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector, Connector5


def connect_bytes(properties: bytes = b"\0", payload: bytes = b"", flags: int = 0x02) -> bytes:
    """A CONNECT packet of MQTT 5.0; the payload begins behind the client id."""
    body = b"\0\4MQTT\5" + bytes([flags]) + b"\0\0" + properties + b"\0\4made" + payload
    return bytes([0x10, len(body)]) + body


def publish_bytes(topic: bytes, properties: bytes) -> bytes:
    """A PUBLISH packet of MQTT 5.0 at QoS 0."""
    body = len(topic).to_bytes(2, "big") + topic + bytes([len(properties)]) + properties + b"x"
    return bytes([0x30, len(body)]) + body


@pytest.mark.parametrize(
    ("report", "packet", "reason"),
    [
        ("mosquitto 3606", b"\xe1\0", 0x81),
        ("mosquitto 3589: PINGREQ", b"\xc1\0", 0x81),
        ("mosquitto 3589: SUBSCRIBE", b"\x80\x07\0\1\0\0\1a\0", 0x81),
        ("mosquitto 3589: UNSUBSCRIBE", b"\xa0\x06\0\1\0\0\1a", 0x81),
        ("mosquitto 3589: PUBREL", b"\x60\2\0\1", 0x81),
        ("mosquitto 3631", publish_bytes(b"", b""), 0x82),
        ("nanomq 2336: alias 0", publish_bytes(b"a", b"\x23\0\0"), 0x94),
        ("nanomq 1782: alias above the maximum", publish_bytes(b"a", b"\x23\xff\x6f"), 0x94),
        ("emqx 8029: Subscription Identifier in PUBLISH", publish_bytes(b"a", b"\x0b\1"), 0x82),
        ("emqx 8029: Content Type twice", publish_bytes(b"a", b"\3\0\1a\3\0\1b"), 0x82),
        ("emqx 8029: No Local of a shared subscription", b"\x82\x10\0\1\0\0\x0a$share/g/a\4", 0x82),
        ("aedes 1088: Subscription Identifier 0", b"\x82\x09\0\1\2\x0b\0\0\1a\0", 0x82),
        ("nanomq 2336: options of a subscription", b"\x82\x07\0\1\0\0\1a\xc0", 0x81),
    ],
)
async def test_what_breaks_the_protocol(
    connect5: Connector5, name: str, report: str, packet: bytes, reason: int
) -> None:
    """[MQTT-4.13.1-1] (5.0): DISCONNECT says why."""
    client = await connect5(name)
    client.write(packet)
    await client.expect_disconnect(reason)


@pytest.mark.parametrize(
    ("report", "packet", "reason"),
    [
        ("mosquitto 3707", connect_bytes(payload=b"\0\0\1w\0\1x", flags=0x1E), 0x81),
        ("aedes 1088: Receive Maximum 0", connect_bytes(b"\3\x21\0\0"), 0x82),
        ("emqx 13045: Request Response Information twice", connect_bytes(b"\4\x19\1\x19\1"), 0x82),
        ("emqx 13045: no user name behind its flag", connect_bytes(flags=0x82), 0x81),
        ("emqx 13045: a user name that is not UTF-8", connect_bytes(payload=b"\0\1\xff", flags=0x82), 0x81),
        ("emqx 13045: half a user property", connect_bytes(b"\4\x26\0\1a"), 0x81),
    ],
)
async def test_a_connect_that_breaks_the_protocol(gateway: Gateway, report: str, packet: bytes, reason: int) -> None:
    """[MQTT-3.1.4-1] (5.0): CONNACK says why."""
    async with await RawClient5.open(gateway.port) as client:
        client.write(packet)
        assert (await client.expect(Connack)).code == reason
        await client.expect_closed()


@pytest.mark.parametrize("share", ["a+", "#", ""])
async def test_names_of_groups(connect5: Connector5, name: str, share: str) -> None:
    """mosquitto 3319: [MQTT-4.8.2-1] [MQTT-4.8.2-2] (5.0)."""
    client = await connect5(name)
    client.send(Subscribe(1, (Subscription(f"$share/{share}/{name}", 0),)))
    packet = await client.packet()
    if isinstance(packet, Disconnect):
        assert packet.reason in (0x81, 0x82, 0x8F)
    else:
        assert isinstance(packet, Suback)
        assert packet.codes == (0x8F,)


@pytest.mark.parametrize("reason", [0xFF, 0x01, 0x87])
async def test_a_disconnect_with_another_reason_keeps_the_will(connect5: Connector5, name: str, reason: int) -> None:
    """mosquitto 3743: [MQTT-3.14.2-1] (5.0): only 0x00 drops it."""
    watcher = await connect5(f"{name}-watcher")
    await watcher.subscribe(f"{name}/will")
    client = await connect5(name, will=Will(f"{name}/will", b"gone", 0, False))
    client.write(b"\xe0\1" + bytes([reason]))
    await watcher.receive(f"{name}/will", b"gone")


@pytest.mark.parametrize("version", [4, 5])
async def test_the_will_of_who_is_taken_over(connect: Connector, connect5: Connector5, name: str, version: int) -> None:
    """emqx 10551, 18565: [MQTT-3.1.2-8] (3.1.1, 5.0), also where the session ends with its connection."""
    watcher = await connect(f"{name}-watcher")
    await watcher.subscribe(f"{name}/will", qos=1)
    will = Will(f"{name}/will", b"gone", 1, False)
    if version == 5:
        await connect5(name, clean=False, will=will)
        await connect5(name, clean=False)
    else:
        await connect(name, clean=False, will=will)
        await connect(name, clean=False)
    await watcher.receive(f"{name}/will", b"gone", qos=1)


async def test_a_session_that_ends_with_its_connection_is_not_taken_over(connect5: Connector5, name: str) -> None:
    """emqx 18583: [MQTT-3.1.2-23] (5.0)."""
    first = await connect5(name, clean=False, session_expiry_interval=0)
    await first.subscribe(name, qos=1)
    second = await connect5(name, clean=False, session_expiry_interval=0)
    assert not second.session_present
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver(name, b"x", 1)
    await second.quiet()


async def test_a_clean_start_has_no_messages_of_before(connect5: Connector5, name: str) -> None:
    """aedes 1088: [MQTT-3.1.2-4] (5.0), also where the new session is kept."""
    client = await connect5(name, session_expiry_interval=60)
    await client.subscribe(name, qos=1)
    await client.disconnect5()
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver(name, b"before", 1)
    client = await connect5(name, session_expiry_interval=60)
    assert not client.session_present
    await client.subscribe(name, qos=1)
    await publisher.deliver(name, b"after", 1)
    await client.receive(name, b"after", qos=1)


async def test_retain_as_published_of_what_waited(connect5: Connector5, name: str) -> None:
    """vernemq 2551: [MQTT-3.3.1-13] (5.0), for a message that was published while the client was away."""
    client = await connect5(name, session_expiry_interval=60)
    assert await client.subscribe5(Subscription(name, 1, retain_as_published=True)) == (1,)
    await client.disconnect5()
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver(name, b"kept", 1, retain=True)
    client = await connect5(name, clean=False, session_expiry_interval=60)
    await client.receive(name, b"kept", qos=1, retain=True)


async def test_the_identifier_of_a_subscription_with_a_retained_message(connect5: Connector5, name: str) -> None:
    """vernemq 1287: [MQTT-3.3.4-3] (5.0)."""
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver(name, b"kept", 1, retain=True)
    client = await connect5(name)
    client.send(Subscribe(1, (Subscription(name, 1),), {"subscription_identifier": [7]}))
    await client.expect(Suback)
    message = await client.receive(name, b"kept", qos=1, retain=True)
    assert (message.properties or {}).get("subscription_identifier") == [7]


@pytest.mark.long
async def test_the_expiry_of_a_retained_message_counts_down(connect5: Connector5, name: str) -> None:
    """rmqtt 513: [MQTT-3.3.2-6] (5.0); then the message is gone."""
    publisher = await connect5(f"{name}-publisher")
    client = await connect5(name)
    begun = former = time.monotonic()
    publisher.publish5(name, b"kept", 1, retain=True, packet_id=1, message_expiry_interval=3)
    await publisher.expect_ack(PUBACK, 1)
    stored = time.monotonic()
    seen: list[int] = []
    gap = 0.0  # seconds between two looks, at most
    for number in itertools.count(1):
        asked = time.monotonic()
        client.send(Subscribe(number, (Subscription(name, 0),)))
        await client.expect(Suback)
        client.write(b"\xc0\0")
        packet = await client.packet()
        now = time.monotonic()
        gap, former = max(gap, now - former), asked
        if not isinstance(packet, Publish):
            assert now - begun > 2
            break
        left = (packet.properties or {})["message_expiry_interval"]
        assert 2 - int(now - begun) <= left <= 4 - int(asked - stored), "what is left, give or take one second"
        seen.append(left)
        await client.packet()
    assert seen == sorted(seen, reverse=True)
    assert set(seen) <= {1, 2, 3}
    assert gap > 0.8 or {1, 2} <= set(seen)


@pytest.mark.long
async def test_an_exchange_that_has_begun_outlives_the_expiry(connect5: Connector5, name: str) -> None:
    """rmqtt 513: [MQTT-4.4.0-1] (5.0): PUBREL is owed, whatever has become of the message."""
    client = await connect5(name, session_expiry_interval=60)
    await client.subscribe(name, qos=2)
    publisher = await connect5(f"{name}-publisher")
    publisher.publish5(name, b"x", 1, packet_id=1, message_expiry_interval=3)
    await publisher.expect_ack(PUBACK, 1)
    publisher.publish5(name, b"y", 2, packet_id=2, message_expiry_interval=3)
    await publisher.expect_ack(PUBREC, 2)
    publisher.ack(PUBREL, 2)
    await publisher.expect_ack(PUBCOMP, 2)
    (first,) = await client.messages(1)
    client.ack(PUBACK, first.packet_id)
    (second,) = await client.messages(1)
    client.ack(PUBREC, second.packet_id)
    await client.expect_ack(PUBREL, second.packet_id)
    client.drop()
    await asyncio.sleep(3.2)  # longer than the expiry
    client = await connect5(name, clean=False, session_expiry_interval=60)
    await client.expect_ack(PUBREL, second.packet_id)
    client.ack(PUBCOMP, second.packet_id)
    await client.quiet()


async def test_a_message_that_is_too_large_does_not_stop_the_queue(connect5: Connector5, name: str) -> None:
    """rmqtt 513: [MQTT-3.1.2-25] (5.0): it is left out."""
    client = await connect5(name, session_expiry_interval=60)
    await client.subscribe(name, qos=1)
    await client.disconnect5()
    publisher = await connect5(f"{name}-publisher")
    for payload in (b"first", bytes(5000), b"last"):
        await publisher.deliver(name, payload, 1)
    client = await connect5(name, clean=False, session_expiry_interval=60, maximum_packet_size=1000)
    await client.receive(name, b"first", qos=1)
    await client.receive(name, b"last", qos=1)


async def test_aliases_of_a_publisher_are_its_own(connect5: Connector5, name: str) -> None:
    """nanomq 2040: [MQTT-3.3.2-7] (5.0)."""
    client = await connect5(name)
    await client.subscribe(name)
    publisher = await connect5(f"{name}-publisher")
    publisher.publish5(name, b"1", topic_alias=3)
    publisher.publish5("", b"2", topic_alias=3)
    for payload in (b"1", b"2"):
        message = await client.receive(name, payload)
        assert "topic_alias" not in (message.properties or {})


@pytest.mark.parametrize("wanted", [True, False])
async def test_reasons_as_text_only_where_they_are_wanted(connect5: Connector5, name: str, wanted: bool) -> None:
    """mosquitto 3604: [MQTT-3.1.2-29] (5.0)."""
    client = await connect5(name, request_problem_information=int(wanted))
    client.publish5("$JS/API/STREAM/NAMES", b"", 1, packet_id=1)
    packet: Any = await client.packet()
    assert packet.reason >= 0x80
    assert ("reason_string" in (packet.properties or {})) is wanted


async def test_all_retained_messages_of_several_wildcards(connect: Connector, name: str) -> None:
    """mosquitto 3096, nats-server 4919."""
    publisher = await connect(f"{name}-publisher")
    for group in range(4):
        for number in range(250):
            publisher.publish(f"{name}/{group}/{number}", b"%d" % number, 0, retain=True)
    await publisher.deliver(f"{name}/last", b"x", 1, retain=True)
    client = await connect(name)
    client.send(Subscribe(1, tuple(Subscription(f"{name}/{group}/#", 1) for group in range(4))))
    await client.expect(Suback)
    found = [topic_of(one) for one in await client.messages(1000)]
    assert sorted(found) == sorted(f"{name}/{group}/{number}" for group in range(4) for number in range(250))
    everything = await connect(f"{name}-all")
    everything.send(Subscribe(1, (Subscription("#", 0),)))
    await everything.expect(Suback)
    missing = {f"{name}/{group}/{number}" for group in range(4) for number in range(250)} | {f"{name}/last"}
    while missing:  # other tests have left theirs
        missing -= {topic_of(one) for one in await everything.messages(1)}


async def test_a_group_gets_no_retained_messages(connect5: Connector5, name: str) -> None:
    """emqx 1784, vernemq 337: section 4.8.2 (5.0)."""
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver(name, b"kept", 1, retain=True)
    client = await connect5(name)
    await client.subscribe(f"$share/g/{name}", qos=1)
    await client.quiet()


@pytest.mark.parametrize("clean", [True, False])
async def test_a_repeated_subscription_gets_retained_messages_again(connect: Connector, name: str, clean: bool) -> None:
    """emqx 1314: [MQTT-3.8.4-3] (3.1.1)."""
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"kept", 1, retain=True)
    client = await connect(name, clean=clean)
    for _ in range(2):
        await client.subscribe(name, qos=1)
        await client.receive(name, b"kept", qos=1, retain=True)


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("granted", [0, 1, 2])
async def test_the_qos_of_a_retained_message(connect: Connector, name: str, qos: int, granted: int) -> None:
    """wolfMQTT 520, moquette 653, MQTTnet 1434: [MQTT-3.3.1-5] (3.1.1), and the exchange is completed."""
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"kept", qos, retain=True)
    client = await connect(name)
    await client.subscribe(name, qos=granted)
    await client.complete(await client.message(name, b"kept", qos=min(qos, granted), retain=True))
    await client.quiet()


async def test_a_publisher_that_comes_back_repeats_no_retained_message(connect: Connector, name: str) -> None:
    """mosquitto 1322: its QoS 2 message was complete; a newer one of another client stays."""
    first = await connect(name, clean=False)
    await first.deliver(f"{name}/t", b"foo", 2, retain=True)
    first.drop()
    other = await connect(f"{name}-other")
    await other.deliver(f"{name}/t", b"bar", 2, retain=True)
    watcher = await connect(f"{name}-watcher")
    await watcher.subscribe(f"{name}/t", qos=2)
    await watcher.receive(f"{name}/t", b"bar", qos=2, retain=True)
    first = await connect(name, clean=False)
    await first.quiet()
    await watcher.quiet()
    late = await connect(f"{name}-late")
    await late.subscribe(f"{name}/t", qos=2)
    await late.receive(f"{name}/t", b"bar", qos=2, retain=True)


async def test_an_assigned_client_id_is_good_for_the_session(connect5: Connector5, name: str) -> None:
    """mochi-mqtt 416: [MQTT-3.2.2-16] (5.0)."""
    client = await connect5("", session_expiry_interval=60)
    assigned = (client.connack.properties or {})["assigned_client_identifier"]
    await client.subscribe(name, qos=1)
    await client.disconnect5()
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver(name, b"x", 1)
    client = await connect5(assigned, clean=False, session_expiry_interval=0)
    assert client.session_present
    await client.receive(name, b"x", qos=1)


async def test_a_pubrec_that_comes_again_is_answered_again(connect: Connector, name: str) -> None:
    """mosquitto 9, emqx 1216: the connection goes on, and PUBREL comes until PUBCOMP, also to the next connection."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=2)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"x", 2)
    (message,) = await client.messages(1)
    for _ in range(3):
        client.ack(PUBREC, message.packet_id)
        await client.expect_ack(PUBREL, message.packet_id)
    client.drop()
    client = await connect(name, clean=False)
    await client.expect_ack(PUBREL, message.packet_id)
    client.ack(PUBCOMP, message.packet_id)
    await client.quiet()


async def test_the_first_connection_hears_that_it_is_taken_over(connect5: Connector5, name: str) -> None:
    """nanomq 2336, mosquitto 1378: [MQTT-3.1.4-3] (5.0)."""
    first = await connect5(name)
    await connect5(name)
    await first.expect_disconnect(0x8E)


async def test_a_subscribe_without_filters(connect: Connector, name: str) -> None:
    """ActiveMQ 5883: [MQTT-3.8.3-3] [MQTT-3.10.3-2] (3.1.1)."""
    for packet in (b"\x82\2\0\1", b"\xa2\2\0\1"):
        client = await connect(f"{name}-{packet[0]}")
        client.write(packet)
        await client.expect_closed()


async def test_one_message_for_two_subscriptions_and_one_retained_for_each(connect: Connector, name: str) -> None:
    """MQTT.js 545: [MQTT-3.3.5-1] (3.1.1); retained messages are sent for each subscription."""
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(f"{name}/A", b"kept", 1, retain=True)
    client = await connect(name)
    for text in (f"{name}/+", f"{name}/A"):
        await client.subscribe(text, qos=1)
        await client.receive(f"{name}/A", b"kept", qos=1, retain=True)
    await publisher.deliver(f"{name}/A", b"new", 1)
    await client.receive(f"{name}/A", b"new", qos=1, retain=False)
    await client.quiet()
