# SPDX-License-Identifier: Apache-2.0
"""Consumers are set by whoever leaves a session, and by nobody else later."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mqtt_streams.gateway_subjects import LEFT
from mqtt_streams.hashing import name_hash
from tests.chaos.points.proxy import Action, NatsProxy
from tests.harness.gateway import Gateway
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector5, Stored, position

WINDOW = 5
PAYLOADS = [b"%d" % number for number in range(4 * WINDOW)]
OPTIONS: dict[str, Any] = {"clean": False, "session_expiry_interval": 300, "receive_maximum": WINDOW}
RESET = "$JS.API.CONSUMER.RESET.$MQTT_msgs."


async def take_all(client: RawClient5, stored: Stored, name: str, payloads: list[bytes], again: int) -> None:
    """Each comes once; the first ``again`` of them were sent before."""
    for number, payload in enumerate(payloads):
        (one,) = await client.messages(1)
        assert (one.payload, one.dup) == (payload, number < again)
        await client.complete(one)
    await client.quiet()
    await stored.settled(name)


def resets_of(client_id: str) -> str:
    """How the subjects begin on which consumers of a session are set."""
    return f"{RESET}{name_hash(client_id)}_"


async def over(stored: Stored, gateway: str, name: str) -> None:
    """Wait until a gateway has left a session, and sets none of its consumers any more."""
    await stored.nats.request(LEFT + gateway, name.encode(), timeout=30)


@pytest.mark.long
@pytest.mark.parametrize("qos", [1, 2])
async def test_a_gateway_that_has_left_a_session_sets_its_consumers_late(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy, qos: int
) -> None:
    """Whoever goes on does not wait for that: the position is in order. What it has completed does not come again."""
    client = await connect5(name, to=late, **OPTIONS)
    await client.subscribe(name, qos=qos)
    at = await stored.live(name)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver_all(name, PAYLOADS, qos)
    await client.messages(WINDOW)
    trap = proxy.set("up", resets_of(name), Action.HOLD)
    client.drop()
    await asyncio.wait_for(trap.sprung.wait(), 30)
    assert (await position(stored.js, name)).clean
    client = await connect5(name, to=gateway, **OPTIONS)
    await take_all(client, stored, name, PAYLOADS, WINDOW)
    trap.release()
    await over(stored, at.gateway, name)
    await client.quiet()
    client.drop()
    await stored.detached(name)
    client = await connect5(name, to=gateway, **OPTIONS)
    await client.quiet()
