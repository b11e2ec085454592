# SPDX-License-Identifier: Apache-2.0
"""Messages and subscriptions with each library: properties, options, aliases, limits, shared subscriptions."""

import time
from collections.abc import Sequence
from functools import partial

import pytest

from tests.harness.gateway import Gateway
from tests.harness.waiting import aeventually
from tests.integration.conftest import Connector, Stored
from tests.integration.libraries.conftest import EVERYTHING, USER, Maker
from tests.integration.libraries5 import Paho
from tests.integration.library5 import Library


@pytest.mark.parametrize("durable", [False, True], ids=["regular", "durable"])
async def test_exchange_with_all_properties(make: Maker, name: str, durable: bool) -> None:
    """[MQTT-3.3.2-4], [MQTT-3.3.2-15], [MQTT-3.3.2-16], [MQTT-3.3.2-18], [MQTT-3.3.2-20] (5.0)."""
    publisher = await make(f"{name}-publisher")
    subscriber = await make(name, session_expiry_interval=60 if durable else 0)
    assert await subscriber.subscribe(f"{name}/#", 2) == 2
    for index in range(60):
        properties = {**EVERYTHING, "user_property": [*USER, ("index", str(index))]}
        await publisher.publish(f"{name}/{index % 3}", b"%d" % index, index % 3, **properties)
    got = await subscriber.receive(60)
    for qos in (0, 1, 2):
        expected = list(range(qos, 60, 3))
        assert [int(one.payload) for one in got if one.topic == f"{name}/{qos}"] == expected
    for one in got:
        assert one.qos == int(one.topic[-1])
        assert one.properties == {**EVERYTHING, "user_property": [*USER, ("index", one.payload.decode())]}


async def test_message_without_properties(make: Maker, name: str) -> None:
    client = await make(name)
    await client.subscribe(name, 1)
    for qos in (0, 1, 2):
        await client.publish(name, b"x", qos)
    assert [one.properties for one in await client.receive(3)] == [{}, {}, {}]


async def test_subscription_identifiers(make: Maker, name: str) -> None:
    """[MQTT-3.3.4-3], [MQTT-3.3.4-4] (5.0): one copy with the identifiers of all subscriptions that match."""
    client = await make(name)
    await client.subscribe(f"{name}/#", 1, identifier=1)
    await client.subscribe(f"{name}/+", 2, identifier=268_435_455)
    await client.subscribe(f"{name}/plain", 0)
    for topic in ("a", "a/b", "plain"):
        await client.publish(f"{name}/{topic}", topic.encode(), 2)
    got = {one.payload: one for one in await client.receive(3)}
    assert sorted(got[b"a"].properties["subscription_identifier"]) == [1, 268_435_455]
    assert got[b"a/b"].properties == {"subscription_identifier": [1]}
    assert sorted(got[b"plain"].properties["subscription_identifier"]) == [1, 268_435_455]
    assert [got[topic].qos for topic in (b"a", b"a/b", b"plain")] == [2, 1, 2]


async def test_no_local(make: Maker, name: str) -> None:
    """[MQTT-3.8.3-3] (5.0)."""
    first, second = await make(name), await make(f"{name}-other")
    await first.subscribe(name, 1, no_local=True)
    await second.subscribe(name, 1, no_local=False)
    for qos in (0, 1, 2):
        await first.publish(name, b"first", qos)
    await second.publish(name, b"second", 1)
    assert await first.payloads(1) == [b"second"]
    assert await second.payloads(4) == [b"first"] * 3 + [b"second"]


async def test_retain_as_published(make: Maker, name: str) -> None:
    """[MQTT-3.3.1-12], [MQTT-3.3.1-13] (5.0)."""
    publisher, plain, as_published = await make(f"{name}-p"), await make(f"{name}-a"), await make(f"{name}-b")
    await plain.subscribe(name, 1)
    await as_published.subscribe(name, 1, as_published=True)
    await publisher.publish(name, b"kept", 1, retain=True, **EVERYTHING)
    await publisher.publish(name, b"not", 1)
    assert [one.retain for one in await plain.receive(2)] == [False, False]
    assert [one.retain for one in await as_published.receive(2)] == [True, False]
    await publisher.publish(name, b"", 1, retain=True)


