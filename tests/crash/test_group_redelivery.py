# SPDX-License-Identifier: Apache-2.0
"""QoS 2 messages of a group whose acknowledgement JetStream has not heard, or has forgotten.

The group's consumer delivers them again after a few seconds here, in place of the 30 seconds that it waits otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest

from mqtt_nats.codec import PINGREQ, Ack, PingResp, Subscription
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory, NatsFactory
from tests.crash.test_shared import Connect, connect
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBCOMP, PUBREL
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.integration.conftest import Stored, until
from tests.integration.test_shared import all_of

__all__ = ["connect"]

TEXT = "$share/group/work"
ACK_WAIT_S = 4.0
DURABLE: dict[str, Any] = {"session_expiry_interval": 3600}


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    """A nats-server of this test's own."""
    return nats_factory()


@pytest.fixture
async def stored(server: NatsServer) -> AsyncIterator[Stored]:
    """A look into JetStream."""
    client = await nats.connect(server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
    yield Stored(client)
    await client.close()


@pytest.fixture
async def proxy(server: NatsServer) -> AsyncIterator[NatsProxy]:
    """Between the gateway that dies and nats-server."""
    between = NatsProxy(server.port, lambda: None)
    await between.start()
    yield between
    await between.close()


@pytest.fixture
async def first(proxy: NatsProxy, gateway_factory: GatewayFactory) -> Gateway:
    """The gateway that dies."""
    gateway = gateway_factory(proxy.url, "--gateway-lease", "60", start=False)
    await asyncio.to_thread(gateway.start)
    return gateway


@pytest.fixture
def second(server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    """A gateway beside it."""
    return gateway_factory(server)


async def soon_again(stored: Stored, ack_wait: float = ACK_WAIT_S) -> list[str]:
    """Have the consumers of groups deliver again soon; their names."""
    names = await stored.consumers("$MQTT_msgs", "share_")
    for name in names:
        config = (await stored.js.consumer_info("$MQTT_msgs", name)).config
        config.ack_wait = ack_wait
        await stored.js.add_consumer("$MQTT_msgs", config)
    return names


async def kill_before_acknowledgement(gateway: Gateway, proxy: NatsProxy, publisher: RawClient5) -> None:
    """Publish a message, and kill the member's gateway when it acknowledges the message to the group's consumer."""
    trap = proxy.set("up", "$JS.ACK.$MQTT_msgs.share_", Action.HOLD)
    await publisher.deliver("work", b"1", 2)
    await asyncio.wait_for(trap.sprung.wait(), 20)
    proxy.deafen()
    gateway.kill()


async def acknowledged(stored: Stored, name: str) -> None:
    """Wait until the group's consumer has nothing left to deliver, not even again."""

    async def all_of_it() -> None:
        info = await stored.js.consumer_info("$MQTT_msgs", name)
        assert not info.num_ack_pending
        assert not info.num_pending

    await until(all_of_it)


async def nobodys(stored: Stored) -> None:
    """Wait until no message belongs to a member."""

    async def none() -> None:
        assert not await stored.count("$MQTT_shared", "$MQTT.shared.assigned.>")

    await until(none, 60)


async def test_a_gateway_dies_before_the_group_has_its_acknowledgement(
    stored: Stored, proxy: NatsProxy, first: Gateway, second: Gateway, connect: Connect
) -> None:
    """It is stored that the message is the member's, who has it whole on another gateway."""
    member = await connect(first.port, "member", **DURABLE)
    await member.subscribe(TEXT, qos=2)
    other = await connect(second.port, "other", **DURABLE)
    (consumer,) = await soon_again(stored)
    await kill_before_acknowledgement(first, proxy, await connect(second.port, "publisher"))
    await other.subscribe(TEXT, qos=2)
    again = await connect(second.port, "member", clean=False, **DURABLE)
    await again.complete(await again.message("work", b"1", qos=2, dup=True))
    await acknowledged(stored, consumer)
    await again.quiet()
    await other.quiet()
    await nobodys(stored)


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "regular"])
async def test_a_gateway_dies_with_a_message_of_two_groups(
    stored: Stored, proxy: NatsProxy, first: Gateway, second: Gateway, connect: Connect, durable: bool
) -> None:
    """Each group's copy is the member's who has it, or goes to another member: each group gets one."""
    member = await connect(first.port, "member", **DURABLE)
    other = await connect(second.port, "other", **(DURABLE if durable else {}))
    texts = [TEXT, "$share/another/work"]
    for number, text in enumerate(texts):
        await member.subscribe5(Subscription(text, 2), subscription_identifier=[number + 1])
    consumers = await soon_again(stored)
    await kill_before_acknowledgement(first, proxy, await connect(second.port, "publisher"))
    for number, text in enumerate(texts):
        await other.subscribe5(Subscription(text, 2), subscription_identifier=[number + 1])
    again = await connect(second.port, "member", clean=False, **DURABLE)
    found = await all_of([again, other], len(texts))
    identifiers = [(one.properties or {})["subscription_identifier"] for each in found for one in each]
    assert sorted(identifiers) == [[1], [2]]
    assert found[0], "it was stored that one is the member's"
    for consumer in consumers:
        await acknowledged(stored, consumer)
    await again.quiet()
    await other.quiet()
    await nobodys(stored)


