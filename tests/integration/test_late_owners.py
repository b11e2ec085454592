# SPDX-License-Identifier: Apache-2.0
"""A gateway that has claimed a session, or is about to, and stands still until the client has it elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any, cast

import pytest

from mqtt_nats.codec import Connack, Connect, Properties, ReasonCode, Will
from mqtt_streams.hashing import name_hash
from mqtt_streams.qos2 import LATE_NS
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBCOMP, PUBREC, PUBREL
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector5, Stored, answers, until

OPTIONS: dict[str, Any] = {"session_expiry_interval": 300}


async def connecting(
    gateway: Gateway, name: str, clean: bool, will: Will | None = None, **properties: Any
) -> RawClient5:
    """A client that waits for CONNACK."""
    client = await RawClient5.open(gateway.port)
    client.send(Connect(5, name, clean, 0, None, None, will, cast("Properties", properties)))
    return client


async def release(client: RawClient5, identifier: int) -> None:
    """Go through the rest of a QoS 2 publish."""
    await client.expect_ack(PUBREC, identifier)
    client.ack(PUBREL, identifier)
    await client.expect_ack(PUBCOMP, identifier)


async def gets_all(connect5: Connector5, name: str, publisher: RawClient5, client: RawClient5) -> None:
    """The session of a client with two messages in flight is as it was, and a third one comes."""
    await client.quiet()
    client.drop()
    await publisher.deliver(name, b"3", 2)
    client = await connect5(name, clean=False, **OPTIONS)
    assert client.session_present
    for payload in (b"1", b"2", b"3"):
        (one,) = await client.messages(1)
        assert one.payload == payload
        await client.complete(one)


async def test_a_clean_start_whose_client_is_elsewhere_by_now(
    connect5: Connector5, name: str, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """Its claim has come too late, and is not repeated: the client has closed that connection."""
    trap = proxy.set("up", f"$MQTT.sess.{name_hash(name)}", Action.HOLD)
    former = await connecting(late, name, True, **OPTIONS)
    await trap.sprung.wait()
    former.drop()
    client = await connect5(name, **OPTIONS)
    await client.subscribe(name, qos=2)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver_all(name, [b"1", b"2"], 2)
    await client.messages(2)
    trap.release()
    await answers(late, f"{name}-probe")
    await gets_all(connect5, name, publisher, client)


async def test_a_gateway_that_was_stopped_reads_a_clean_start_late(
    connect5: Connector5, name: str, gateway: Gateway, nats_server: NatsServer, gateway_factory: GatewayFactory
) -> None:
    """And the end of its connection behind it."""
    still = gateway_factory(nats_server, start=False)
    await asyncio.to_thread(still.start)
    os.kill(still.pid, signal.SIGSTOP)
    try:
        former = await connecting(still, name, True, **OPTIONS)
        former.drop()
        client = await connect5(name, **OPTIONS)
        await client.subscribe(name, qos=2)
        publisher = await connect5(f"{name}-publisher")
        await publisher.deliver_all(name, [b"1", b"2"], 2)
        await client.messages(2)
    finally:
        os.kill(still.pid, signal.SIGCONT)
    await answers(still, f"{name}-probe")
    await gets_all(connect5, name, publisher, client)


@pytest.mark.long
@pytest.mark.parametrize("how", ["goes on", "begins anew", "is regular"])
async def test_a_claim_whose_answer_is_lost(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy, how: str
) -> None:
    """Its client is refused and does not come back: what it has claimed ends in time, after the will of before."""
    will = Will(f"{name}/will", b"gone", 1, False, {"will_delay_interval": 4})
    client = await connect5(name, session_expiry_interval=6, will=will)
    await client.subscribe(name, qos=2)
    await client.quiet()
    client.drop()
    await until(lambda: _has(stored, f"$MQTT.timers.will.*.{name_hash(name)}"))
    regular = how == "is regular"  # such a session's first claim supposes that there is none, and is refused
    trap = proxy.set("answer", f"$MQTT.sess.{name_hash(name)}", Action.DROP, 2 if regular else 1)
    expiry: dict[str, Any] = {} if regular else {"session_expiry_interval": 6}
    client = await connecting(late, name, how != "goes on", **expiry)
    await trap.sprung.wait()
    proxy.lose()
    refused = await client.packet()
    assert isinstance(refused, Connack)
    assert refused.code == ReasonCode.SERVER_UNAVAILABLE
    client.drop()
    proxy.away = False
    wills = f"$MQTT.msgs.{name}.will"

    async def over() -> None:
        assert not await stored.traces(name)
        assert await stored.count("$MQTT_msgs", wills) == 1
        assert not await stored.count("$MQTT_wills", f"$MQTT.wills.*.{name_hash(name)}")

    await until(over)


async def _has(stored: Stored, subject: str) -> None:
    """A timer is set."""
    assert await stored.count("$MQTT_timers", subject)


@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
async def test_a_will_is_stored_late(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy, clean: bool
) -> None:
    """Nobody is left to publish it: the session went on before it was there."""
    watcher = await connect5(f"{name}-watcher")
    await watcher.subscribe(name, qos=1)
    options = {} if clean else OPTIONS
    trap = proxy.set("up", "$MQTT.wills.", Action.HOLD)
    former = await connecting(late, name, clean, Will(name, b"will", 1, False), **options)
    await trap.sprung.wait()
    former.drop()
    client = await connect5(name, clean=clean, **options)
    trap.release()
    await answers(late, f"{name}-probe")

    async def gone() -> None:
        assert not await stored.count("$MQTT_wills", f"$MQTT.wills.*.{name_hash(name)}")

    await until(gone)
    await client.disconnect5()
    await connect5(name, clean=clean, **options)
    await watcher.quiet()


async def test_a_will_is_dealt_with_late(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """It is another one by then, of a client that is connected."""
    watcher = await connect5(f"{name}-watcher")
    await watcher.subscribe(name, qos=1)
    await connect5(name, clean=False, will=Will(name, b"first", 1, False), **OPTIONS)
    trap = proxy.set("up", "$JS.API.STREAM.MSG.GET.$MQTT_wills", Action.HOLD)
    former = await connecting(late, name, False, **OPTIONS)
    await trap.sprung.wait()
    former.drop()
    client = await connect5(name, clean=False, will=Will(name, b"second", 1, False), **OPTIONS)
    await watcher.message(name, b"first")
    trap.release()
    await answers(late, f"{name}-probe")
    await watcher.quiet()
    client.drop()
    await watcher.message(name, b"second")


@pytest.mark.long
async def test_a_timer_is_removed_late(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """It is that of a later end of the session by then."""
    options: dict[str, Any] = {"session_expiry_interval": 8}  # in which the test has to see that the timer is there
    client = await connect5(name, clean=False, **options)
    await client.subscribe(name, qos=1)
    trap = proxy.set("up", "$JS.API.STREAM.MSG.GET.$MQTT_timers", Action.HOLD)
    former = await connecting(late, name, False, **options)
    await trap.sprung.wait()
    former.drop()
    client = await connect5(name, clean=False, **options)
    client.drop()

    async def timer() -> None:
        assert await stored.count("$MQTT_timers", f"$MQTT.timers.expiry.{name_hash(name)}") == 1

    await until(timer)
    trap.release()
    await answers(late, f"{name}-probe")
    await timer()
    await stored.gone(name)


@pytest.mark.long
async def test_a_publish_is_held_late(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """Later than the next owner looks for it: the one after that does not take it for another of that identifier."""
    client = await connect5(name, to=late, clean=False, **OPTIONS)
    client.publish5(name, b"before", 2, packet_id=7)
    await client.expect_ack(PUBREC, 7)
    trap = proxy.set("up", "$MQTT.qos2.in.", Action.HOLD)
    client.publish5(name, b"one", 2, packet_id=1)
    await trap.sprung.wait()
    client.drop()
    client = await connect5(name, clean=False, **OPTIONS)
    client.publish5(name, b"one", 2, packet_id=1, dup=True)
    await release(client, 1)
    await asyncio.sleep(LATE_NS / 1e9 + 1)  # what is tested is that time passes
    trap.release()
    await answers(late, f"{name}-probe")
    assert await stored.count("$MQTT_qos2in", f"$MQTT.qos2.in.{name}.*") == 2
    client.drop()
    subscriber = await connect5(f"{name}-subscriber")
    await subscriber.subscribe(name, qos=2)
    client = await connect5(name, clean=False, **OPTIONS)
    client.publish5(name, b"two", 2, packet_id=1)
    await release(client, 1)
    client.ack(PUBREL, 7)
    await client.expect_ack(PUBCOMP, 7)
    for payload in (b"two", b"before"):
        await subscriber.complete(await subscriber.message(name, payload))
    await subscriber.quiet()
