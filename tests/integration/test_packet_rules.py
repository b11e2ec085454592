# SPDX-License-Identifier: Apache-2.0
"""Rules about single packets, byte by byte: forms, packet ids, and what is not done with what is refused."""

import secrets

import nats
import pytest
from nats.js.api import DiscardPolicy

from mqtt_nats.codec import Will
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw
from tests.harness.gateway import Gateway
from tests.harness.raw import Raw, packet, publish, subscribe, unsubscribe
from tests.harness.rawclient import PUBACK, PUBREC, RawClient
from tests.integration.conftest import Connector


def test_every_packet_of_the_gateway(gateway: Gateway, name: str) -> None:
    """[MQTT-2.2.2-1], [MQTT-2.3.1-5], [MQTT-2.3.1-6], [MQTT-2.3.1-7], [MQTT-3.3.2-1], [MQTT-3.6.1-1]"""
    topic = name.encode()
    head = len(topic).to_bytes(2, "big") + topic

    def next_one() -> tuple[int, bytes]:
        one = client.receive()
        assert one is not None
        return one.first, one.body

    with Raw(gateway.port) as client:
        client.send(raw.connect(name))
        assert next_one() == (0x20, b"\0\0")
        client.send(subscribe((topic, 2), id=0x1234))
        assert next_one() == (0x90, b"\x12\x34\x02")
        client.send(publish(topic, b"\xab\xcd payload"))
        assert next_one() == (0x30, head + b"\xab\xcd payload")
        client.send(publish(topic, b"one", qos=1, id=0x2345, flags=1))
        found = dict((next_one(), next_one()))
        assert found.pop(0x40) == b"\x23\x45"
        ((first, body),) = found.items()
        identifier = body[len(head) : len(head) + 2]
        assert (first, body) == (0x32, head + identifier + b"one")
        assert identifier != b"\0\0"
        client.send(packet(0x40, identifier))
        client.send(publish(topic, b"two", qos=2, id=0xFFFF))
        assert next_one() == (0x50, b"\xff\xff")
        client.send(packet(0x62, b"\xff\xff"))
        found = dict((next_one(), next_one()))
        assert found.pop(0x70) == b"\xff\xff"
        ((first, body),) = found.items()
        identifier = body[len(head) : len(head) + 2]
        assert (first, body) == (0x34, head + identifier + b"two")
        client.send(packet(0x50, identifier))
        assert next_one() == (0x62, identifier)
        client.send(packet(0x70, identifier))
        client.send(subscribe((topic, 1), id=1))
        found = dict((next_one(), next_one()))
        assert found.pop(0x90) == b"\0\x01\x01"
        ((first, body),) = found.items()
        identifier = body[len(head) : len(head) + 2]
        assert (first, body) == (0x33, head + identifier + b"one")
        client.send(packet(0x40, identifier))
        client.send(unsubscribe(topic, id=0xFEDC))
        assert next_one() == (0xB0, b"\xfe\xdc")
        client.send(packet(0xC0))
        assert next_one() == (0xD0, b"")
        client.send(publish(topic, b"", flags=1) + packet(0xE0))
        assert client.expect_closed() == []


