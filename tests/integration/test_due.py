# SPDX-License-Identifier: Apache-2.0
"""What fell due while no gateway looked, and the client is there before one does."""

from __future__ import annotations

import orjson
import pytest

from mqtt_nats.codec import Subscription
from mqtt_streams.hashing import name_hash
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.integration.conftest import Connector5, Stored, until
from tests.integration.test_wills5 import watcher, will_of

PAUSE = "$JS.API.CONSUMER.PAUSE.$MQTT_timers.gateways"


CONFIG = """
no_auth_user: all
authorization { users [
  { user: all, password: all }
  { user: gateway, password: secret, permissions { subscribe { deny: "$JS.EVENT.ADVISORY.CONSUMER.PAUSE.>" } } }
] }
"""
"""The gateway does not hear of a pause: it would end it."""


@pytest.fixture
def nats_server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory(config=CONFIG)


@pytest.fixture
def gateway(nats_server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(nats_server.url.replace("//", "//gateway:secret@"))


@pytest.fixture
async def nobody_looks(stored: Stored, gateway: Gateway) -> None:
    """Timers that have fired are not delivered, as when no gateway runs."""
    body = orjson.dumps({"pause_until": "2100-01-01T00:00:00Z"})

    async def paused() -> None:  # not at once while the gateway makes the consumer
        answer = orjson.loads((await stored.nats.request(PAUSE, body)).data)
        assert answer["paused"], gateway.log

    await until(paused)


async def fired(stored: Stored, kind: str) -> None:
    """A timer has fired, and is there still."""

    async def one() -> None:
        assert await stored.count("$MQTT_timers", f"$MQTT.timers.fired.{kind}") == 1

    await until(one)


@pytest.mark.usefixtures("nobody_looks")
@pytest.mark.parametrize("qos", [0, 1])
async def test_will(connect5: Connector5, name: str, stored: Stored, qos: int) -> None:
    """[MQTT-3.1.3-9] (5.0): the session goes on, but after the delay."""
    watch = await watcher(connect5, name)
    client = await connect5(name, session_expiry_interval=300, will=will_of(name, 1, qos))
    client.drop()
    await fired(stored, f"will.*.{name_hash(name)}")
    again = await connect5(name, clean=False, session_expiry_interval=300)
    assert again.session_present
    await watch.receive(f"{name}/will", b"farewell", qos=qos)
    await watch.quiet()


@pytest.mark.usefixtures("nobody_looks")
async def test_session(connect5: Connector5, name: str, stored: Stored) -> None:
    """Its time is over [MQTT-3.1.2-23] (5.0)."""
    client = await connect5(name, session_expiry_interval=1)
    await client.subscribe5(Subscription(f"{name}/x", 1))
    client.drop()
    await fired(stored, f"expiry.{name_hash(name)}")
    again = await connect5(name, clean=False, session_expiry_interval=300)
    assert not again.session_present
