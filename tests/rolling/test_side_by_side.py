# SPDX-License-Identifier: Apache-2.0
"""Gateways of this version, and one of the next version, serve the same sessions in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import nats
import orjson
import pytest
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError

from mqtt_nats.codec import Subscription, Will
from mqtt_streams.hashing import name_hash
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.lifecycle.watchful import OF, WATCHFUL
from tests.rolling import keyed, newer
from tests.rolling.halves import MEMBER, MORTAL, PATIENCE, PLAIN, ROLLER, end_all, go_on, leave

LEASE = 2
"""Seconds of the lease of a gateway that dies, and after which others find it dead."""


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
async def js(server: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(server.url)
    yield client.jetstream()
    await client.close()


@pytest.fixture
def run(server: NatsServer, gateway_factory: GatewayFactory) -> Callable[..., Gateway]:
    """Start a gateway of some version, with these arguments; "" is today's. Of one that ``dies`` the lease is short."""

    def start(version: str = "", *arguments: str, dies: bool = False) -> Gateway:
        module = f"tests.rolling.{version}" if version else "mqtt_nats"
        all_arguments = ("--gateway-lease", str(LEASE), *arguments)
        if dies:
            return gateway_factory(server, *all_arguments, module=module)
        return gateway_factory(server, *all_arguments, env={OF: module}, module=WATCHFUL)

    return start


async def record(js: JetStreamContext, client_id: str) -> dict[str, Any]:
    """The session record as it is stored."""
    message = await js.get_last_msg("$MQTT_sess", f"$MQTT.sess.{name_hash(client_id)}")
    assert message.data is not None
    found: dict[str, Any] = orjson.loads(message.data)
    return found


async def nothing_owed(js: JetStreamContext, client_id: str) -> bool:
    """Whether JetStream knows that the client has answered every PUBREL."""
    info = await js.stream_info("$MQTT_out", subjects_filter=f"$MQTT.out.pubrel.{name_hash(client_id)}")
    return not info.state.subjects


async def nothing_left(js: JetStreamContext) -> bool:
    """Whether `$MQTT_msgs` has no consumer of a session, or of its groups."""
    keys = tuple(name_hash(one) for one in (ROLLER, MEMBER, PLAIN))
    return not [info.name for info in await js.consumers_info("$MQTT_msgs") if info.name.startswith((*keys, "share_"))]


@pytest.mark.parametrize("first", ["keyed", ""])
@pytest.mark.parametrize("positions", ["consumers", "records"])
async def test_a_session_goes_back_and_forth(
    run: Callable[..., Gateway], js: JetStreamContext, first: str, positions: str
) -> None:
    """What is in flight, owed, held and granted at one is so at the other, which is of this version or the next."""
    arguments = ("--session-positions", positions)
    one, two = run(first, *arguments), run("" if first else "keyed", *arguments)
    left, mortal = await leave(one.port)
    await go_on(two.port, left)
    assert await aeventually(lambda: nothing_owed(js, ROLLER), PATIENCE)
    async with await RawClient.connect(one.port, "watcher") as watcher:
        await watcher.subscribe("wills/#", qos=1)
        async with await RawClient.connect(two.port, MORTAL):  # the other gateway publishes the will of its client
            await watcher.receive("wills/1", b"x", qos=1)
            await mortal.expect_closed()
            mortal.drop()
    await end_all(one.port)
    assert await aeventually(lambda: nothing_left(js), PATIENCE)


