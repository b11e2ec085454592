# SPDX-License-Identifier: Apache-2.0
"""PUBLISH from clients: acknowledgements, their order, the store before them, QoS 2 held and released once."""

from collections.abc import Iterator

import pytest
from nats.aio.msg import Msg

from mqtt_nats.codec import Ack, Publish, Suback, Subscribe, Subscription
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.waiting import aeventually
from tests.integration.conftest import Connector, Stored
from tests.integration.test_connect import silent_for


@pytest.mark.parametrize("granted", [0, 1, 2])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
async def test_qos_is_the_lower_one(
    connect: Connector, name: str, second_gateway: Gateway, qos: int, granted: int, clean: bool
) -> None:
    """[MQTT-3.3.1-2], [MQTT-3.3.4-1], [MQTT-3.8.4-6], [MQTT-4.3.1-1], [MQTT-4.3.2-1], [MQTT-4.3.3-1]"""
    here = await connect(f"{name}-here", clean=clean)
    there = await connect(f"{name}-there", clean=clean, to=second_gateway)
    for client in (here, there):
        assert await client.subscribe(f"{name}/+", qos=granted) == (granted,)
    publisher = await connect(f"{name}-publisher")
    payloads = [b"", b"one", b"\0\xff" * 500, b"x" * 70_000]
    for payload in payloads:
        await publisher.deliver(f"{name}/a", payload, qos)
    for client in (here, there):
        for payload in payloads:
            await client.receive(f"{name}/a", payload, qos=min(qos, granted), dup=False, retain=False)
        await client.quiet()


@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
async def test_order(connect: Connector, name: str, second_gateway: Gateway, clean: bool) -> None:
    """[MQTT-4.6.0-5], [MQTT-4.6.0-6]: what one client publishes on one topic arrives in that order."""
    here = await connect(f"{name}-here", clean=clean)
    there = await connect(f"{name}-there", clean=clean, to=second_gateway)
    for client in (here, there):
        await client.subscribe(f"{name}/#", qos=2)
    publisher = await connect(f"{name}-publisher")
    payloads = [b"%d" % index for index in range(300)]
    for qos in (0, 1, 2):
        await publisher.deliver_all(f"{name}/{qos}", payloads, qos)
    for client in (here, there):
        got: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
        while any(len(one) < len(payloads) for one in got.values()):
            packet = await client.packet()
            if isinstance(packet, Publish):
                got[int(packet.key[-1:])].append(packet.payload)
                if packet.qos:
                    client.ack(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id)
            else:
                assert isinstance(packet, Ack)
                assert packet.kind == PUBREL
                client.ack(PUBCOMP, packet.packet_id)
        assert all(one == payloads for one in got.values())


async def test_acknowledgements_in_order(connect: Connector, name: str) -> None:
    """[MQTT-4.6.0-2], [MQTT-4.6.0-3], [MQTT-2.3.1-6]: over stores of different streams, retained ones too."""
    client = await connect(name)
    expected = []
    for packet_id in range(1, 301):
        qos = 1 + packet_id % 2
        client.publish(f"{name}/a", b"x" * packet_id, qos, packet_id=packet_id, retain=packet_id % 3 == 0)
        expected.append(Ack(PUBACK if qos == 1 else PUBREC, packet_id, 0))
    assert [await client.packet() for _ in expected] == expected
    ids = [ack.packet_id for ack in expected if ack.kind == PUBREC]
    client.ack(PUBREL, *ids)
    await client.expect_ack(PUBCOMP, *ids)
    await client.deliver(f"{name}/a", b"", 1, retain=True)


async def test_stored_once(connect: Connector, name: str, stored: Stored) -> None:
    """QoS 1 and 2 messages are in the stream when they are acknowledged, once; those at QoS 0 are not."""
    client = await connect(name)
    for qos, total in ((1, 1), (2, 2), (0, 2)):
        await client.deliver(f"{name}/a", b"x", qos)
        assert await stored.count("$MQTT_msgs", f"$MQTT.msgs.{name}.a") == total


