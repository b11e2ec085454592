# SPDX-License-Identifier: Apache-2.0
"""A session's end that is interrupted, by a further claim or a crash, is finished by whoever comes next."""

import asyncio
import signal

import pytest
from nats.aio.msg import Msg

from mqtt_nats.codec import Connack, Connect
from mqtt_nats.lifecycle.expiry import ended_record
from mqtt_streams.hashing import name_hash
from mqtt_streams.headers import EXPECTED_LAST_SUBJECT_SEQUENCE
from mqtt_streams.sessions import SessionRecord, decode
from tests.conftest import GatewayFactory
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBREC, RawClient
from tests.integration.conftest import Connector, Stored, until

pytestmark = pytest.mark.anyio


async def full_session(connect: Connector, name: str) -> RawClient:
    """A durable session with everything that one can have: consumers, an owed PUBREL, a held publish."""
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/#", f"{name}/+/x", qos=2)
    async with await connect(f"{name} publisher") as publisher:
        await publisher.deliver(f"{name}/a", b"owed", 2)
    message = await client.message(f"{name}/a", b"owed")
    client.ack(PUBREC, message.packet_id)
    await client.packet()  # PUBREL
    held = client.publish(f"{name}/b", b"held", 2)
    await client.expect_ack(PUBREC, held)
    return client


@pytest.mark.parametrize("number", range(5))
async def test_claims_that_interrupt_a_clean_start(
    connect: Connector, gateway: Gateway, name: str, stored: Stored, number: int
) -> None:
    (await full_session(connect, name)).drop()
    await stored.settled(name, owed=1)
    clients = [await RawClient.open(gateway.port) for _ in range(3)]
    for client in clients:
        client.send(Connect(4, name, True, 0, None, None, None))
        await asyncio.sleep(number * 0.0005)

    async def accepted(client: RawClient) -> bool:
        try:
            await client.expect(Connack, code=0)
            await client.quiet()
        except AssertionError:
            return False
        return True

    assert any(await asyncio.gather(*map(accepted, clients)))
    for client in clients:
        client.drop()
    await stored.gone(name)


async def test_a_clean_start_that_crashed(
    connect: Connector, name: str, stored: Stored, nats_server: NatsServer, gateway_factory: GatewayFactory
) -> None:
    client = await full_session(connect, name)
    for number in range(40):
        assert await client.subscribe(f"{name}/{number}", qos=1) == (1,)
    client.drop()
    await stored.settled(name, owed=1)
    doomed = gateway_factory(nats_server)
    claimed = asyncio.Event()

    async def kill(message: Msg) -> None:
        if (message.headers or {})[EXPECTED_LAST_SUBJECT_SEQUENCE] != "0":  # a first attempt: there is no record
            doomed.process.send(signal.SIGKILL)
            claimed.set()

    await stored.nats.subscribe(f"$MQTT.sess.{name_hash(name)}", cb=kill)
    await fence(stored.nats)
    async with await RawClient.open(doomed.port) as client:
        client.send(Connect(4, name, True, 0, None, None, None))
        await asyncio.wait_for(claimed.wait(), 30)

    async def replaced() -> None:
        record, _ = await session_record(stored, name)
        assert record.clean

    await until(replaced)
    await (await connect(name)).disconnect()
    await stored.gone(name)


@pytest.mark.parametrize("removed", [False, True])
async def test_an_expiry_that_crashed(connect: Connector, name: str, stored: Stored, removed: bool) -> None:
    client = await full_session(connect, name)
    client.drop()
    await stored.settled(name, owed=1)
    record, epoch = await session_record(stored, name)
    # What the gateway had done before it crashed:
    await stored.js.publish(f"$MQTT.sess.{name_hash(name)}", ended_record(record, "crashed0", epoch).encode())
    if removed:
        for consumer in await stored.consumers("$MQTT_msgs", name_hash(name)):
            await stored.js.delete_consumer("$MQTT_msgs", consumer)
    # The timer comes again.
    await stored.js.purge_stream("$MQTT_timers", subject=f"$MQTT.timers.expiry.{name_hash(name)}")
    subject = f"$MQTT.timers.fired.expiry.{name_hash(name)}"
    await stored.js.publish(subject, name.encode(), headers={"Nmqtt-Epoch": str(epoch)})
    await stored.gone(name)


async def session_record(stored: Stored, name: str) -> tuple[SessionRecord, int]:
    """The session's record and its sequence."""
    found = await stored.js.get_last_msg("$MQTT_sess", f"$MQTT.sess.{name_hash(name)}")
    assert found.seq
    return decode(found.data or b""), found.seq
