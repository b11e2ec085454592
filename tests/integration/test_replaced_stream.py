# SPDX-License-Identifier: Apache-2.0
"""``$MQTT_msgs`` is made anew, or restored from a backup: it counts from a lower sequence again.

Packet identifiers follow from sequences, so a client may know one of them for a message that is no more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeVar

import nats
import orjson
import pytest
from nats.aio.client import Client as NatsClient

from mqtt_nats.codec import Ack, PingReq, PingResp, Publish, Subscription
from mqtt_streams.hashing import name_hash
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.backup import backup, restore
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.integration.conftest import Stored

C = TypeVar("C", bound=RawClient)

PATIENCE = 30.0
MESSAGES = "$MQTT_msgs"


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
def gateway(server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(server)


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[NatsClient]:
    client = await nats.connect(server.url)
    yield client
    await client.close()


async def last(client: NatsClient) -> int:
    """The last sequence of the stream."""
    return int((await client.jetstream().stream_info(MESSAGES)).state.last_seq)


async def v5(client: NatsClient, client_id: str) -> dict[str, Any]:
    """The gateways' part of a session record."""
    message = await client.jetstream().get_last_msg("$MQTT_sess", f"$MQTT.sess.{name_hash(client_id)}")
    found: dict[str, Any] = orjson.loads(message.data or b"")["v5"]
    return found


async def made_anew(client: NatsClient, gateway: Gateway, stopped: bool) -> None:
    """Delete the stream; the gateway, or the next one, makes it again."""
    if stopped:
        assert gateway.term() == 0, gateway.log
    await client.jetstream().delete_stream(MESSAGES)
    if stopped:
        gateway.start()


async def settled(found: C) -> C | None:
    """A client that stays connected; the record of a PUBREL that it has answered may still have been there."""
    try:
        found.send(PingReq())
        while not isinstance(packet := await found.packet(), PingResp):
            assert isinstance(packet, Ack)
            assert packet.kind == PUBREL
            found.ack(PUBCOMP, packet.packet_id)
    except AssertionError:
        found.drop()
        return None
    return found


async def back(gateway: Gateway, client_id: str) -> RawClient:
    """The client once the gateway serves it."""

    async def connected() -> RawClient | None:
        try:
            found = await RawClient.connect(gateway.port, client_id, clean=False)
        except AssertionError:
            return None
        return await settled(found)

    return await aeventually(connected, PATIENCE)


@pytest.mark.parametrize("stopped", [False, True])
async def test_an_identifier_that_the_client_knows_for_another_message(
    client: NatsClient, gateway: Gateway, stopped: bool
) -> None:
    """It is asked to give it up first; otherwise it would take the new message for the old one."""
    async with await RawClient.connect(gateway.port, "durable", clean=False) as durable:
        await durable.subscribe("a", qos=2)
        async with await RawClient.connect(gateway.port, "publisher") as publisher:
            for number in range(3):
                await publisher.deliver("a", b"%d" % number, 2)
        old = await durable.messages(3)
        assert [one.packet_id for one in old] == [2, 3, 4]
    await made_anew(client, gateway, stopped)
    async with await RawClient.connect(gateway.port, "publisher") as publisher:
        await publisher.deliver("a", b"new 0", 2)
        assert await last(client) == 1
        async with await RawClient.connect(gateway.port, "durable", clean=False) as durable:
            await durable.expect_ack(PUBREL, 2, timeout=PATIENCE)
            durable.ack(PUBCOMP, 2)
            await durable.receive("a", b"new 0", packet_id=2, dup=False)
            await publisher.deliver("a", b"new 1", 1)  # at QoS 1 there is nothing to give up
            await durable.receive("a", b"new 1", packet_id=3, qos=1)
            await durable.quiet()
        # What was not asked about before is asked about by the next connection too.
        async with await back(gateway, "durable") as durable:
            await publisher.deliver("a", b"new 2", 2)
            await durable.expect_ack(PUBREL, 4)
            durable.ack(PUBCOMP, 4)
            await durable.receive("a", b"new 2", packet_id=4)
            assert (await v5(client, "durable"))["fresh"] == 1


async def test_an_owed_pubrel_of_another_message(client: NatsClient, gateway: Gateway) -> None:
    """The message that has its sequence now is not the one that the client has."""
    async with await RawClient.connect(gateway.port, "durable", clean=False) as durable:
        await durable.subscribe("a", qos=2)
        async with await RawClient.connect(gateway.port, "publisher") as publisher:
            await publisher.deliver("a", b"old", 2)
        old = await durable.message("a", b"old")
        durable.ack(PUBREC, old.packet_id)
        await durable.released(old.packet_id, answer=False)
    await made_anew(client, gateway, True)
    async with await RawClient.connect(gateway.port, "publisher") as publisher:
        await publisher.deliver("a", b"new", 2)
        async with await RawClient.connect(gateway.port, "durable", clean=False) as durable:
            await durable.expect_ack(PUBREL, old.packet_id, timeout=PATIENCE)
            durable.ack(PUBCOMP, old.packet_id)
            packet = await durable.packet()
            if isinstance(packet, Ack):  # it came before PUBCOMP: another identifier, which is given up first
                assert packet.kind == PUBREL
                assert packet.packet_id != old.packet_id
                durable.ack(PUBCOMP, packet.packet_id)
                packet = await durable.message("a", b"new", packet_id=packet.packet_id, dup=False)
            assert isinstance(packet, Publish)
            assert (packet.payload, packet.dup) == (b"new", False)
            await durable.complete(packet)
            await durable.quiet()


