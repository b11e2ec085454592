# SPDX-License-Identifier: Apache-2.0
"""A client is about to join a group when its gateway loses NATS."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mqtt_nats.codec import Suback, Subscribe, Subscription
from tests.chaos.points.proxy import Action, NatsProxy
from tests.harness.gateway import Gateway
from tests.integration.conftest import Connector5
from tests.integration.test_late_stores import find_again, lose

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
