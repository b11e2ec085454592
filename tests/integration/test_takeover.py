# SPDX-License-Identifier: Apache-2.0
"""One client id, one connection: on one gateway, and across two."""

import asyncio

import pytest

from mqtt_nats.codec import Connack, Connect
from mqtt_streams.hashing import name_hash
from tests.chaos.points.proxy import Action, NatsProxy
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.waiting import aeventually
from tests.integration.conftest import Connector, Stored

PLACES = pytest.mark.parametrize("elsewhere", [False, True], ids=["same gateway", "other gateway"])


@PLACES
@pytest.mark.parametrize("then_clean", [True, False])
@pytest.mark.parametrize("first_clean", [True, False])
async def test_the_older_connection_is_closed(
    connect: Connector,
    name: str,
    gateway: Gateway,
    second_gateway: Gateway,
    first_clean: bool,
    then_clean: bool,
    elsewhere: bool,
) -> None:
    """[MQTT-3.1.4-2], [MQTT-3.2.2-2]: a session that is taken over is present, unless one of the two is clean."""
    first = await connect(name, clean=first_clean)
    await first.subscribe(f"{name}/a", qos=1)
    second = await connect(name, clean=then_clean, to=second_gateway if elsewhere else gateway)
    await first.expect_closed()
    present = not first_clean and not then_clean
    assert second.session_present is present
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(f"{name}/a", b"x", 1)
    if present:
        await second.receive(f"{name}/a", b"x")
    await second.subscribe(f"{name}/b", qos=1)
    await publisher.deliver(f"{name}/b", b"y", 1)
    await second.receive(f"{name}/b", b"y")
    await second.quiet()


@PLACES
async def test_queued_and_inflight_messages_move(
    connect: Connector, name: str, gateway: Gateway, second_gateway: Gateway, elsewhere: bool
) -> None:
    """[MQTT-4.4.0-1]: in flight with DUP and the same ids, then queued ones, then new ones."""
    first = await connect(name, clean=False)
    await first.subscribe(name, qos=2)
    publisher = await connect(f"{name}-publisher", to=second_gateway)
    await publisher.deliver_all(name, [b"%d" % index for index in range(150)], 2)
    flying = await first.messages(100)  # the window
    await first.quiet()
    first.ack(PUBREC, flying[0].packet_id)
    await first.expect_ack(PUBREL, flying[0].packet_id)
    flying += await first.messages(1)  # a place was free
    second = await connect(name, clean=False, to=second_gateway if elsewhere else gateway)
    assert second.session_present
    await first.expect_closed()
    await second.expect_ack(PUBREL, flying[0].packet_id)
    second.ack(PUBCOMP, flying[0].packet_id)
    again = await second.messages(100)
    assert [one.packet_id for one in again] == [one.packet_id for one in flying[1:]]
    assert all(one.dup for one in again)
    await publisher.deliver(name, b"150", 2)
    got = [flying[0].payload]
    for one in again:
        await second.complete(one)
        got.append(one.payload)
    while len(got) < 151:
        one = (await second.messages(1))[0]
        await second.complete(one)
        assert not one.dup
        got.append(one.payload)
    assert got == [b"%d" % index for index in range(151)]
    await second.quiet()


@PLACES
async def test_no_copy_to_the_old_client(
    connect: Connector, name: str, stored: Stored, gateway: Gateway, second_gateway: Gateway, elsewhere: bool
) -> None:
    """Nothing that is published after the new CONNACK reaches the old connection, at any QoS."""
    first = await connect(name, clean=False)
    await first.subscribe(f"{name}/#", qos=2)
    publisher = await connect(f"{name}-publisher")
    for _ in range(5):
        where = second_gateway if elsewhere else gateway
        second = await connect(name, clean=False, to=where)
        for qos in (0, 1, 2):
            await publisher.deliver(f"{name}/{qos}", b"x", qos)
        got = await second.messages(3)
        for one in got:
            await second.complete(one)
        assert sorted(one.qos for one in got) == [0, 1, 2]
        await stored.settled(name)
        await first.expect_closed()
        first, elsewhere = second, not elsewhere if elsewhere else elsewhere


