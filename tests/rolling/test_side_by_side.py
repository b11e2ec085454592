# SPDX-License-Identifier: Apache-2.0
"""A gateway of the version before, or after, and today's one serve the same sessions in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
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
from tests.harness.rawclient import PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.rolling import keyed, newer, released
from tests.rolling.golden import GOLDEN

LEASE = 2
"""Seconds of a gateway's lease."""

PATIENCE = 30.0

COMMIT = released.commit()
OTHERS = ["previous", "keyed", *(["released"] if COMMIT else [])]
"""Without the project's history there is no earlier gateway to run, but still one that behaves like it."""


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
async def js(server: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(server.url)
    yield client.jetstream()
    await client.close()


@pytest.fixture
def run(server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path) -> Callable[[str], Gateway]:
    """Start a gateway of some version; "" is today's."""

    def start(version: str = "") -> Gateway:
        env = {}
        if version == "released":
            env["RELEASED"] = str(tmp_path / "released")
            if not (tmp_path / "released").exists():
                released.unpack(COMMIT, tmp_path / "released")
        module = f"tests.rolling.{version}" if version else ""
        # That version knew of no shared reader.
        arguments = ("--shared-reader", "never") if version == "previous" else ()
        return gateway_factory(server, "--gateway-lease", str(LEASE), *arguments, env=env, module=module)

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


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("first", ["other", "today"])
async def test_a_session_goes_back_and_forth(
    run: Callable[..., Gateway], js: JetStreamContext, other: str, first: str
) -> None:
    """What is in flight, owed, held and granted at one is so at the other."""
    one, two = run(other), run()
    if first == "today":
        one, two = two, one
    async with await RawClient.connect(two.port, "publisher") as publisher:
        async with await RawClient5.connect5(one.port, "roller", session_expiry_interval=3600) as client:
            both = (Subscription("r/#", 2), Subscription("r/+", 1, retain_as_published=True))
            assert await client.subscribe5(*both, subscription_identifier=[7]) == (2, 1)
            assert await client.subscribe5(Subscription("$share/group/s", 1)) == (1,)
            await publisher.deliver("r/a", b"owed", 2)
            owed = await client.message("r/a", b"owed", qos=2)
            client.ack(PUBREC, owed.packet_id)
            await client.released(owed.packet_id, answer=False)
            await publisher.deliver("r/a", b"unanswered", 2)
            unanswered = await client.message("r/a", b"unanswered", qos=2, dup=False)
            client.publish("held", b"held", 2, packet_id=99)
            await client.expect_ack(PUBREC, 99)
        await publisher.deliver("r/a", b"meanwhile", 1)
        await publisher.subscribe("held", qos=2)
        async with await RawClient5.connect5(
            two.port, "roller", clean=False, session_expiry_interval=3600, will=Will("wills/1", b"w", 1, False)
        ) as client:
            assert client.session_present
            await client.expect_ack(PUBREL, owed.packet_id)
            again = await client.message("r/a", b"unanswered", qos=2, dup=True, packet_id=unanswered.packet_id)
            assert (again.properties or {}).get("subscription_identifier") == [7, 7]
            await client.message("r/a", b"meanwhile", qos=1)
            client.ack(PUBCOMP, owed.packet_id)
            client.ack(PUBREC, unanswered.packet_id)
            client.ack(PUBREL, 99)
            await client.released(unanswered.packet_id)
            await client.expect_ack(PUBCOMP, 99)
            await publisher.receive("held", b"held", qos=2)
            await client.unsubscribe("r/+")
            assert await aeventually(lambda: nothing_owed(js, "roller"), PATIENCE)
            # The first gateway takes it over from the second, which publishes its will.
            await publisher.subscribe("wills/#", qos=1)
            async with await RawClient5.connect5(
                one.port, "roller", clean=False, session_expiry_interval=3600
            ) as client:
                assert client.session_present
                await publisher.receive("wills/1", b"w", qos=1)
                await client.receive("r/a", b"meanwhile", qos=1, dup=True)
                await publisher.deliver("r/a", b"end", 2)
                end = await client.receive("r/a", b"end", qos=2)
                assert (end.properties or {}).get("subscription_identifier") == [7]
                await publisher.deliver("s", b"shared", 1)
                await client.receive("s", b"shared", qos=1)
                await client.quiet()
        async with await RawClient5.connect5(two.port, "roller", clean=True, session_expiry_interval=0):
            pass

    async def gone() -> bool:
        infos = await js.consumers_info("$MQTT_msgs")
        assert not [info.name for info in infos if info.name.startswith(name_hash("roller"))]
        return True

    assert await aeventually(gone, PATIENCE)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("dead", ["other", "today"])
async def test_one_dies_and_the_other_deals_with_its_clients(
    run: Callable[..., Gateway], js: JetStreamContext, other: str, dead: str
) -> None:
    one, two = run(other), run()
    if dead == "today":
        one, two = two, one
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


@pytest.mark.parametrize("name", GOLDEN)
async def test_a_record_as_version_0_1_wrote_it(run: Callable[..., Gateway], js: JetStreamContext, name: str) -> None:
    """The subscriptions that it names are there, with their QoS and options."""
    golden = GOLDEN[name]
    today = run()
    for consumer in orjson.loads(golden.data).get("cons", {}).values():
        body = orjson.dumps({"stream_name": "$MQTT_msgs", "config": consumer})
        await js._api_request(f"$JS.API.CONSUMER.DURABLE.CREATE.$MQTT_msgs.{consumer['durable_name']}", body)
    await js.publish(f"$MQTT.sess.{name_hash(golden.client_id)}", golden.data)
    async with await RawClient.connect(today.port, "publisher") as publisher:
        async with await RawClient5.connect5(
            today.port, golden.client_id, clean=False, session_expiry_interval=60
        ) as client:
            assert client.session_present == golden.durable
            await publisher.deliver("other", b"", 1)  # what was changed in 0.1 counts from the second message on
            for topic, qos, identifiers in golden.topics:
                await publisher.deliver(topic, b"x", 2)
                got = await client.receive(topic, b"x", qos=qos)
                assert sorted((got.properties or {}).get("subscription_identifier", [])) == identifiers
            await client.quiet()
        async with await RawClient.connect(today.port, golden.client_id):  # clean: nothing of it stays
            pass

    async def gone() -> bool:
        names = [info.name for info in await js.consumers_info("$MQTT_msgs")]
        return not any(one.startswith(name_hash(golden.client_id)) for one in names)

    assert await aeventually(gone, PATIENCE)


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
    today, later = run(), run("newer")
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
