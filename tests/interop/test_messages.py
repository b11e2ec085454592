# SPDX-License-Identifier: Apache-2.0
"""Messages from each listener to the other, and between both and NATS clients."""

import asyncio

import pytest
from nats.aio.client import Client as NatsClient

from tests.harness.fence import fence
from tests.interop.support import BOTH_WAYS, Message, Pahos, unique


@BOTH_WAYS
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "durable"])
def test_every_qos_to_every_qos(paho: Pahos, here: str, there: str, clean: bool) -> None:
    topic = unique("msg/")
    publisher = paho(here, unique("pub"))
    subscribers = [(granted, paho(side, unique("sub"), clean=clean)) for granted in (0, 1, 2) for side in (there, here)]
    for granted, subscriber in subscribers:
        assert subscriber.subscribe(topic, granted) == granted
    for qos in (0, 1, 2):
        for number in range(20):
            publisher.publish(topic, b"%d-%d" % (qos, number), qos)
        for granted, subscriber in subscribers:
            subscriber.expect(
                *(Message(topic, b"%d-%d" % (qos, number), min(qos, granted), False) for number in range(20))
            )
    for _, subscriber in subscribers:
        subscriber.fence()
        assert subscriber.messages == []


@BOTH_WAYS
def test_multi_level_filters_and_odd_topics(paho: Pahos, here: str, there: str) -> None:
    root = unique("odd")
    topics = [f"{root}/a", root, f"{root}/a.b/c", f"{root}//x", f"{root}/é/ü", f"/{root}"]
    subscriber = paho(there, unique("sub"))
    subscriber.subscribe(f"{root}/#", 1)
    publisher = paho(here, unique("pub"))
    for topic in topics:
        publisher.publish(topic, topic.encode(), 1)
    wanted = {Message(topic, topic.encode(), 1, False) for topic in topics[:-1]}
    subscriber.fence()
    assert set(subscriber.messages) == wanted
    assert len(subscriber.messages) == len(wanted)


async def test_nats_clients_receive_from_both(paho: Pahos, nats_client: NatsClient) -> None:
    topic = unique("nc/")
    received: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    async def handler(message: object) -> None:
        header = (message.headers or {}).get("Nmqtt-Pub", "")  # type: ignore[attr-defined]
        await received.put((header.strip(), message.data))  # type: ignore[attr-defined]

    await nats_client.subscribe(topic.replace("/", "."), cb=handler)
    await fence(nats_client)
    for side in ("gateway", "nats-server"):
        publisher = paho(side, unique("pub"))
        for qos in (0, 1, 2):
            publisher.publish(topic, f"{side}{qos}".encode(), qos)
            header, payload = await asyncio.wait_for(received.get(), 30)
            assert payload == f"{side}{qos}".encode()
            assert header == str(qos) or (qos == 0 and header == "")
    assert received.empty()


async def test_nats_clients_reach_both(paho: Pahos, nats_client: NatsClient) -> None:
    topic = unique("nc/")
    subject = topic.replace("/", ".")
    subscribers = [
        (granted, paho(side, unique("sub"), clean=clean))
        for granted in (0, 1, 2)
        for side in ("gateway", "nats-server")
        for clean in (True, False)
    ]
    for granted, subscriber in subscribers:
        subscriber.subscribe(topic, granted)

    await nats_client.publish(subject, b"plain")
    await fence(nats_client)
    for _, subscriber in subscribers:
        subscriber.expect(Message(topic, b"plain", 0, False))

    headers = {"Nmqtt-Pub": "1"}
    await nats_client.publish(subject, b"reliable", headers=headers)
    await nats_client.jetstream().publish(f"$MQTT.msgs.{subject}", b"reliable", headers=headers)
    for granted, subscriber in subscribers:
        subscriber.expect(Message(topic, b"reliable", min(granted, 1), False))
        subscriber.fence()
        assert subscriber.messages == []