async def test_retain_handling(make: Maker, name: str) -> None:
    """[MQTT-3.3.1-9], [MQTT-3.3.1-10], [MQTT-3.3.1-11] (5.0): always, for a new subscription, never."""
    client = await make(name)
    await client.publish(f"{name}/kept", b"kept", 1, retain=True, **EVERYTHING)
    for handling, expected in ((0, 2), (1, 1), (2, 0)):
        subscriber = await make(f"{name}-{handling}")
        for _ in range(2):
            await subscriber.subscribe(f"{name}/+", 1, handling=handling, identifier=9)
        await client.publish(f"{name}/end", b"end", 1)
        got = await subscriber.receive(expected + 1)
        assert [one.payload for one in got] == [b"kept"] * expected + [b"end"]
        for one in got[:-1]:
            assert one.retain
            assert one.properties == {**EVERYTHING, "subscription_identifier": [9]}
    await client.publish(f"{name}/kept", b"", 1, retain=True)


async def test_topic_aliases_of_a_publisher(make: Maker, name: str) -> None:
    """[MQTT-3.3.2-12] (5.0): a topic that is only a number, until the number gets another one."""
    publisher, subscriber = await make(f"{name}-publisher"), await make(name)
    await subscriber.subscribe(f"{name}/#", 2)
    for topic in ("a", "", "b", ""):
        for qos in (0, 1, 2):
            await publisher.publish(f"{name}/{topic}" if topic else "", b"%d" % qos, qos, topic_alias=32)
    got = [(one.topic, int(one.payload)) for one in await subscriber.receive(12)]
    assert sorted(got) == sorted([(f"{name}/{topic}", qos) for topic in "aabb" for qos in (0, 1, 2)])
    assert all("topic_alias" not in one.properties for one in subscriber.got)


async def test_an_alias_that_is_too_large(make: Maker, name: str) -> None:
    """[MQTT-3.3.2-9] (5.0)."""
    client = await make(name)
    await client.publish(name, b"x", 0, topic_alias=33)
    await aeventually(lambda: client.farewells == [0x94])


async def test_topic_aliases_of_the_gateway(make_gmqtt: Maker, name: str) -> None:
    """[MQTT-3.1.2-26], [MQTT-3.1.2-27] (5.0): within what the client allows, and it finds the topics behind them."""
    publisher, subscriber = await make_gmqtt(f"{name}-publisher"), await make_gmqtt(name, topic_alias_maximum=2)
    await subscriber.subscribe(f"{name}/#", 1)
    for index in range(30):
        await publisher.publish(f"{name}/{index % 3}", b"%d" % (index % 3), index % 2)
    got = await subscriber.receive(30)
    assert all(one.topic == f"{name}/{one.payload.decode()}" for one in got)
    assert {one.properties.get("topic_alias", 0) for one in got} >= {1, 2}
    assert {one.properties.get("topic_alias", 0) for one in got} <= {0, 1, 2}


async def test_request_and_response(make: Maker, second_gateway: Gateway, name: str) -> None:
    """Section 4.10 (5.0), between clients of two gateways."""
    requester, responder = await make(f"{name}-requester"), await make(f"{name}-responder", to=second_gateway)
    await requester.subscribe(f"{name}/answers", 1)
    await responder.subscribe(f"{name}/questions", 1)
    for number in range(5):
        await requester.publish(
            f"{name}/questions",
            b"%d" % number,
            1,
            response_topic=f"{name}/answers",
            correlation_data=bytes([255, number]),
        )
    for question in await responder.receive(5):
        answer = b"%d" % (int(question.payload) ** 2)
        data = question.properties["correlation_data"]
        await responder.publish(question.properties["response_topic"], answer, 1, correlation_data=data)
    for number, got in enumerate(await requester.receive(5)):
        assert (int(got.payload), got.properties) == (number**2, {"correlation_data": bytes([255, number])})


