# SPDX-License-Identifier: Apache-2.0
"""Who joins a group while its gateway loses NATS, and what waits for a member that joins."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mqtt_nats.codec import Suback, Subscribe, Subscription
from mqtt_streams.shared import CONSUMER_PREFIX, group_hash
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.integration.conftest import Connector5, Stored
from tests.integration.test_late_stores import find_again, lose
from tests.integration.test_shared import all_of

OPTIONS: dict[str, Any] = {"session_expiry_interval": 300}


@pytest.mark.parametrize("durable", [False, True], ids=["regular", "durable"])
async def test_nats_is_lost_while_a_client_joins(
    connect5: Connector5, name: str, gateway: Gateway, late: Gateway, proxy: NatsProxy, durable: bool
) -> None:
    """The gateway comes back, with the members that it had and the one that joins."""
    options = OPTIONS if durable else {}
    member = await connect5(f"{name}-member", to=late, **options)
    await member.subscribe(f"$share/other/{name}", qos=1)
    joining = await connect5(f"{name}-joining", to=late, **options)
    trap = proxy.set("answer", "$MQTT.shared.members.", Action.DROP)
    joining.send(Subscribe(7, (Subscription(f"$share/group/{name}", 1),)))
    await asyncio.wait_for(trap.sprung.wait(), 10)
    await lose(proxy, late)
    await find_again(proxy, late, f"{name}-probe")
    await joining.expect(Suback, timeout=30)
    publisher = await connect5(f"{name}-publisher")
    for number, qos in enumerate((0, 1, 0, 1)):
        await publisher.deliver(name, b"%d" % number, qos)
        for client in (member, joining):
            await client.receive(name, b"%d" % number)


async def test_what_a_group_has_waiting_for_a_later_gateway(
    connect5: Connector5,
    name: str,
    stored: Stored,
    gateway: Gateway,
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
) -> None:
    """All of it may be somebody's: the member looks at no more than its client takes, and keeps the order."""
    text = f"$share/group/{name}"
    absent = await connect5(f"{name}-absent", **OPTIONS)
    await absent.subscribe(text, qos=2)
    absent.drop()
    publisher = await connect5(f"{name}-publisher")
    payloads = [b"%d" % number for number in range(500)]
    await publisher.deliver_all(name, payloads, 2)
    later = await asyncio.to_thread(gateway_factory, nats_server)
    member = await connect5(f"{name}-member", to=later, receive_maximum=20)
    await member.subscribe(text, qos=2)
    (found,) = await all_of([member], len(payloads))
    assert [one.payload for one in found] == payloads
    info = await stored.js.consumer_info("$MQTT_msgs", CONSUMER_PREFIX + group_hash("group", name))
    assert info.delivered is not None
    assert info.delivered.consumer_seq < 2 * len(payloads)
