# SPDX-License-Identifier: Apache-2.0
"""Shared subscriptions: one member gets a message, wherever it is connected, and what it leaves goes to the others."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from mqtt_nats.codec import Publish, Subscription
from mqtt_streams.shared import group_hash, members_subject
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.integration.conftest import Connector, Connector5, Stored, until


async def consume(client: RawClient, into: list[Publish]) -> None:
    """Receive and complete messages until cancelled."""
    while True:
        packet = await client.packet(60)
        if isinstance(packet, Publish):
            into.append(packet)
            if packet.qos == 1:
                client.ack(PUBACK, packet.packet_id)
            elif packet.qos == 2:
                client.ack(PUBREC, packet.packet_id)
        else:
            client.ack(PUBCOMP, packet.packet_id)  # type: ignore[union-attr]


async def all_of(clients: Sequence[RawClient], count: int) -> list[list[Publish]]:
    """What each member gets, until all together have ``count`` messages."""
    found: list[list[Publish]] = [[] for _ in clients]
    tasks = [asyncio.create_task(consume(*pair)) for pair in zip(clients, found, strict=True)]

    async def complete() -> None:
        assert sum(map(len, found)) >= count

    try:
        await until(complete)
        await asyncio.sleep(0.2)  # for what should not come
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


ROUNDS = 20
"""A gateway that is late may leave a whole round to the other one."""


def distinct(found: list[list[Publish]]) -> Counter[bytes]:
    """How often each payload was received by anybody."""
    return Counter(publish.payload for each in found for publish in each)


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("published", [0, 1, 2])
async def test_one_member_gets_each_message(
    connect5: Connector5, connect: Connector, name: str, second_gateway: Gateway, qos: int, published: int
) -> None:
    """[MQTT-4.8.2-3] (5.0): regular and durable members, of both versions, on two gateways."""
    text = f"$share/group/{name}/#"
    members: list[RawClient] = [
        await connect5(f"{name}-1"),
        await connect5(f"{name}-2", to=second_gateway),
        await connect5(f"{name}-3", session_expiry_interval=60),
        await connect5(f"{name}-4", session_expiry_interval=60, to=second_gateway),
        await connect(f"{name}-5"),
    ]
    for member in members:
        await member.subscribe(text, qos=qos)
    outsider = await connect5(f"{name}-outsider")
    await outsider.subscribe(f"{name}/#", qos=0)
    publisher = await connect5(f"{name}-publisher")
    count = 60
    shares = [0] * len(members)
    for begun in range(0, ROUNDS * count, count):
        payloads = [b"%d" % number for number in range(begun, begun + count)]
        await publisher.deliver_all(f"{name}/a", payloads, published)
        found = await all_of(members, count)
        assert distinct(found) == Counter(payloads)
        assert {publish.qos for each in found for publish in each} == {min(qos, published)}
        assert [publish.payload for publish in await outsider.messages(count)] == payloads
        shares = [share + len(each) for share, each in zip(shares, found, strict=True)]
        if not published or min(shares) >= 1:
            return
    raise AssertionError(f"not everybody takes part: {shares}")


async def test_groups_are_apart(connect5: Connector5, name: str) -> None:
    one, other, third = [await connect5(f"{name}-{number}") for number in range(3)]
    await one.subscribe(f"$share/one/{name}/a", qos=1)
    await other.subscribe(f"$share/other/{name}/a", qos=1)
    await third.subscribe(f"$share/one/{name}/+", qos=1)  # another filter makes it another subscription
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver(f"{name}/a", b"x", 1)
    for client in (one, other, third):
        await client.receive(f"{name}/a", b"x")


async def test_options(connect5: Connector5, name: str) -> None:
    """Identifier and Retain As Published hold; retained messages do not come (section 4.8.2)."""
    publisher = await connect5(f"{name}-publisher")
    publisher.publish5(f"{name}/a", b"old", 1, retain=True)
    await publisher.packet()
    for number, expiry in enumerate((0, 60)):
        client = await connect5(f"{name}-{number}", session_expiry_interval=expiry)
        wanted = Subscription(f"$share/g{number}/{name}/#", 1, retain_as_published=True)
        assert await client.subscribe5(wanted, subscription_identifier=[7]) == (1,)
        await client.quiet()
        publisher.publish5(f"{name}/a", b"new", 1, retain=True, content_type="x")
        await publisher.packet()
        got = await client.receive(f"{name}/a", b"new", retain=True)
        assert got.properties == {"content_type": "x", "subscription_identifier": [7]}
        publisher.publish5(f"{name}/a", b"zero")
        got = await client.receive(f"{name}/a", b"zero", retain=False)
        assert got.properties == {"subscription_identifier": [7]}


@pytest.mark.parametrize("expiry", [0, 60], ids=["regular", "durable"])
@pytest.mark.parametrize("end", ["drop", "disconnect", "unsubscribe"])
async def test_what_a_member_leaves_goes_to_the_others(
    connect5: Connector5, name: str, second_gateway: Gateway, expiry: int, end: str
) -> None:
    """At QoS 1, at once (section 4.8.2)."""
    text = f"$share/group/{name}"
    leaver = await connect5(f"{name}-leaver", session_expiry_interval=expiry, receive_maximum=10)
    await leaver.subscribe(text, qos=1)
    publisher = await connect5(f"{name}-publisher")
    payloads = [b"%d" % number for number in range(20)]
    await publisher.deliver_all(name, payloads, 1)
    sent = await leaver.messages(10)
    other = await connect5(f"{name}-other", to=second_gateway)
    await other.subscribe(text, qos=1)
    if end == "drop":
        leaver.drop()
    elif end == "disconnect":
        await leaver.disconnect5()
    else:
        await leaver.unsubscribe(text)
        leaver.ack(PUBACK, *(publish.packet_id for publish in sent))
    expected = 10 if end == "unsubscribe" else 20
    found = await all_of([other], expected)
    got = distinct(found)
    assert got == Counter(payloads[10:] if end == "unsubscribe" else payloads)
    assert not any(publish.dup for each in found for publish in each), "new to this client"


async def test_a_full_member_does_not_hold_up_the_others(
    connect5: Connector5, name: str, second_gateway: Gateway
) -> None:
    text = f"$share/group/{name}"
    full = await connect5(f"{name}-full", receive_maximum=1)
    await full.subscribe(text, qos=1)
    other = await connect5(f"{name}-other", to=second_gateway, receive_maximum=5)
    await other.subscribe(text, qos=1)
    publisher = await connect5(f"{name}-publisher")
    payloads = [b"%d" % number for number in range(100)]
    await publisher.deliver_all(name, payloads, 1)
    found = await all_of([other], 99)
    kept = await full.messages(1)
    assert distinct([*found, kept]) == Counter(payloads)


async def test_qos_2_that_was_sent_belongs_to_its_client(
    connect5: Connector5, name: str, second_gateway: Gateway, stored: Stored
) -> None:
    """[MQTT-4.8.2-4] (5.0): it comes again, with the same identifier, on whatever gateway the session goes on."""
    text = f"$share/group/{name}"
    owner = await connect5(f"{name}-owner", session_expiry_interval=60, receive_maximum=4)
    await owner.subscribe(text, qos=2)
    publisher = await connect5(f"{name}-publisher")
    payloads = [b"%d" % number for number in range(6)]
    await publisher.deliver_all(name, payloads, 2)
    sent = await owner.messages(4)
    owner.ack(PUBREC, sent[0].packet_id)
    await owner.expect_ack(PUBREL, sent[0].packet_id)
    other = await connect5(f"{name}-other", to=second_gateway)
    await other.subscribe(text, qos=2)
    owner.drop()
    assert distinct(await all_of([other], 2)) == Counter(payloads[4:])
    again = await connect5(f"{name}-owner", clean=False, session_expiry_interval=60, to=second_gateway)
    assert again.session_present
    await again.expect_ack(PUBREL, sent[0].packet_id)
    again.ack(PUBCOMP, sent[0].packet_id)
    for publish in sent[1:]:
        await again.message(name, publish.payload, qos=2, dup=True, packet_id=publish.packet_id)
        again.ack(PUBREC, publish.packet_id)
    for publish in sent[1:]:
        await again.released(publish.packet_id)
    await again.quiet()

    async def gone() -> None:
        assert await stored.count("$MQTT_shared", "$MQTT.shared.assigned.>") == 0

    await until(gone)


@pytest.mark.parametrize("qos", [1, 2])
async def test_the_other_copy_of_a_message_whose_pubrel_is_owed(
    connect5: Connector5, name: str, second_gateway: Gateway, qos: int
) -> None:
    """[MQTT-4.8.2-4] [MQTT-4.5.0-1] (5.0): of a shared subscription a client has it, of another one it gets it yet."""
    client = await connect5(name, session_expiry_interval=60)
    await client.subscribe5(Subscription(f"$share/group/{name}", 2), subscription_identifier=[1])
    await client.subscribe5(Subscription(name, qos), subscription_identifier=[2])
    publisher = await connect5(f"{name}-publisher")
    payloads = [b"0", b"1", b"2"]
    await publisher.deliver_all(name, payloads, 2)
    found = await client.messages(2 * len(payloads))
    shared = [one for one in found if (one.properties or {})["subscription_identifier"] == [1]]
    assert [one.payload for one in shared] == payloads
    for one in shared:
        client.ack(PUBREC, one.packet_id)
    for one in shared:
        await client.expect_ack(PUBREL, one.packet_id)
    client.drop()
    client = await connect5(name, clean=False, session_expiry_interval=60, to=second_gateway)
    for one in shared:
        await client.expect_ack(PUBREL, one.packet_id)
    again = await client.messages(len(payloads))
    assert [(one.payload, one.qos, one.dup) for one in again] == [(payload, qos, True) for payload in payloads]
    await client.quiet()


async def test_qos_2_to_a_regular_session_that_ends(connect5: Connector5, name: str) -> None:
    """[MQTT-4.8.2-5] (5.0): nobody else gets what was sent."""
    text = f"$share/group/{name}"
    owner = await connect5(f"{name}-owner", receive_maximum=2)
    await owner.subscribe(text, qos=2)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver_all(name, [b"0", b"1", b"2"], 2)
    await owner.messages(2)
    other = await connect5(f"{name}-other")
    await other.subscribe(text, qos=2)
    owner.drop()
    assert distinct(await all_of([other], 1)) == Counter([b"2"])


async def test_messages_wait_for_durable_members(connect5: Connector5, name: str, second_gateway: Gateway) -> None:
    text = f"$share/group/{name}"
    for number in range(2):
        member = await connect5(f"{name}-{number}", session_expiry_interval=60)
        await member.subscribe(text, qos=1)
        await member.disconnect5()
    publisher = await connect5(f"{name}-publisher")
    payloads = [b"%d" % number for number in range(10)]
    await publisher.deliver_all(name, payloads, 1)
    member = await connect5(f"{name}-1", clean=False, session_expiry_interval=60, to=second_gateway)
    assert distinct(await all_of([member], 10)) == Counter(payloads)


async def test_the_group_ends_with_its_last_member(connect5: Connector5, name: str, stored: Stored) -> None:
    """Its consumer goes, and who subscribes later gets what is published later."""
    text = f"$share/{name}/{name}"

    async def consumers() -> int:
        infos = await stored.js.consumers_info("$MQTT_msgs")
        return sum((info.config.metadata or {}).get("mqtt_subscription") == text for info in infos)

    first = await connect5(f"{name}-1")
    await first.subscribe(text, qos=1)
    second = await connect5(f"{name}-2", session_expiry_interval=60)
    await second.subscribe(text, qos=1)
    assert await consumers() == 1
    first.drop()
    await second.unsubscribe(text)

    async def gone() -> None:
        assert await consumers() == 0
        assert await stored.count("$MQTT_shared", members_subject(group_hash(name, name))) == 0

    await until(gone)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver(name, b"nobody", 1)
    third = await connect5(f"{name}-3")
    await third.subscribe(text, qos=1)
    await publisher.deliver(name, b"somebody", 1)
    await third.receive(name, b"somebody")


async def test_consumer_that_somebody_deletes(connect5: Connector5, name: str, stored: Stored) -> None:
    text = f"$share/{name}/{name}"
    member = await connect5(f"{name}-1")
    await member.subscribe(text, qos=1)
    for info in await stored.js.consumers_info("$MQTT_msgs"):
        if (info.config.metadata or {}).get("mqtt_subscription") == text:
            await stored.js.delete_consumer("$MQTT_msgs", info.name)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver(name, b"x", 1)
    await member.receive(name, b"x")
