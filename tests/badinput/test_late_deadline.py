# SPDX-License-Identifier: Apache-2.0
"""A gateway that was cut off sets the deadline of a session that has moved on meanwhile."""

import pytest

from mqtt_streams.hashing import name_hash
from tests.badinput.test_partial_outage import cut
from tests.conftest import GatewayFactory
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.proxy import Proxy
from tests.harness.raw import Raw, connect
from tests.harness.waiting import aeventually
from tests.integration.conftest import Stored, stored  # noqa: F401 - a fixture

pytestmark = pytest.mark.anyio

EXPIRY = 8
"""Seconds: more than it takes a gateway to come back."""


@pytest.mark.long
@pytest.mark.parametrize("connected", [False, True])
async def test_the_deadline_of_the_later_owner_counts(
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
    stored: Stored,  # noqa: F811
    connected: bool,
) -> None:
    env = {"MQTT_NATS_SESSION_EXPIRY_INTERVAL": str(EXPIRY)}
    client_id = f"late-{connected}"
    with Proxy(nats_server.port) as proxy:
        behind = gateway_factory(proxy.url, env=env)
        beside = gateway_factory(nats_server, env=env)
        with Raw(behind.port) as former, Raw(beside.port) as owner:
            former.send(connect(client_id, clean=False))
            former.expect(raw.CONNACK)
            cut(proxy, behind)
            owner.send(connect(client_id, clean=False))
            assert owner.expect(raw.CONNACK).body == b"\1\0"
            former.close()
            if not connected:
                owner.close()
                timers = f"$MQTT.timers.expiry.{name_hash(client_id)}"

                async def scheduled() -> bool:
                    return await stored.count("$MQTT_timers", timers) == 1

                assert await aeventually(scheduled)
            proxy.restore()
            assert await aeventually(lambda: "connected to NATS again" in behind.log, 40.0)
            if connected:
                owner.ping()
                owner.close()
        await stored.gone(client_id, 45.0)