async def test_dup_is_not_passed_on(connect: Connector, name: str) -> None:
    """[MQTT-3.3.1-3]"""
    listener = await connect(f"{name}-listener")
    await listener.subscribe(name, qos=2)
    publisher = await connect(f"{name}-publisher")
    publisher.publish(name, b"one", 1, packet_id=1, dup=True)
    await publisher.expect_ack(PUBACK, 1)
    await listener.receive(name, b"one", dup=False)
    publisher.publish(name, b"two", 2, packet_id=2, dup=True)
    await publisher.expect_ack(PUBREC, 2)
    publisher.ack(PUBREL, 2)
    await publisher.expect_ack(PUBCOMP, 2)
    await listener.receive(name, b"two", dup=False)


# -- QoS 2, step by step --------------------------------------------------------------------------


async def test_repeated_publish_is_held_once(connect: Connector, name: str, stored: Stored) -> None:
    """[MQTT-4.3.3-2]: until PUBREL the same packet id is the same message, answered with PUBREC each time."""
    listener = await connect(f"{name}-listener")
    await listener.subscribe(name, qos=2)
    client = await connect(name)
    client.publish(name, b"held", 2, packet_id=5)
    await client.expect_ack(PUBREC, 5)
    for _ in range(3):
        client.publish(name, b"held", 2, packet_id=5, dup=True)
    await client.expect_ack(PUBREC, 5, 5, 5)
    assert await stored.count("$MQTT_qos2in", f"$MQTT.qos2.in.{name}.*") == 1
    await listener.quiet()  # not before PUBREL
    client.ack(PUBREL, 5)
    await client.expect_ack(PUBCOMP, 5)
    assert await stored.count("$MQTT_qos2in", f"$MQTT.qos2.in.{name}.*") == 0
    assert await stored.count("$MQTT_msgs", f"$MQTT.msgs.{name}") == 1
    await listener.receive(name, b"held", qos=2)
    client.ack(PUBREL, 5)  # its PUBCOMP was lost
    await client.expect_ack(PUBCOMP, 5)
    await client.deliver(f"{name}/fence", b"", 2)
    await listener.quiet()
    client.publish(name, b"another", 2, packet_id=5)
    await client.expect_ack(PUBREC, 5)
    client.ack(PUBREL, 5)
    await client.expect_ack(PUBCOMP, 5)
    await listener.receive(name, b"another")


async def test_repeated_publish_at_once(connect: Connector, name: str, stored: Stored) -> None:
    """[MQTT-4.3.3-2]: also before its PUBREC has left, in one write."""
    client = await connect(name)
    publish = Publish(2, False, False, len(name).to_bytes(2, "big") + name.encode(), 1, b"x")
    client.send(publish, publish)
    await client.expect_ack(PUBREC, 1)
    client.ack(PUBREL, 1)
    await client.expect_ack(PUBCOMP, 1)
    await client.quiet()
    assert await stored.count("$MQTT_msgs", f"$MQTT.msgs.{name}") == 1


async def test_unknown_pubrel(connect: Connector, name: str) -> None:
    """[MQTT-4.3.3-2]: PUBREL is always answered with PUBCOMP; nothing is published."""
    client = await connect(name)
    await client.subscribe("#", qos=0)
    client.ack(PUBREL, 1, 2, 65535)
    await client.expect_ack(PUBCOMP, 1, 2, 65535)


async def test_publishes_are_released_in_the_order_of_pubrels(connect: Connector, name: str) -> None:
    """A message's place is that of its PUBREL; acknowledgements keep the order of what they answer."""
    listener = await connect(f"{name}-listener")
    await listener.subscribe(name, qos=0)
    client = await connect(name)
    ids = [client.publish(name, b"%d" % index, 2) for index in range(20)]
    await client.expect_ack(PUBREC, *ids)
    client.ack(PUBREL, *reversed(ids))
    await client.expect_ack(PUBCOMP, *reversed(ids))
    for index in reversed(range(20)):
        await listener.message(name, b"%d" % index)


NAMES = ["plain", 'quo"te', "back\\\\node", "back\\node", 'x","filter":"$MQTT\\u002eqos2\\u002ein\\u002e\\u002a']