async def test_a_session_ends_before_the_group_has_its_acknowledgement(
    stored: Stored, proxy: NatsProxy, first: Gateway, second: Gateway, connect: Connect
) -> None:
    """What was a member's whose session ends is nobody else's [MQTT-4.8.2-5] (5.0)."""
    member = await connect(first.port, "member", **DURABLE)
    await member.subscribe(TEXT, qos=2)
    other = await connect(second.port, "other", **DURABLE)
    (consumer,) = await soon_again(stored)
    await kill_before_acknowledgement(first, proxy, await connect(second.port, "publisher"))
    await other.subscribe(TEXT, qos=2)
    await connect(second.port, "member", **DURABLE)
    await nobodys(stored)
    await acknowledged(stored, consumer)
    await other.quiet()


async def test_nats_server_forgets_the_acknowledgement(
    server: NatsServer, stored: Stored, proxy: NatsProxy, first: Gateway, second: Gateway, connect: Connect
) -> None:
    """It was killed so early that it has written the delivery, and not the acknowledgement."""
    member = await connect(first.port, "member", **DURABLE)
    await member.subscribe(TEXT, qos=2)
    other = await connect(second.port, "other", **DURABLE)
    (consumer,) = await soon_again(stored, 12.0)
    (state,) = server.directory.glob(f"store/jetstream/*/streams/*/obs/{consumer}/o.dat")
    publisher = await connect(second.port, "publisher")
    before = state.read_bytes()
    acknowledgement = proxy.set("up", "$JS.ACK.$MQTT_msgs.share_", Action.HOLD)
    removal = proxy.set("up", "$JS.API.STREAM.MSG.DELETE.$MQTT_shared", Action.HOLD)
    await publisher.deliver("work", b"1", 2)
    await asyncio.wait_for(acknowledgement.sprung.wait(), 20)
    await aeventually(lambda: state.read_bytes() != before)
    delivered = state.read_bytes()
    acknowledgement.release()
    await member.complete(await member.message("work", b"1", qos=2))
    await asyncio.wait_for(removal.sprung.wait(), 20)
    proxy.lose()
    server.kill()
    state.write_bytes(delivered)
    server.start()
    await aeventually(lambda: "connected to NATS again" in second.log)
    assert (await stored.js.consumer_info("$MQTT_msgs", consumer)).num_ack_pending == 1, "it has not forgotten it"
    proxy.away = False
    await aeventually(lambda: "connected to NATS again" in first.log)
    await other.subscribe(TEXT, qos=2)
    await acknowledged(stored, consumer)
    await member.quiet()
    await other.quiet()
    await nobodys(stored)


async def test_an_identifier_whose_last_pubrel_is_still_on_record(
    stored: Stored, second: Gateway, connect: Connect
) -> None:
    """The client has answered that. Once more, it would give up the message that has the identifier now."""
    member = await connect(second.port, "member", **DURABLE)
    await member.subscribe(TEXT, qos=2)
    publisher = await connect(second.port, "publisher")
    await publisher.deliver("work", b"1", 2)
    one = await member.message("work", b"1", qos=2)
    await member.complete(one)
    await member.quiet()
    member.drop()
    await nobodys(stored)
    member = await connect(second.port, "member", clean=False, **DURABLE)
    member.write(PINGREQ)
    while not isinstance(packet := await member.packet(), PingResp):
        assert packet == Ack(PUBREL, one.packet_id, 0)
        member.ack(PUBCOMP, one.packet_id)
    await publisher.deliver("work", b"2", 2)
    two = await member.message("work", b"2", qos=2, packet_id=one.packet_id)
    member.drop()
    member = await connect(second.port, "member", clean=False, **DURABLE)
    await member.complete(await member.message("work", b"2", qos=2, dup=True, packet_id=two.packet_id))
    await member.quiet()
    await nobodys(stored)
