# SPDX-License-Identifier: Apache-2.0
"""Held records go one by one where the session may have an owner of whom the gateway has not heard."""

from __future__ import annotations

from collections.abc import Iterable

from nats.aio.subscription import Subscription

from mqtt_nats.client.client import Client
from tests.base.support import PATIENCE, running
from tests.harness.fence import fence
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.waiting import aeventually
from tests.integration.conftest import Stored


async def publish(client: RawClient, topic: str, stored: Stored, asked: Subscription) -> int:
    """Thirty whole exchanges at once; returns how many requests removed records together."""
    former = asked.pending_msgs
    ids = [client.publish(topic, b"", 2) for _ in range(30)]
    await client.expect_ack(PUBREC, *ids)
    client.ack(PUBREL, *ids)
    await client.expect_ack(PUBCOMP, *ids)
    await fence(stored.nats)
    return asked.pending_msgs - former


async def test_until_the_owner_is_looked_up(nats_server: NatsServer, name: str, stored: Stored) -> None:
    """From the loss of NATS until the session's record was read."""
    asked = await stored.nats.subscribe("$JS.API.STREAM.PURGE.$MQTT_qos2in")
    await fence(stored.nats)
    with running(nats_server.url) as inside:
        account = inside.gateway.account
        assert account is not None
        client = await RawClient.connect(inside.ports[0], name, clean=False)

        async def together() -> bool:
            return await publish(client, name, stored, asked) > 0

        await aeventually(together, PATIENCE, what="records that go together")
        other = inside.client(name)
        inside.call(lambda: account.registry.unchecked.add(other))
        for _ in range(20):
            assert await publish(client, name, stored, asked) == 0
        inside.call(lambda: account.registry.unchecked.discard(other))
        await aeventually(together, PATIENCE, what="records that go together")
        assert await stored.count("$MQTT_qos2in", f"$MQTT.qos2.in.{name}.*") == 0
        doubted: list[Client] = []

        class Noted(set[Client]):
            def update(self, *others: Iterable[Client]) -> None:
                super().update(*others)
                doubted.extend(self)

        def cut() -> None:
            account.registry.unchecked = Noted()
            wire = account.services.nats.link.wire
            assert wire is not None
            wire.transport.abort()

        inside.call(cut)
        await aeventually(lambda: inside.call(lambda: doubted == [other] and not account.registry.unchecked), PATIENCE)
        await aeventually(together, PATIENCE, what="records that go together")
        client.drop()
