# SPDX-License-Identifier: Apache-2.0
"""A session is removed by a gateway that is held up, and the client has a new one meanwhile."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from mqtt_nats.codec import Publish
from mqtt_streams.hashing import subject_token
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBCOMP, PUBREC, PUBREL
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector5, Stored, answers, position, until

OPTIONS: dict[str, Any] = {"session_expiry_interval": 300}


async def half_way(client: RawClient5, publisher: RawClient5, name: str) -> int:
    """Leave a session with a publish that is held, a PUBREL that is owed and its identifier, which is returned."""
    await client.subscribe(name, qos=2)
    await publisher.deliver(name, b"1", 2)
    (one,) = await client.messages(1)
    client.ack(PUBREC, one.packet_id)
    await client.expect_ack(PUBREL, one.packet_id)
    client.publish5(f"{name}/own", b"own", 2, packet_id=77)
    await client.expect_ack(PUBREC, 77)
    return one.packet_id


async def owed(stored: Stored, name: str, identifier: int) -> None:
    """Check that a PUBREL is owed by a record, or by the position of a session whose client has gone."""
    at = await position(stored.js, name)
    assert (await stored.traces(name)).get("pubrels") or (at.clean and identifier in at.released)


@pytest.mark.parametrize("where", ["STREAM.MSG.GET.$MQTT_qos2in", "STREAM.PURGE.$MQTT_qos2in"])
async def test_an_expired_session_is_removed_late(
    name: str,
    stored: Stored,
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
    late: Gateway,
    proxy: NatsProxy,
    where: str,
) -> None:
    """What the new session has held and owes stays. Only the one gateway is there to end the former one."""
    client = await RawClient5.connect5(late.port, name, clean=False, session_expiry_interval=1)
    async with await RawClient5.connect5(late.port, f"{name}-publisher") as publisher:
        await half_way(client, publisher, name)
        trap = proxy.set("up", f"$JS.API.{where}", Action.HOLD)
        client.drop()
        await asyncio.wait_for(trap.sprung.wait(), 30)
    other = gateway_factory(nats_server, start=False)
    await asyncio.to_thread(other.start)
    async with (
        await RawClient5.connect5(other.port, f"{name}-publisher") as publisher,
        await RawClient5.connect5(other.port, f"{name}-own") as own,
    ):
        await own.subscribe(f"{name}/own", qos=2)
        client = await RawClient5.connect5(other.port, name, clean=False, **OPTIONS)
        assert not client.session_present
        identifier = await half_way(client, publisher, name)
        before = await stored.traces(name)
        assert before["held"] == 1
        assert before.get("pubrels") or identifier in (await position(stored.js, name)).released
        trap.release()
        await answers(late, f"{name}-probe")
        client.drop()
        async with await RawClient5.connect5(other.port, name, clean=False, **OPTIONS) as client:
            assert client.session_present
            await client.expect_ack(PUBREL, identifier)
            client.ack(PUBCOMP, identifier)
            client.ack(PUBREL, 77)
            await client.expect_ack(PUBCOMP, 77)
            await own.message(f"{name}/own", b"own")
            await publisher.deliver(name, b"2", 2)
            await client.complete(await client.message(name, b"2"))
    await asyncio.to_thread(other.term)


@pytest.mark.parametrize("clean", [True, False], ids=["clean start", "resume"])
async def test_a_clean_start_that_nobody_has_finished(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy, clean: bool
) -> None:
    """Its gateway dies before it has removed the former session: the client was not answered, and connects again."""
    client = await connect5(name, clean=False, **OPTIONS)
    publisher = await connect5(f"{name}-publisher")
    identifier = await half_way(client, publisher, name)
    client.drop()
    await until(partial(owed, stored, name, identifier))  # by the former session
    own_records = subject_token(name).encode()  # the gateway may end other sessions meanwhile
    trap = proxy.set("up", "$JS.API.STREAM.MSG.GET.$MQTT_qos2in", Action.HOLD, part=own_records)
    connecting = asyncio.create_task(connect5(name, to=late, **OPTIONS))
    await asyncio.wait_for(trap.sprung.wait(), 30)
    proxy.crash()
    await asyncio.to_thread(late.kill)
    with pytest.raises((AssertionError, ConnectionError)):
        await connecting
    client = await connect5(name, clean=clean, **OPTIONS)
    await client.quiet()
    own = await connect5(f"{name}-own")
    await own.subscribe(f"{name}/own", qos=2)
    client.publish5(f"{name}/own", b"another", 2, packet_id=77)
    await client.expect_ack(PUBREC, 77)
    client.ack(PUBREL, 77)
    await client.expect_ack(PUBCOMP, 77)
    await own.expect(Publish, payload=b"another")
    client.drop()
    client = await connect5(name, clean=False, **OPTIONS)
    assert client.session_present
    await client.quiet()
    left = await stored.traces(name)
    assert left.pop("pubrel consumer", None) is None or not clean, "it may be the present session's"
    assert left == {"record": 1}
