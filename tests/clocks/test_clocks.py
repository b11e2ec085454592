# SPDX-License-Identifier: Apache-2.0
"""Clocks that differ by minutes between gateways: what has a time keeps nats-server's."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime

import nats
import pytest
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError

from mqtt_nats.base.server_clock import NatsTime
from mqtt_nats.codec import Subscription, Will
from mqtt_streams.hashing import name_hash
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.proxy import Proxy
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.lifecycle.watchful import OF, WATCHFUL

SHIFT = 400.0
"""Seconds: more than anything that a test waits for."""

PATIENCE = 30.0
CLOSE = 60.0
"""A time in the tests is right when it is wrong by less than this (seconds)."""

BOTH = pytest.mark.parametrize("shift", [-SHIFT, SHIFT], ids=["behind", "ahead"])

SHIFTED = "tests.clocks.shifted"

Run = Callable[..., Gateway]


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
async def js(server: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(server.url)
    yield client.jetstream()
    await client.close()


@pytest.fixture
def run(server: NatsServer, gateway_factory: GatewayFactory) -> Run:
    """Start a gateway with a wrong clock. Of one that ``dies`` the lease is short; the others find that soon."""

    def start(shift: float, url: str = "", *, dies: bool = False) -> Gateway:
        env = {"CLOCK_SHIFT": str(shift), OF: SHIFTED}
        module = SHIFTED if dies else WATCHFUL
        return gateway_factory(url or server, "--gateway-lease", "2", env=env, module=module)

    return start


async def due(js: JetStreamContext, subject: str) -> float:
    """Seconds until a timer is due."""

    async def scheduled() -> str:
        try:
            message = await js.get_last_msg("$MQTT_timers", subject)
        except NotFoundError:
            return ""
        return str((message.headers or {})["Nats-Schedule"])

    at = (await aeventually(scheduled, PATIENCE)).removeprefix("@at ")
    return datetime.fromisoformat(at).timestamp() - time.time()


async def there(js: JetStreamContext, client_id: str) -> bool:
    """Whether a session record is there."""
    try:
        await js.get_last_msg("$MQTT_sess", f"$MQTT.sess.{name_hash(client_id)}")
    except NotFoundError:
        return False
    return True


@BOTH
async def test_sessions_end_in_time(run: Run, js: JetStreamContext, shift: float) -> None:
    gateway = run(shift)
    assert (
        f"the clock of this machine is 400 s {'ahead of' if shift > 0 else 'behind'} the clock of nats-server"
        in gateway.log
    )
    long = await RawClient5.connect5(gateway.port, "long", session_expiry_interval=300)
    short = await RawClient5.connect5(gateway.port, "short", session_expiry_interval=1)
    await long.disconnect5()
    await short.disconnect5()
    assert abs(await due(js, f"$MQTT.timers.expiry.{name_hash('long')}") - 300) < CLOSE

    async def ended() -> bool:
        return not await there(js, "short")

    assert await aeventually(ended, PATIENCE)
    async with await RawClient5.connect5(gateway.port, "long", clean=False, session_expiry_interval=300) as long:
        assert long.session_present


@BOTH
async def test_sessions_of_a_dead_gateway_end_in_time(run: Run, js: JetStreamContext, shift: float) -> None:
    dead, other = run(shift, dies=True), run(-shift)
    async with await RawClient5.connect5(dead.port, "long", session_expiry_interval=300):
        dead.kill()
    assert abs(await due(js, f"$MQTT.timers.expiry.{name_hash('long')}") - 300) < CLOSE
    async with await RawClient5.connect5(other.port, "long", clean=False) as long:
        assert long.session_present


@BOTH
async def test_delayed_wills(run: Run, js: JetStreamContext, shift: float) -> None:
    gateway, other = run(shift), run(-shift)
    async with await RawClient.connect(other.port, "watcher") as watcher:
        await watcher.subscribe("wills/#", qos=1)
        for delay in (1, 200):
            will = Will(f"wills/{delay}", b"x", 1, False, {"will_delay_interval": delay})
            client = await RawClient5.connect5(gateway.port, f"d{delay}", session_expiry_interval=1000, will=will)
            client.drop()
        (first,) = await watcher.messages(1, PATIENCE)
        await watcher.complete(first)
        assert first.key.endswith(b"wills/1")
        subjects = (await js.stream_info("$MQTT_timers", subjects_filter="$MQTT.timers.will.>")).state.subjects or {}
        (subject,) = [one for one in subjects if one.endswith(name_hash("d200"))]
        assert abs(await due(js, subject) - 200) < CLOSE


@BOTH
async def test_message_expiry(run: Run, shift: float) -> None:
    """Stored, retained and held messages are as old as nats-server says."""
    one, other = run(shift), run(-shift)
    async with await RawClient5.connect5(other.port, "durable", session_expiry_interval=600) as durable:
        await durable.subscribe5(Subscription("a/#", 2))
    async with await RawClient5.connect5(one.port, "publisher", session_expiry_interval=600) as publisher:
        publisher.publish5("a/1", b"stored", 1, packet_id=1, message_expiry_interval=200)
        publisher.publish5("a/2", b"held", 2, packet_id=2, message_expiry_interval=200)
        publisher.publish5("b", b"retained", 1, packet_id=3, retain=True, message_expiry_interval=200)
        await publisher.expect_ack(4, 1)
        await publisher.expect_ack(5, 2)
        await publisher.expect_ack(4, 3)
    async with await RawClient5.connect5(
        other.port, "publisher", clean=False, session_expiry_interval=600
    ) as publisher:
        publisher.ack(6, 2)
        await publisher.expect_ack(7, 2)
    for gateway in (other, one):
        async with await RawClient5.connect5(
            gateway.port, "durable", clean=False, session_expiry_interval=600
        ) as durable:
            got = await durable.messages(2, PATIENCE)
            assert [publish.payload for publish in got] == [b"stored", b"held"]
        async with await RawClient5.connect5(gateway.port, "reader") as reader:
            await reader.subscribe("b", qos=1)
            got += await reader.messages(1, PATIENCE)
        for publish in got:
            left = (publish.properties or {})["message_expiry_interval"]
            assert 200 - CLOSE < left <= 200


@BOTH
async def test_what_was_missed_is_read_from_when_it_was_missed(run: Run, server: NatsServer, shift: float) -> None:
    """By nats-server's clock: else a gateway that is ahead would read nothing, one that is behind too much."""
    with Proxy(server.port) as proxy:
        behind, beside = run(shift, proxy.url), run(0.0)
        async with (
            await RawClient.connect(behind.port, "subscriber") as subscriber,
            await RawClient.connect(beside.port, "publisher") as publisher,
        ):
            await subscriber.subscribe("a", qos=1)
            await publisher.deliver("a", b"0", 1)
            await subscriber.receive("a", b"0")
            proxy.cut()
            assert await aeventually(lambda: "connection to NATS is lost" in behind.log, PATIENCE)
            for number in range(1, 4):
                await publisher.deliver("a", b"%d" % number, 1)
            proxy.restore()
            for number in range(1, 4):
                (got,) = await subscriber.messages(1, PATIENCE)
                assert got.payload == b"%d" % number
                await subscriber.complete(got)


def test_what_is_more_exact_counts() -> None:
    clock = NatsTime()
    clock.learn(1000.0, 100.0, 100.1)
    assert clock.start == pytest.approx(899.95)
    clock.learn(1005.0, 100.0, 110.0)  # the answer was late
    assert clock.start == pytest.approx(899.95)
    clock.learn(1010.0, 110.0, 110.1)
    assert clock.start == pytest.approx(899.95)
    clock.learn(1020.0, 1020.0, 1022.0)  # the clock there was set meanwhile: less exact, and yet it must be so
    assert clock.start == pytest.approx(-1.0)
