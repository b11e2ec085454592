# SPDX-License-Identifier: Apache-2.0
"""QoS 2 messages that are removed from the stream while their client has them half-way, and is away."""

import pytest

from mqtt_streams.hashing import name_hash
from tests.conftest import GatewayFactory
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBCOMP, PUBREL
from tests.integration.conftest import Connector, Connector5, Stored, until


async def notes(stored: Stored, name: str) -> int:
    """How many notes and assignments a client has."""
    return await stored.count("$MQTT_shared", f"$MQTT.shared.assigned.{name_hash(name)}.*")


async def noted(stored: Stored, name: str, count: int) -> None:
    """Wait until it has so many."""

    async def reached() -> None:
        assert await notes(stored, name) == count

    await until(reached)


async def test_its_identifier_is_asked_for(connect: Connector, name: str, stored: Stored) -> None:
    """The client knows it as received: under the same identifier it would drop another message."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=2)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver_all(name, [b"lost", b"kept"], 2)
    last = await stored.last_sequence()
    lost = await client.message(name, b"lost", qos=2)
    kept = await client.message(name, b"kept", qos=2)
    client.drop()
    await stored.detached(name)
    await noted(stored, name, 1)
    await stored.js.delete_msg("$MQTT_msgs", last - 1)
    client = await connect(name, clean=False)
    await client.message(name, b"kept", qos=2, packet_id=kept.packet_id, dup=True)
    await client.expect_ack(PUBREL, lost.packet_id)
    client.ack(PUBCOMP, lost.packet_id)
    await client.complete(kept)
    await client.quiet()
    await stored.settled(name)
    await client.disconnect()
    await noted(stored, name, 0)
    client = await connect(name, clean=False)
    await client.quiet()


async def test_an_old_note_does_no_harm(
    connect: Connector,
    name: str,
    stored: Stored,
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
) -> None:
    """A gateway that is killed leaves the note of the connection before, whose message is complete by now."""
    near = gateway_factory(nats_server)
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=2)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"one", 2)
    one = await client.message(name, b"one", qos=2)
    client.drop()
    await stored.detached(name)
    await noted(stored, name, 1)
    client = await connect(name, clean=False, to=near)
    await client.receive(name, b"one", packet_id=one.packet_id, dup=True)
    await client.quiet()
    await stored.settled(name)
    near.kill()
    assert await notes(stored, name) == 1
    client = await connect(name, clean=False)
    await client.quiet()
    # The note goes with the session.
    client.drop()
    await connect(name, clean=True)
    await noted(stored, name, 0)


@pytest.mark.parametrize("answered", [True, False])
async def test_of_a_shared_subscription(connect5: Connector5, name: str, stored: Stored, answered: bool) -> None:
    """[MQTT-4.8.2-5] (5.0): the assignment names the identifier; it stays until the client has let that go."""
    client = await connect5(name, session_expiry_interval=600)
    await client.subscribe(f"$share/{name}/{name}", qos=2)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver(name, b"lost", 2)
    lost = await client.message(name, b"lost", qos=2)
    await noted(stored, name, 1)
    client.drop()
    await stored.js.delete_msg("$MQTT_msgs", await stored.last_sequence())
    client = await connect5(name, clean=False, session_expiry_interval=600)
    await client.expect_ack(PUBREL, lost.packet_id)
    if answered:
        client.ack(PUBCOMP, lost.packet_id)
        await noted(stored, name, 0)
    await publisher.deliver(name, b"next", 2)
    following = await client.message(name, b"next", qos=2, dup=False)
    assert answered or following.packet_id != lost.packet_id
    await client.complete(following)
    await client.quiet()
    await noted(stored, name, 0 if answered else 1)