ROUNDS = 20
"""A member whose machine is slow may get nothing of a whole round."""


def have_got(clients: Sequence[Library], count: int) -> bool:
    """Whether clients have got so many messages, all together."""
    return sum(len(client.got) for client in clients) >= count


@pytest.mark.parametrize("durable", [False, True], ids=["regular", "durable"])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_shared_subscription(make: Maker, second_gateway: Gateway, name: str, qos: int, durable: bool) -> None:
    """[MQTT-4.8.2-3] (5.0): each message goes to one member, on whichever gateway."""
    expiry = 600 if durable else 0
    members = [
        await make(f"{name}-0", session_expiry_interval=expiry),
        await make(f"{name}-1", session_expiry_interval=expiry),
        await make(f"{name}-2", to=second_gateway, session_expiry_interval=expiry),
    ]
    for member in members:
        assert await member.subscribe(f"$share/group/{name}/+", qos, identifier=3) == qos
    outsider = await make(f"{name}-outsider", to=second_gateway)
    await outsider.subscribe(f"{name}/#", qos)
    publisher = await make(f"{name}-publisher")
    published = 0
    for _ in range(ROUNDS):
        for index in range(published, published + 60):
            await publisher.publish(f"{name}/{index % 5}", b"%d" % index, qos, content_type="text/plain")
        published += 60
        await aeventually(partial(have_got, members, published), what=f"{published} messages")
        assert sorted(int(one.payload) for member in members for one in member.got) == list(range(published))
        if all(member.got for member in members):
            break
    assert all(member.got for member in members)
    for member in members:
        expected = {"content_type": "text/plain", "subscription_identifier": [3]}
        assert all((one.qos, one.properties) == (qos, expected) for one in member.got)
    assert [int(payload) for payload in await outsider.payloads(published)] == list(range(published))


@pytest.mark.parametrize("durable", [False, True], ids=["regular", "durable"])
async def test_receive_maximum(make_either: Maker, name: str, durable: bool) -> None:
    """[MQTT-3.3.4-9] (5.0): no more are in flight, over all subscriptions, than the client takes."""
    publisher = await make_either(f"{name}-publisher")
    subscriber = await make_either(name, receive_maximum=3, holding=True, session_expiry_interval=600 if durable else 0)
    await subscriber.subscribe(f"{name}/a", 1)
    await subscriber.subscribe(f"{name}/b", 2)
    await subscriber.subscribe(f"{name}/end", 0)
    for index in range(20):
        await publisher.publish(f"{name}/{'ab'[index % 2]}", b"%d" % index, 2)
    await publisher.publish(f"{name}/end", b"end", 0)  # at QoS 0 the window does not count
    first = await subscriber.payloads(4)
    if durable:  # each subscription has an order of its own, and one may be ahead of the other
        numbers = [int(payload) for payload in first if payload != b"end"]
        assert len(numbers) == 3
        for parity in (0, 1):
            some = [number for number in numbers if number % 2 == parity]
            assert some == list(range(parity, 20, 2))[: len(some)]
    else:
        assert sorted(first) == [b"0", b"1", b"2", b"end"]
    await subscriber.go_on()
    got = [payload for payload in await subscriber.payloads(21) if payload != b"end"]
    assert sorted(got, key=int) == [b"%d" % index for index in range(20)]
    assert [int(payload) for payload in got if int(payload) % 2] == list(range(1, 20, 2))


async def test_receive_maximum_of_one(make: Maker, name: str) -> None:
    """[MQTT-3.3.4-9] (5.0): one after the other, and all of them."""
    publisher, subscriber = await make(f"{name}-publisher"), await make(name, receive_maximum=1)
    await subscriber.subscribe(name, 2)
    for index in range(20):
        await publisher.publish(name, b"%d" % index, 1 + index % 2)
    assert [int(payload) for payload in await subscriber.payloads(20)] == list(range(20))