@pytest.mark.parametrize("client_id", NAMES)
async def test_what_is_released_together_goes_together(
    connect: Connector, name: str, stored: Stored, second_gateway: Gateway, client_id: str
) -> None:
    """One request removes many records, and none of a publish that waits for its PUBREL [MQTT-4.1.0-1]."""
    asked: list[bytes] = []
    client_id = name + client_id

    async def note(message: Msg) -> None:
        asked.append(message.data)

    async def held() -> dict[str, int]:
        info = await stored.js.stream_info("$MQTT_qos2in", subjects_filter="$MQTT.qos2.in.>")
        return {one: count for one, count in (info.state.subjects or {}).items() if name in one}

    await stored.nats.subscribe("$JS.API.STREAM.PURGE.$MQTT_qos2in", cb=note)
    await fence(stored.nats)
    listener = await connect(f"{name}-listener")
    await listener.subscribe(f"{name}/#", qos=1)
    other = await connect(f"{name}-other", clean=False)
    await other.expect_ack(PUBREC, other.publish(f"{name}/b", b"other", 2, packet_id=1))
    others = {f"$MQTT.qos2.in.{name}-other.1": 1}
    client = await connect(client_id, clean=False)
    for start in range(0, 3000, 30):
        ids = [client.publish(f"{name}/a", b"%d" % (start + index), 2) for index in range(30)]
        await client.expect_ack(PUBREC, *ids)
        kept = ids.pop(20)
        client.ack(PUBREL, *ids)
        await client.expect_ack(PUBCOMP, *ids)
        for index in (*range(20), *range(21, 30)):
            await listener.receive(f"{name}/a", b"%d" % (start + index))
        assert await held() == others | {f"$MQTT.qos2.in.{client_id}.{kept}": 1}
        if len(asked) >= 3:
            break
        client.ack(PUBREL, kept)
        await client.expect_ack(PUBCOMP, kept)
        await listener.receive(f"{name}/a", b"%d" % (start + 20))
    else:
        pytest.fail("records are removed one by one")
    client.drop()
    client = await connect(client_id, clean=False, to=second_gateway)
    client.ack(PUBREL, kept)
    await client.expect_ack(PUBCOMP, kept)
    await listener.receive(f"{name}/a", b"%d" % (start + 20))
    await listener.quiet()
    assert await held() == others


@pytest.mark.parametrize("client_id", NAMES)
async def test_what_a_regular_session_held_goes_with_it(
    connect: Connector, name: str, stored: Stored, client_id: str
) -> None:
    """And nothing of anybody else's."""
    other = await connect(f"{name}-other", clean=False)
    await other.expect_ack(PUBREC, other.publish(f"{name}/b", b"other", 2, packet_id=1))
    client = await connect(name + client_id)
    await client.expect_ack(PUBREC, client.publish(f"{name}/a", b"", 2, packet_id=7))
    client.drop()

    async def gone() -> bool:
        info = await stored.js.stream_info("$MQTT_qos2in", subjects_filter="$MQTT.qos2.in.>")
        return f"$MQTT.qos2.in.{name}{client_id}.7" not in (info.state.subjects or {})

    await aeventually(gone, what="the end of what was held")
    assert await stored.count("$MQTT_qos2in", f"$MQTT.qos2.in.{name}-other.*") == 1


@pytest.mark.parametrize("where", ["same gateway", "other gateway", "gateway killed"])
@pytest.mark.parametrize("step", ["before PUBREC", "after PUBREC", "after PUBREL", "after PUBCOMP"])
async def test_qos2_in_across_reconnect(
    connect: Connector,
    name: str,
    stored: Stored,
    gateway: Gateway,
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
    step: str,
    where: str,
) -> None:
    """[MQTT-4.4.0-1], [MQTT-4.3.3-2], [MQTT-4.1.0-1]: published once, wherever it breaks."""
    near = gateway_factory(nats_server)
    far = near if where == "same gateway" else gateway
    listener = await connect(f"{name}-listener")
    await listener.subscribe(f"{name}/#", qos=2)
    durable = await connect(f"{name}-durable", clean=False)
    await durable.subscribe(f"{name}/#", qos=2)
    client = await connect(name, clean=False, to=near)
    client.publish(f"{name}/a", b"once", 2, packet_id=11)
    if step != "before PUBREC":
        await client.expect_ack(PUBREC, 11)
    if step in ("after PUBREL", "after PUBCOMP"):
        client.ack(PUBREL, 11)
    if step == "after PUBCOMP":
        await client.expect_ack(PUBCOMP, 11)
    if where == "gateway killed":
        near.kill()
    client.drop()
    client = await connect(name, clean=False, to=far)
    assert client.session_present
    if step == "before PUBREC" or step == "after PUBREC":
        client.publish(f"{name}/a", b"once", 2, packet_id=11, dup=True)  # the client saw no PUBREC
        await client.expect_ack(PUBREC, 11)
    client.ack(PUBREL, 11)
    await client.expect_ack(PUBCOMP, 11)
    await client.deliver(f"{name}/last", b"", 2)
    for receiver in (listener, durable):
        await receiver.receive(f"{name}/a", b"once", qos=2)
        await receiver.receive(f"{name}/last", b"")
        await receiver.quiet()
    assert await stored.count("$MQTT_msgs", f"$MQTT.msgs.{name}.a") == 1

    async def none_held() -> bool:
        return await stored.count("$MQTT_qos2in", f"$MQTT.qos2.in.{name}.*") == 0

    # What the first gateway has held too late is found some seconds after the resume.
    await aeventually(none_held, 30.0, what="the end of what was held")