@pytest.mark.parametrize("running", [False, True])
async def test_restored_from_a_backup(
    client: NatsClient, server: NatsServer, gateway_factory: GatewayFactory, gateway: Gateway, running: bool
) -> None:
    """What was pending then comes again, under its identifier; what is new comes, and under one that is free."""
    async with await RawClient.connect(gateway.port, "publisher") as publisher:
        async with await RawClient.connect(gateway.port, "durable", clean=False) as durable:
            await durable.subscribe("a/#", qos=2)
            for number in range(3):
                await publisher.deliver("a/x", b"%d" % number, 2)
            got = await durable.messages(3)
            for one in got[:2]:
                await durable.complete(one)
            await Stored(client).settled("durable", inflight=1)
            saved = await backup(client, MESSAGES)
            for number in range(3, 9):
                await publisher.deliver("a/x", b"%d" % number, 2)
            await durable.messages(6)
            await durable.subscribe("b/#", qos=1)  # begins after the end of the backup
            assert await last(client) == 9
        # A mark of what was last seen is written several times in the time of a lease.
        assert await aeventually(lambda: _marked(client, 9), PATIENCE)
    if not running:
        assert gateway.term() == 0
    await restore(client, saved)
    assert await last(client) == 3
    if not running:
        gateway.start()
    assert await aeventually(lambda: _replaced(client), PATIENCE)
    async with await RawClient.connect(gateway.port, "publisher") as publisher:
        await publisher.deliver("a/x", b"new 3", 2)
        await publisher.deliver("b/x", b"new 4", 1)
        async with await RawClient.connect(gateway.port, "durable", clean=False) as durable:
            again = await durable.message("a/x", b"2", PATIENCE, packet_id=4, dup=True)
            await durable.expect_ack(PUBREL, 5)  # the client knows it for "3"
            durable.ack(PUBCOMP, 5)
            new = await durable.message("a/x", b"new 3", packet_id=5, dup=False)
            other = await durable.message("b/x", b"new 4", packet_id=6, qos=1)
            for one in (again, new):
                durable.ack(PUBREC, one.packet_id)
            durable.ack(PUBACK, other.packet_id)
            await durable.released(again.packet_id)
            await durable.released(new.packet_id)
            await publisher.deliver("b/x", b"end", 1)
            await durable.receive("b/x", b"end")
            await durable.quiet()
            assert (await v5(client, "durable"))["start"]["b.>"] == 4
            for info in await Stored(client).session_consumers("durable"):
                assert info.delivered is not None
                # Readers have brought all; the reader of a gateway that runs has first to be made again.
                assert running or info.delivered.consumer_seq == 0


async def _marked(client: NatsClient, sequence: int) -> bool:
    message = await client.jetstream().get_last_msg("$MQTT_shared", "$MQTT.shared.generation")
    return bool(orjson.loads(message.data or b"")["last"] >= sequence)


async def _replaced(client: NatsClient) -> bool:
    message = await client.jetstream().get_last_msg("$MQTT_shared", "$MQTT.shared.generation")
    return bool(orjson.loads(message.data or b"")["floor"] == 3)


async def test_connected_clients(client: NatsClient, gateway: Gateway) -> None:
    """Their connections end; positions in shared subscriptions, too, do not wait for what may never come."""
    async with (
        await RawClient.connect(gateway.port, "durable", clean=False) as durable,
        await RawClient.connect(gateway.port, "publisher") as publisher,
    ):
        await durable.subscribe("a", qos=2)
        saved = await backup(client, MESSAGES)
        for number in range(5):
            await publisher.deliver("a", b"%d" % number, 2)
        for one in await durable.messages(5):
            await durable.complete(one)
        await durable.quiet()
        async with await RawClient5.connect5(gateway.port, "member", session_expiry_interval=600) as member:
            assert await member.subscribe5(Subscription("$share/group/a", 1)) == (1,)
            assert (await v5(client, "member"))["shared"]["$share/group/a"]["start"] == 6
            await restore(client, saved)
            await durable.expect_closed(PATIENCE)

        async def rejoined() -> RawClient5 | None:
            try:
                member = await RawClient5.connect5(gateway.port, "member", clean=False, session_expiry_interval=600)
            except AssertionError:
                return None
            return await settled(member)

        async with await back(gateway, "durable") as durable, await aeventually(rejoined, PATIENCE) as member:
            await publisher.deliver("a", b"new", 1)
            await durable.receive("a", b"new", qos=1, dup=False)
            await member.receive("a", b"new", qos=1)


async def test_what_a_limit_has_pushed_out(client: NatsClient, gateway: Gateway) -> None:
    """Messages that are removed while they wait, or are in flight, hold up nothing that comes after them."""
    js = client.jetstream()
    async with (
        await RawClient.connect(gateway.port, "publisher") as publisher,
        await RawClient.connect(gateway.port, "durable", clean=False) as durable,
    ):
        await durable.subscribe("a/#", "b/#", qos=2)
        await durable.unsubscribe("b/#")
        await publisher.deliver_all("a/x", [b"%d" % number for number in range(300)], 1)
        first = (await durable.messages(100))[0]
        config = (await js.stream_info(MESSAGES)).config
        config.max_msgs = 20
        await js.update_stream(config)
        assert (await js.stream_info(MESSAGES)).state.first_seq == 281
        durable.drop()
        async with await RawClient.connect(gateway.port, "durable", clean=False) as durable:
            seen: list[bytes] = []
            while not seen or seen[-1] != b"299":
                (one,) = await durable.messages(1, PATIENCE)
                await durable.complete(one)
                seen.append(one.payload)
            assert seen[-20:] == [b"%d" % number for number in range(280, 300)]
            assert first.payload not in seen  # it is gone
            await publisher.deliver("a/x", b"end", 2)
            await durable.receive("a/x", b"end")
