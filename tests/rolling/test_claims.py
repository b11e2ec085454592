# SPDX-License-Identifier: Apache-2.0
"""Gateways hear the claims that concern them only, unless nats-server's listener is there."""

from __future__ import annotations

import pytest

from mqtt_nats.sessions.takeover import SIGNALS
from mqtt_streams.hashing import name_hash
from mqtt_streams.sessions import claim_bucket, claims_of
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.monitor import Monitor
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually, free_port


class Fleet:
    """A nats-server with its MQTT listener, and gateways."""

    def __init__(self, server: NatsServer, monitor: Monitor, start: GatewayFactory) -> None:
        self.server, self._monitor, self._start = server, monitor, start

    def gateway(self) -> Gateway:
        """Start a gateway."""
        return self._start(self.server, module="tests.rolling.prompt")

    def heard(self) -> list[str]:
        """Subjects of claims that gateways and listeners have subscribed."""
        return [one for one in self._monitor.subjects() if one.startswith("$MQTT.JSA.") and ".SP." in one]

    async def apart(self) -> None:
        """Wait until nobody hears all claims."""
        await aeventually(lambda: SIGNALS.decode() not in self.heard(), 30.0)


@pytest.fixture
def fleet(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> Fleet:
    port = free_port()
    server = nats_factory(config=f'http: "127.0.0.1:{port}"', mqtt=True)
    return Fleet(server, Monitor(port), gateway_factory)


def subject(client_id: str) -> str:
    """The subjects of the claims of a session's bucket."""
    return claims_of(claim_bucket(name_hash(client_id)))


async def test_claims_of_gateways(fleet: Fleet) -> None:
    one, two = fleet.gateway(), fleet.gateway()
    await fleet.apart()
    async with await RawClient.connect(one.port, "moves") as former:
        assert fleet.heard().count(subject("moves")) == 1
        async with await RawClient.connect(two.port, "moves"):
            await former.expect_closed()
            # The former gateway goes on hearing the bucket: its next session there costs no subscription.
            await aeventually(lambda: fleet.heard().count(subject("moves")) == 2)
            assert subject("stays away") not in fleet.heard()


async def test_claims_of_the_listener_of_nats_server(fleet: Fleet) -> None:
    one = fleet.gateway()
    await fleet.apart()
    async with (
        await RawClient.connect(one.port, "moves") as former,
        await RawClient.connect(fleet.server.mqtt_port, "moves") as latter,
    ):
        await former.expect_closed()
        async with await RawClient.connect(one.port, "moves"):
            await latter.expect_closed()