REFUSED = {
    "level": raw.connect("refused", level=6),
    "client id": raw.connect("", clean=False),
    "will": raw.connect("refused", flags=0x0E, tail=("$JS/API/INFO", b"")),
    "malformed": raw.connect("refused", flags=0x03),
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
async def test_nothing_behind_a_refused_connect(connect: Connector, gateway: Gateway, name: str, data: bytes) -> None:
    """[MQTT-3.1.4-5]: neither in the same write nor a moment later."""
    listener = await connect(name)
    await listener.subscribe(f"{name}/#", qos=2)
    behind = b"".join(publish(f"{name}/{qos}", b"x", qos=qos, id=1 + qos, flags=1) for qos in (0, 1, 2))
    behind += subscribe((f"{name}/#", 0), id=9) + packet(0xC0)
    with Raw(gateway.port) as client:
        client.send(data + behind)
        client.send(behind)
        answers = client.expect_closed()
        assert [one.kind for one in answers if one.kind != raw.CONNACK] == []
        assert all(one.body[1] for one in answers)
    await listener.deliver(f"{name}-fence", b"", 1)
    await listener.quiet()
    await listener.subscribe(f"{name}/+", qos=0)  # nothing is retained either
    await listener.quiet()


@pytest.mark.parametrize("dup", [False, True])
async def test_an_acknowledged_identifier_is_free(connect: Connector, name: str, dup: bool) -> None:
    """[MQTT-4.3.2-2]: after PUBACK the same packet id is a new message, whatever its DUP flag says."""
    listener = await connect(f"{name}-listener")
    await listener.subscribe(name, qos=1)
    durable = await connect(f"{name}-durable", clean=False)
    await durable.subscribe(name, qos=1)
    client = await connect(name, clean=False)
    for _ in range(3):
        client.publish(name, b"the same", 1, packet_id=7, dup=dup)
        await client.expect_ack(PUBACK, 7)
    for subscriber in (listener, durable):
        for _ in range(3):
            await subscriber.receive(name, b"the same", dup=False)
        await subscriber.quiet()


async def test_a_published_will_is_gone(connect: Connector, name: str) -> None:
    """[MQTT-3.1.2-10], [MQTT-3.1.2-12]: the session's next connection, which has no will, breaks without one."""
    listener = await connect(f"{name}-listener")
    await listener.subscribe(f"{name}/#", qos=1)
    client = await connect(name, clean=False, will=Will(f"{name}/will", b"farewell", 1, False))
    client.drop()
    await listener.receive(f"{name}/will", b"farewell")
    for _ in range(2):
        client = await connect(name, clean=False)
        client.drop()
    client = await connect(name, clean=False)
    await client.deliver(f"{name}/last", b"", 1)
    await listener.receive(f"{name}/last", b"")


async def test_a_byte_order_mark_is_a_character(connect: Connector, name: str) -> None:
    """[MQTT-1.5.3-3], [MQTT-4.7.3-4]: in topics, filters and payloads, at the start and elsewhere."""
    client = await connect(f"\ufeff{name}", clean=False)
    plain = await connect(name, clean=False)
    for topic in (f"\ufeff{name}/a", f"{name}/\ufeffa", f"{name}/a\ufeff"):
        await client.subscribe(topic, qos=1)
    await plain.subscribe(f"{name}/a", qos=1)
    for topic in (f"\ufeff{name}/a", f"{name}/\ufeffa", f"{name}/a\ufeff"):
        for qos in (0, 1):
            await plain.deliver(topic, "\ufeffpayload".encode(), qos)
            await client.receive(topic, "\ufeffpayload".encode(), qos=qos)
    await plain.quiet()
    assert not (await connect(f"\ufeff{name}-2", clean=False)).session_present


async def test_what_cannot_be_stored_is_not_acknowledged(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory
) -> None:
    """[MQTT-4.8.0-2]: a limit of JetStream is reached for a while: whoever publishes is closed, nobody else is."""
    server = nats_factory()
    gateway = gateway_factory(server)
    topic = secrets.token_hex(4)

    async def limit(count: int) -> None:
        client = await nats.connect(server.url)
        js = client.jetstream()
        for stream in ("$MQTT_msgs", "$MQTT_qos2in"):
            config = (await js.stream_info(stream)).config
            config.max_msgs = count
            config.discard = DiscardPolicy.NEW
            await js.update_stream(config)
        await client.close()

    async with await RawClient.connect(gateway.port, "listener") as listener:
        await listener.subscribe(topic, qos=1)
        for qos in (1, 2):
            await listener.deliver(f"{topic}/first", b"", qos)
        async with await RawClient.connect(gateway.port, "holds") as holder:
            holder.publish(topic, b"", 2)
            await holder.expect_ack(PUBREC, 1)
            await limit(1)
            for qos in (1, 2):
                async with await RawClient.connect(gateway.port, f"publisher-{qos}") as publisher:
                    publisher.publish(f"{topic}/refused", b"x", qos)
                    await publisher.expect_closed()
            await limit(-1)
            await holder.quiet()
        await listener.deliver(f"{topic}/second", b"", 2)
        await listener.quiet()
    assert gateway.log.count("a message was not stored: maximum messages exceeded") == 1, "once a minute"
