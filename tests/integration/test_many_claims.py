# SPDX-License-Identifier: Apache-2.0
"""Connections that fight over sessions leave nothing behind that others would stumble over, in either build."""

from __future__ import annotations

import asyncio
import contextlib

from tests.harness.gateway import Gateway
from tests.harness.rawclient import RawClient
from tests.integration.conftest import Connector

CONTENDERS = 40
SESSIONS = 3
TURNS = 4


async def contend(gateway: Gateway, client_id: str) -> None:
    """Claim a session again and again; somebody else claims it meanwhile."""
    for _ in range(TURNS):
        with contextlib.suppress(AssertionError, ConnectionError):
            client = await RawClient.connect(gateway.port, client_id, clean=False)
            await asyncio.sleep(0)
            client.drop()


async def test_others_are_served_as_ever(connect: Connector, name: str, gateway: Gateway) -> None:
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"retained", 1, retain=True)
    await asyncio.gather(*(contend(gateway, f"{name}-{at % SESSIONS}") for at in range(CONTENDERS)))
    for number in range(5):
        client = await connect(f"{name}-after-{number}", clean=False)
        await client.subscribe(name, qos=1)
        retained = await client.message(name, b"retained", qos=1, retain=True)
        await client.complete(retained)
        await publisher.deliver(name, b"%d" % number, 1)
        await client.complete(await client.message(name, b"%d" % number, qos=1))
        await client.unsubscribe(name)
    await publisher.deliver(name, b"", 1, retain=True)
