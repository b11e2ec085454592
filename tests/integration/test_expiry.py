# SPDX-License-Identifier: Apache-2.0
"""The end of sessions that nobody takes up again, and what is left of those that have ended."""

import asyncio
import time
from collections.abc import Iterator

import nats
import pytest

from mqtt_nats.codec import Disconnect
from mqtt_streams.hashing import name_hash
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBREC, PUBREL, RawClient
from tests.integration.conftest import Connector, Stored, until

EXPIRY = 2  # seconds


@pytest.fixture(scope="module")
def short(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that keeps absent sessions for two seconds."""
    gateway = Gateway(
        tmp_path_factory.mktemp("short") / "gateway.log",
        nats_server.url,
        env={"MQTT_NATS_SESSION_EXPIRY_INTERVAL": str(EXPIRY)},
    )
    gateway.start()
    yield gateway
    gateway.process.discard()
    assert "Traceback" not in gateway.log, gateway.log


async def full_session(connect: Connector, name: str, to: Gateway) -> RawClient:
    """A durable session with a bit of everything: messages in flight and queued, a PUBREL owed, a publish held."""
    client = await connect(name, clean=False, to=to)
    await client.subscribe(f"{name}/#", f"{name}/+", qos=2)
    publisher = await connect(f"{name}-publisher", to=to)
    await publisher.deliver_all(f"{name}/a", [b"1", b"2"], 2)
    first = await client.messages(2)
    client.ack(PUBREC, first[0].packet_id)
    await client.expect_ack(PUBREL, first[0].packet_id)
    client.publish(f"{name}/held", b"x", 2, packet_id=9)
    await client.expect_ack(PUBREC, 9)
    return client


@pytest.mark.parametrize("orderly", [True, False])
async def test_absent_session_expires(
    connect: Connector, name: str, short: Gateway, stored: Stored, orderly: bool
) -> None:
    """After ``session_expiry_interval`` seconds without connection everything of the session is gone."""
    client = await full_session(connect, name, short)
    left = time.monotonic()
    if orderly:
        await client.disconnect()
    else:
        client.drop()
    await stored.gone(name)
    assert time.monotonic() - left > EXPIRY - 0.5
    client = await connect(name, clean=False, to=short)
    assert not client.session_present  # [MQTT-3.2.2-3]
    publisher = await connect(f"{name}-publisher", to=short)
    await publisher.deliver(f"{name}/a", b"nobody", 1)
    await client.quiet()
    await client.subscribe(f"{name}/#", qos=1)
    await publisher.deliver(f"{name}/a", b"again", 1)
    await client.receive(f"{name}/a", b"again")


@pytest.mark.long
async def test_reconnecting_in_time_keeps_it(
    connect: Connector, name: str, nats_server: NatsServer, gateway_factory: GatewayFactory, stored: Stored
) -> None:
    """[MQTT-3.2.2-2], [MQTT-4.1.0-2]: a connection stops the clock; the next absence starts it anew."""
    expiry = 4  # the client has to be back in time
    patient = gateway_factory(nats_server, env={"MQTT_NATS_SESSION_EXPIRY_INTERVAL": str(expiry)})
    client = await connect(name, clean=False, to=patient)
    await client.subscribe(name, qos=1)
    for _ in range(3):
        client.drop()

        async def ticking() -> None:
            assert (await stored.traces(name)).get("timers") == 1

        await until(ticking)
        client = await connect(name, clean=False, to=patient)
        assert client.session_present
        assert "timers" not in await stored.traces(name)
    end = time.monotonic() + expiry + 1
    while time.monotonic() < end:
        await client.quiet()
    publisher = await connect(f"{name}-publisher", to=patient)
    await publisher.deliver(name, b"kept", 1)
    await client.receive(name, b"kept")
    await client.disconnect()
    await stored.gone(name)


@pytest.mark.long
async def test_any_gateway_ends_it(
    connect: Connector, name: str, nats_server: NatsServer, gateway_factory: GatewayFactory, stored: Stored
) -> None:
    """The deadline is kept by JetStream: another gateway ends the session, without having known it."""
    gateway = gateway_factory(nats_server, env={"MQTT_NATS_SESSION_EXPIRY_INTERVAL": "3"})
    client = await full_session(connect, name, gateway)
    await client.disconnect()

    async def ticking() -> None:
        assert (await stored.traces(name)).get("timers") == 1

    await until(ticking)
    gateway.kill()
    await stored.gone(name, 45)  # a timer that was delivered to the gateway as it ended comes again after 30 s


@pytest.mark.long
async def test_expires_while_no_gateway_runs(
    name: str, nats_factory: NatsFactory, gateway_factory: GatewayFactory
) -> None:
    """A deadline that passed meanwhile holds for the gateway that starts next."""
    server = nats_factory()
    first = gateway_factory(server, env={"MQTT_NATS_SESSION_EXPIRY_INTERVAL": "3"})
    client = await RawClient.connect(first.port, name, clean=False)
    await client.subscribe(name, qos=2)
    await client.disconnect()
    assert first.term() == 0
    nats_client = await nats.connect(server.url)
    stored = Stored(nats_client)

    async def fired() -> None:
        assert await stored.count("$MQTT_timers", "$MQTT.timers.fired.>") == 1

    await until(fired)
    assert await stored.session_consumers(name)
    second = gateway_factory(server)
    await stored.gone(name)
    await nats_client.close()
    async with await RawClient.connect(second.port, name, clean=False) as client:
        assert not client.session_present


async def test_never(
    connect: Connector, name: str, nats_server: NatsServer, gateway_factory: GatewayFactory, stored: Stored
) -> None:
    """``never`` keeps a session for good: nothing counts for it."""
    gateway = gateway_factory(nats_server, env={"MQTT_NATS_SESSION_EXPIRY_INTERVAL": "never"})
    client = await connect(name, clean=False, to=gateway)
    await client.subscribe(name, qos=1)
    await client.disconnect()
    await stored.detached(name)

    async def marked() -> None:
        """The timer says that the connection has ended, and never fires."""
        assert (await stored.traces(name)).get("timers") == 1
        mark = await stored.js.get_last_msg("$MQTT_timers", f"$MQTT.timers.expiry.{name_hash(name)}")
        assert "Nmqtt-Epoch" in (mark.headers or {})
        assert "Nats-Schedule" not in (mark.headers or {})

    await until(marked)
    (consumer,) = await stored.session_consumers(name)
    assert not consumer.config.inactive_threshold
    client = await connect(name, clean=False, to=gateway)
    assert client.session_present
    assert "timers" not in await stored.traces(name)


@pytest.mark.long
async def test_clean_start_stops_the_clock(connect: Connector, name: str, short: Gateway, stored: Stored) -> None:
    """The timer of a session that a clean start has replaced ends nothing."""
    client = await full_session(connect, name, short)
    await client.disconnect()
    client = await connect(name, to=short)
    assert await stored.traces(name) == {"record": 1}
    end = time.monotonic() + EXPIRY + 1.5
    while time.monotonic() < end:
        await client.quiet()
    assert await stored.traces(name) == {"record": 1}


# -- what is left ---------------------------------------------------------------------------------


async def test_stored_once_however_many_subscribe(connect: Connector, name: str, stored: Stored) -> None:
    """One stored message per publish, for one durable subscriber as for fifty."""
    publisher = await connect(f"{name}-publisher")
    totals = []
    subscribers: list[RawClient] = []
    for wanted in (1, 50):
        while len(subscribers) < wanted:
            client = await connect(f"{name}-{len(subscribers)}", clean=False)
            await client.subscribe(f"{name}/#", qos=len(subscribers) % 2 + 1)
            subscribers.append(client)
        before = await stored.count("$MQTT_msgs")
        await publisher.deliver_all(f"{name}/a", [b"%d" % index for index in range(10)], 1)
        await publisher.deliver_all(f"{name}/a", [b"%d" % index for index in range(10)], 2)
        totals.append(await stored.count("$MQTT_msgs") - before)
        for client in subscribers:
            for one in await client.messages(20):
                await client.complete(one)
    assert totals == [20, 20]
    for client in subscribers:
        await client.disconnect()


async def test_out_stream_stays_near_empty(connect: Connector, name: str, stored: Stored) -> None:
    """PUBREL records are acknowledged: after 500 QoS 2 deliveries to durable sessions none is left."""
    clients = [await connect(f"{name}-{index}", clean=False) for index in range(5)]
    for client in clients:
        await client.subscribe(name, qos=2)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver_all(name, [b"%d" % index for index in range(100)], 2)
    for client in clients:
        done = 0
        while done < 100:
            packet = await client.packet()
            if getattr(packet, "kind", 0) == PUBREL:
                client.ack(7, packet.packet_id)  # type: ignore[union-attr]  # an Ack
                done += 1
            else:
                client.ack(PUBREC, packet.packet_id)  # type: ignore[union-attr]  # a Publish
    for index in range(5):
        await stored.settled(f"{name}-{index}")


async def test_clean_sessions_leave_nothing_behind(connect: Connector, name: str, stored: Stored) -> None:
    """No record, no consumer, no held publish, after fifty clean sessions have come and gone in every way."""
    streams = ["$MQTT_sess", "$MQTT_msgs", "$MQTT_qos2in", "$MQTT_out", "$MQTT_timers"]

    async def state() -> dict[str, tuple[int, int]]:
        found = {}
        for stream in streams:
            info = await stored.js.stream_info(stream)
            found[stream] = (info.state.messages, info.state.consumer_count)
        return found

    async def still() -> None:
        """The ends of the clients of former tests have been dealt with."""
        first = await state()
        await asyncio.sleep(1.5)
        assert await state() == first

    await connect(f"{name}-stays")
    await until(still)
    before = await state()
    for index in range(50):
        client = await connect(f"{name}-{index}")
        await client.subscribe(f"{name}/#", qos=2)
        client.publish(f"elsewhere/{name}", b"x", 2, packet_id=1)
        if index % 3 or index % 2:
            await client.expect_ack(PUBREC, 1)
        if index % 2:
            client.send(Disconnect())
        else:
            client.drop()
    for index in range(10):
        client = await connect(f"{name}-durable-{index}", clean=False)
        await client.subscribe(f"{name}/#", qos=2)
        client.drop()
        client = await connect(f"{name}-durable-{index}")
        client.drop()

    async def flat() -> None:
        assert await state() == before

    await until(flat)
