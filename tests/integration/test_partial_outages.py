# SPDX-License-Identifier: Apache-2.0
"""What belongs together across streams while one of them stores nothing; docs/internals/backbone.md#no-leader."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from mqtt_nats.codec import Will
from tests.chaos.points.proxy import Action, Frame, NatsProxy, Trap
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBREC, RawClient
from tests.harness.waiting import aeventually
from tests.lifecycle.watchful import WATCHFUL

pytestmark = pytest.mark.anyio

PATIENCE = 30.0

HELD = ("$MQTT.qos2.", "$JS.API.STREAM.PURGE.$MQTT_qos2in", "$JS.API.STREAM.MSG.DELETE.$MQTT_qos2in")
MESSAGES = ("$MQTT.msgs.", "$MQTT.rmsgs.")


class Between(NatsProxy):
    """Loses what is sent to some streams; for the gateway, these have no leader."""

    lost: tuple[str, ...] = ()

    def trapped(self, frame: Frame) -> Trap | None:
        if self.lost and frame.way == "up" and frame.subject.startswith(self.lost):
            return Trap("up", "", Action.DROP)
        return super().trapped(frame)


@pytest.fixture
async def between(nats_server: NatsServer) -> AsyncIterator[Between]:
    proxy = Between(nats_server.port, lambda: None)
    await proxy.start()
    yield proxy
    await proxy.close()


@pytest.fixture
def lease() -> int:
    """Seconds of the lease of the gateway behind the proxy; a short one where the test kills it."""
    return 60


@pytest.fixture
async def cut_off(between: Between, gateway_factory: GatewayFactory, lease: int) -> Gateway:
    """The gateway behind the proxy."""
    gateway = gateway_factory(between.url, "--gateway-lease", str(lease), start=False)
    await asyncio.to_thread(gateway.start)
    return gateway


@pytest.fixture
async def other(cut_off: Gateway, nats_server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    """A gateway that is not; it soon finds the other one dead."""
    gateway = gateway_factory(nats_server, "--gateway-lease", "3", start=False, module=WATCHFUL)
    await asyncio.to_thread(gateway.start)
    return gateway


@pytest.fixture
async def js(nats_server: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(nats_server.url)
    yield client.jetstream()
    await client.close()


async def notice(client: RawClient, between: Between, gateway: Gateway, lost: tuple[str, ...], qos: int) -> int:
    """From now on some streams do not store, and the gateway knows; the identifier of the publish that has told it."""
    between.lost = lost
    identifier = client.publish("notice", b"", qos, retain=True)
    await aeventually(lambda: "JetStream does not store" in gateway.log, PATIENCE)
    return identifier


async def handled(gateway: Gateway) -> None:
    """What clients have sent, and that they have gone, has been handled; and JetStream what went there before."""
    async with await RawClient.connect(gateway.port, "afterwards"):
        pass


async def payloads(js: JetStreamContext, stream: str, subject: str) -> list[bytes]:
    """What a stream has of a subject."""
    found = []
    state = (await js.stream_info(stream)).state
    for sequence in range(state.first_seq, state.last_seq + 1) if state.messages else ():
        try:
            message = await js.get_msg(stream, sequence)
        except NotFoundError:
            continue
        if message.subject == subject:
            found.append(message.data or b"")
    return found


@pytest.mark.long
async def test_a_will_that_waits_is_found_by_the_next_connection(
    between: Between, cut_off: Gateway, other: Gateway, js: JetStreamContext
) -> None:
    """It is published before CONNACK, so before what that connection publishes."""
    offline = Will("state/device", b"offline", 1, True)
    async with (
        await RawClient.connect(cut_off.port, "noticer") as noticer,
        await RawClient.connect(cut_off.port, "device", will=offline) as device,
    ):
        identifier = await notice(noticer, between, cut_off, MESSAGES, 1)
        device.drop()
        await handled(cut_off)
        async with await RawClient.connect(other.port, "device") as again:
            assert await payloads(js, "$MQTT_msgs", "$MQTT.msgs.state.device") == [b"offline"]
            await again.deliver("state/device", b"online", 1, retain=True)
            between.lost = ()
            await noticer.expect_ack(PUBACK, identifier, timeout=PATIENCE)
            assert await payloads(js, "$MQTT_msgs", "$MQTT.msgs.state.device") == [b"offline", b"online"]
            assert await payloads(js, "$MQTT_rmsgs", "$MQTT.rmsgs.state.device") == [b"online"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("lease", [3])
async def test_what_a_session_holds_does_not_outlive_its_record(
    between: Between, cut_off: Gateway, other: Gateway, js: JetStreamContext
) -> None:
    """The next session of the client would take it over, and a later publish under its identifier for it."""
    async with (
        await RawClient.connect(cut_off.port, "noticer") as noticer,
        await RawClient.connect(cut_off.port, "device") as device,
    ):
        identifier = device.publish("a", b"old", 2)
        await device.expect_ack(PUBREC, identifier)
        await notice(noticer, between, cut_off, HELD, 2)
        device.drop()
        await handled(cut_off)
        cut_off.kill()
        found = re.search(r"this gateway has the id (\w+)", cut_off.log)
        assert found is not None
        done = re.compile(rf"gateway {found[1]}: \d+ wills and \d+ sessions were taken over")
        await aeventually(lambda: done.search(other.log), PATIENCE)
        assert (await js.stream_info("$MQTT_qos2in")).state.messages == 0


@pytest.mark.long
async def test_who_subscribes_while_retained_messages_wait_misses_none(
    between: Between, cut_off: Gateway, other: Gateway
) -> None:
    """What subscribers get waits too: else it is too early for them, and what is retained too old."""
    async with await RawClient.connect(cut_off.port, "publisher") as publisher:
        await publisher.deliver("t", b"1", 1, retain=True)
        first = await notice(publisher, between, cut_off, ("$MQTT.rmsgs.",), 1)
        second = publisher.publish("t", b"2", 1, retain=True)
        await handled(cut_off)
        async with await RawClient.connect(other.port, "subscriber", clean=False) as subscriber:
            await subscriber.subscribe("t", qos=1)
            between.lost = ()
            await publisher.expect_ack(PUBACK, first, second, timeout=PATIENCE)
            for payload in (b"1", b"2"):
                (message,) = await subscriber.messages(1, PATIENCE)
                assert message.payload == payload
                await subscriber.complete(message)