async def test_many_held_across_gateways(connect: Connector, name: str, second_gateway: Gateway) -> None:
    """[MQTT-4.1.0-1]: everything held is known to the next gateway, payloads, retain flags and all."""
    listener = await connect(f"{name}-listener")
    await listener.subscribe(f"{name}/#", qos=1)
    client = await connect(name, clean=False)
    ids = [client.publish(f"{name}/{index}", b"%d" % index * 1000, 2, retain=index == 3) for index in range(40)]
    await client.expect_ack(PUBREC, *ids)
    client.drop()
    client = await connect(name, clean=False, to=second_gateway)
    client.publish(f"{name}/7", b"7" * 1000, 2, packet_id=ids[7], dup=True)
    await client.expect_ack(PUBREC, ids[7])
    client.ack(PUBREL, *ids)
    await client.expect_ack(PUBCOMP, *ids)
    for index in range(40):
        await listener.receive(f"{name}/{index}", b"%d" % index * 1000)
    await listener.quiet()
    late = await connect(f"{name}-late")
    await late.subscribe(f"{name}/#", qos=2)
    await late.receive(f"{name}/3", b"3" * 1000, retain=True, qos=2)
    await late.quiet()
    await client.deliver(f"{name}/3", b"", 1, retain=True)


# -- the store is slow, or away -------------------------------------------------------------------


class Stoppable:
    """A nats-server of a test's own, and a gateway on it."""

    def __init__(self, server: NatsServer, gateway: Gateway) -> None:
        self.server = server
        self.gateway = gateway


@pytest.fixture
def stoppable(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> Iterator[Stoppable]:
    """Something to pause; it runs again when the test ends."""
    server = nats_factory()
    yield Stoppable(server, gateway_factory(server))
    server.resume()


async def test_no_acknowledgement_before_the_store(stoppable: Stoppable, name: str) -> None:
    """[MQTT-4.3.2-2], [MQTT-4.3.3-2]: while nats-server stands still, none."""
    port = stoppable.gateway.port
    async with await RawClient.connect(port, name) as client, await RawClient.connect(port, f"{name}-2") as other:
        await other.subscribe(f"{name}/held", qos=1)
        client.publish(f"{name}/held", b"", 2, packet_id=3)
        await client.expect_ack(PUBREC, 3)
        stoppable.server.pause()
        client.publish(name, b"one", 1, packet_id=1)
        client.publish(name, b"two", 2, packet_id=2)
        client.publish(name, b"retained", 1, retain=True, packet_id=4)
        client.ack(PUBREL, 3)
        await silent_for(client, 1.0)
        stoppable.server.resume()
        await client.expect_ack(PUBACK, 1)
        await client.expect_ack(PUBREC, 2)
        await client.expect_ack(PUBACK, 4)
        await client.expect_ack(PUBCOMP, 3)
        client.ack(PUBREL, 2)
        await client.expect_ack(PUBCOMP, 2)
        await other.receive(f"{name}/held", b"")


async def test_no_suback_before_the_subscription(stoppable: Stoppable, name: str) -> None:
    """SUBACK waits for NATS as well: a subscription that is confirmed is live."""
    port = stoppable.gateway.port
    async with await RawClient.connect(port, name) as client, await RawClient.connect(port, f"{name}-2") as other:
        stoppable.server.pause()
        client.send(Subscribe(1, (Subscription(name, 1),)))
        await silent_for(client, 1.0)
        stoppable.server.resume()
        await client.expect(Suback, packet_id=1, codes=(1,))
        await other.deliver(name, b"x", 1)
        await client.receive(name, b"x")