@PLACES
async def test_held_publish_moves(
    connect: Connector, name: str, gateway: Gateway, second_gateway: Gateway, elsewhere: bool
) -> None:
    """[MQTT-4.1.0-1]: PUBREL may come through another connection than its PUBLISH."""
    listener = await connect(f"{name}-listener")
    await listener.subscribe(name, qos=2)
    first = await connect(name, clean=False)
    first.publish(name, b"held", 2, packet_id=77)
    await first.expect_ack(PUBREC, 77)
    second = await connect(name, clean=False, to=second_gateway if elsewhere else gateway)
    await first.expect_closed()
    second.ack(PUBREL, 77)
    await second.expect_ack(PUBCOMP, 77)
    await listener.receive(name, b"held", qos=2)
    await listener.quiet()


async def test_back_and_forth(connect: Connector, name: str, gateway: Gateway, second_gateway: Gateway) -> None:
    """[MQTT-3.1.4-2]: ten takeovers in a row; one message stays in flight all along, one more each time."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    publisher = await connect(f"{name}-publisher")
    for index in range(10):
        await publisher.deliver(name, b"%d" % index, 1)
        client = await connect(name, clean=False, to=(gateway, second_gateway)[index % 2])
        for known in range(index + 1):
            await client.message(name, b"%d" % known)


async def test_many_at_once(name: str, gateway: Gateway, second_gateway: Gateway, connect: Connector) -> None:
    """[MQTT-3.1.4-2]: of many connections with one id, opened together on two gateways, one is left."""
    base = await connect(name, clean=False)
    await base.subscribe(name, qos=1)
    clients = [await RawClient.open((gateway, second_gateway)[index % 2].port) for index in range(12)]
    for client in clients:
        client.send(Connect(4, name, False, 0))

    accepted: list[RawClient] = []

    async def ended(client: RawClient) -> None:
        """The gateway has closed the connection, with or without an answer before."""
        try:
            if not (await client.expect(Connack, 60)).code:
                accepted.append(client)
        except AssertionError as error:
            if "was closed" not in str(error):
                raise
        await client.expect_closed(90)

    tasks = {asyncio.create_task(ended(client)): client for client in clients}

    def left() -> list[RawClient]:
        return [client for task, client in tasks.items() if not task.done()]

    survivor = await aeventually(lambda: left()[0] if len(left()) == 1 and left()[0] in accepted else None, 60)
    for task, client in tasks.items():
        if client is survivor:
            task.cancel()
            await asyncio.wait((task,))  # two tasks cannot read from one connection
        else:
            await task
    await survivor.quiet()
    await base.expect_closed()
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"x", 1)
    await survivor.receive(name, b"x")
    for client in clients:
        client.drop()


async def test_same_subscribers_stay_apart(connect: Connector, name: str, second_gateway: Gateway) -> None:
    """[MQTT-3.1.3-2]: taking over one client leaves its neighbours alone."""
    neighbours = [await connect(f"{name}-{index}", clean=bool(index % 2)) for index in range(4)]
    for one in neighbours:
        await one.subscribe(name, qos=1)
    await connect(name)
    await connect(name, to=second_gateway)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"x", 1)
    for one in neighbours:
        await one.receive(name, b"x")


@pytest.mark.parametrize("qos", [1, 2])
async def test_an_owed_pubrel_that_is_settled_meanwhile(
    connect: Connector, name: str, stored: Stored, late: Gateway, proxy: NatsProxy, qos: int
) -> None:
    """The new owner has read its record, and then the former owner's acknowledgement removes it."""
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"kept", 2, retain=True)
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=2)
    message = await client.message(name, b"kept", qos=2)
    client.ack(PUBREC, message.packet_id)
    await client.expect_ack(PUBREL, message.packet_id)
    client.drop()
    await stored.detached(name)
    owed = f"$MQTT.out.pubrel.{name_hash(name)}"
    assert await stored.count("$MQTT_out", owed) == 1
    trap = proxy.set("up", "$JS.API.CONSUMER.DURABLE.CREATE.$MQTT_out", Action.HOLD)
    connecting = asyncio.create_task(connect(name, clean=False, to=late))
    await asyncio.wait_for(trap.sprung.wait(), 30)
    await stored.js.purge_stream("$MQTT_out", subject=owed)
    trap.release()
    client = await connecting
    await client.expect_ack(PUBREL, message.packet_id)
    client.ack(PUBCOMP, message.packet_id)
    await client.subscribe(name, qos=qos)
    again = await client.message(name, b"kept", qos=qos, packet_id=message.packet_id)  # the identifier is free
    await client.complete(again)
    await client.quiet()