async def test_maximum_packet_size(make: Maker, name: str) -> None:
    """[MQTT-3.1.2-24], [MQTT-3.1.2-25] (5.0): a message that is too large for a client is left out for it alone."""
    small, large, publisher = (
        await make(f"{name}-small", maximum_packet_size=200),
        await make(f"{name}-large"),
        await make(f"{name}-publisher"),
    )
    for client in (small, large):
        await client.subscribe(name, 2)
    for qos in (0, 1, 2):
        await publisher.publish(name, b"-" * 300, qos)
        await publisher.publish(name, b"fits", qos)
    await large.receive(6)
    assert await small.payloads(3) == [b"fits"] * 3


async def test_message_expiry(make: Maker, name: str, stored: Stored) -> None:
    """[MQTT-3.3.2-5], [MQTT-3.3.2-6] (5.0): what has expired is not delivered, the rest says what is left."""
    publisher = await make(f"{name}-publisher")
    first = await make(name, session_expiry_interval=600)
    await first.subscribe(f"{name}/#", 1)
    await first.disconnect()
    await stored.detached(name)
    await publisher.publish(f"{name}/a", b"short", 1, message_expiry_interval=1)
    published = time.monotonic()
    await publisher.publish(f"{name}/a", b"long", 1, message_expiry_interval=100)
    await publisher.publish(f"{name}/kept", b"short", 1, retain=True, message_expiry_interval=1)
    watcher = await make(f"{name}-watcher")
    await watcher.subscribe(f"{name}/b", 1)
    began = time.monotonic()
    while time.monotonic() < began + 2.1:
        sent = time.monotonic()
        await publisher.publish(f"{name}/b", b"tick", 1, message_expiry_interval=3)
        await aeventually(lambda: watcher.got)
        left = watcher.got.pop().properties["message_expiry_interval"]
        assert max(2 - (time.monotonic() - sent), 0) <= left <= 3
    second = await make(name, clean=False, session_expiry_interval=600)
    await publisher.publish(f"{name}/a", b"end", 1)
    await aeventually(lambda: second.got and second.got[-1].payload == b"end")
    long = next(one for one in second.got if one.payload == b"long")
    assert 99 - (time.monotonic() - published) <= long.properties["message_expiry_interval"] <= 98
    assert b"short" not in [one.payload for one in second.got]
    late = await make(f"{name}-late")
    await late.subscribe(f"{name}/kept", 1)
    await publisher.publish(f"{name}/kept", b"end", 1)
    assert await late.payloads(1) == [b"end"]


async def test_reason_of_a_refused_publish(make_paho: Maker, name: str) -> None:
    """[MQTT-3.4.2-1], [MQTT-3.5.2-1] (5.0): at QoS 1 and 2 it is in the answer, and the client stays."""
    client = await make_paho(name)
    assert isinstance(client, Paho)
    # paho releases what PUBREC has refused, and is told that there is nothing to release.
    for qos, reason in ((1, 0x87), (2, 0x92)):
        assert await client.outcome("$JS/API/STREAM/LIST", b"", qos) == reason
        assert await client.outcome(name, b"x", qos) == 0
    assert not client.farewells


async def test_subscriptions_that_are_refused(make: Maker, name: str) -> None:
    """[MQTT-3.9.3-2] (5.0): in SUBACK, and the client stays."""
    client = await make(name)
    assert await client.subscribe("$JS/#", 1) >= 0x80
    assert await client.subscribe(name, 1) == 1


async def test_both_versions_on_one_topic(make: Maker, name: str, connect: Connector) -> None:
    """Clients of 3.1.1 get the same messages, without their properties, and theirs have none."""
    old, new, publisher = await connect(f"{name}-old"), await make(name), await connect(f"{name}-publisher")
    await old.subscribe(name, qos=2)
    await new.subscribe(name, 2, identifier=5)
    await new.publish(name, b"new", 2, **EVERYTHING)
    received = await old.receive(name, b"new")
    assert received.qos == 2
    await publisher.deliver(name, b"old", 1)
    assert [(one.payload, one.properties) for one in await new.receive(2)] == [
        (b"new", {**EVERYTHING, "subscription_identifier": [5]}),
        (b"old", {"subscription_identifier": [5]}),
    ]