@pytest.mark.parametrize("dead", ["keyed", ""])
async def test_one_dies_and_the_other_deals_with_its_clients(
    run: Callable[..., Gateway], js: JetStreamContext, dead: str
) -> None:
    one, two = run(dead, dies=True), run("" if dead else "keyed")
    async with await RawClient.connect(two.port, "watcher") as watcher:
        await watcher.subscribe("wills/#", qos=2)
        doomed = [
            await RawClient.connect(one.port, f"w{qos}", will=Will(f"wills/{qos}", b"x", qos, False))
            for qos in (0, 1, 2)
        ]
        client = await RawClient5.connect5(one.port, "ending", session_expiry_interval=1)
        await client.subscribe5(Subscription("a", 1))
        await record(js, "ending")
        one.kill()
        got = await watcher.messages(3, PATIENCE)
        assert sorted(publish.payload for publish in got) == [b"x"] * 3
        for each in (client, *doomed):
            each.drop()

        async def ended() -> bool:
            try:
                await record(js, "ending")
            except NotFoundError:
                return True
            return False

        assert await aeventually(ended, PATIENCE)


async def test_what_is_not_known_is_kept(run: Callable[..., Gateway], js: JetStreamContext) -> None:
    """A key that a later gateway has added outlives the writes of this one."""
    (later, today) = (run("keyed"), run())
    async with await RawClient.connect(later.port, "client", clean=False) as client:
        await client.subscribe("a", qos=1)
    async with await RawClient.connect(today.port, "client", clean=False) as client:
        assert client.session_present
        await client.subscribe("b", qos=1)
        assert (await record(js, "client"))["v5"][keyed.KEY] == {"since": 1}


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("version", [4, 5])
async def test_a_newer_record_is_refused_and_not_touched(
    run: Callable[..., Gateway], js: JetStreamContext, clean: bool, version: int
) -> None:
    later, today = run("newer"), run()
    client: RawClient
    async with await RawClient5.connect5(later.port, "client", session_expiry_interval=600) as client:
        await client.subscribe("a", qos=2)
        stored = await record(js, "client")
        assert stored["v5"]["version"] == newer.VERSION
        with pytest.raises(AssertionError, match="Connack"):
            await (RawClient5.connect5 if version == 5 else RawClient.connect)(today.port, "client", clean=clean)
        assert await aeventually(
            lambda: f"only a newer gateway can serve its session: v5: version {newer.VERSION}" in today.log
        )
        async with await RawClient.connect(today.port, "publisher") as publisher:
            await publisher.deliver("a", b"x", 2)
        await client.receive("a", b"x", qos=2)  # it was not disturbed either
        await client.quiet()
    assert await record(js, "client") == stored


async def test_what_only_a_newer_gateway_can_end_waits_for_one(
    run: Callable[..., Gateway], js: JetStreamContext
) -> None:
    """Its deadline, and those of its clients that ended with it."""
    today, later = run(), run("newer", dies=True)
    async with await RawClient5.connect5(later.port, "ending", session_expiry_interval=1) as client:
        await client.subscribe("a", qos=1)
    dying = await RawClient.connect(later.port, "dying", will=Will("wills/1", b"x", 1, False))
    assert await aeventually(lambda: _alive(js, "dying"))
    later.kill()
    dying.drop()
    assert await aeventually(lambda: "its clients are left to a newer gateway" in today.log, PATIENCE)

    async def fired() -> bool:  # the gateway that cannot read the record has set the timer anew
        info = await js.stream_info("$MQTT_timers", subjects_filter="$MQTT.timers.expiry.*")
        message = await js.get_last_msg("$MQTT_timers", f"$MQTT.timers.expiry.{name_hash('ending')}")
        return bool(info.state.subjects) and (message.seq or 0) > 2

    assert await aeventually(fired, PATIENCE)
    assert await _alive(js, "ending")
    assert await _alive(js, "dying")
    async with await RawClient.connect(today.port, "watcher") as watcher:
        await watcher.subscribe("wills/#", qos=1)
        run("newer")
        (will,) = await watcher.messages(1, PATIENCE)
        assert will.payload == b"x"

        async def ended() -> bool:
            return not await _alive(js, "ending") and not await _alive(js, "dying")

        assert await aeventually(ended, 60)


async def _alive(js: JetStreamContext, client_id: str) -> bool:
    await asyncio.sleep(0)
    try:
        await record(js, client_id)
    except NotFoundError:
        return False
    return True
