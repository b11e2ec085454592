# SPDX-License-Identifier: Apache-2.0
"""Consumers are set by whoever leaves a session or goes on with it, and by nobody else later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from nats.aio.msg import Msg

from mqtt_nats.delivery.position_writer import OWNERSHIP_PROOF_S
from mqtt_streams.gateway_subjects import LEFT
from mqtt_streams.hashing import name_hash
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector5, Stored, position, until

WINDOW = 5
PAYLOADS = [b"%d" % number for number in range(4 * WINDOW)]
OPTIONS: dict[str, Any] = {"clean": False, "session_expiry_interval": 300, "receive_maximum": WINDOW}
WAITS = 0.3
"""Seconds in which a gateway would have gone on that does not wait."""

RESET = "$JS.API.CONSUMER.RESET.$MQTT_msgs."


@pytest.fixture(params=["always"])
async def late(
    proxy: NatsProxy, gateway_factory: GatewayFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Gateway]:
    """One whose words may be held up; with the parameter "never" consumers bring everything, and they are set first."""
    gateway = gateway_factory(proxy.url, "--gateway-lease", "60", "--shared-reader", request.param, start=False)
    await asyncio.to_thread(gateway.start)
    yield gateway
    await asyncio.to_thread(gateway.term)


async def take_all(client: RawClient5, stored: Stored, name: str, payloads: list[bytes], again: int) -> None:
    """Each comes once; the first ``again`` of them were sent before."""
    for number, payload in enumerate(payloads):
        (one,) = await client.messages(1)
        assert (one.payload, one.dup) == (payload, number < again)
        await client.complete(one)
    await client.quiet()
    await stored.settled(name)


class Noted:
    """Positions of a session that were written, and consumers of it that were set."""

    def __init__(self, client_id: str) -> None:
        self._resets = resets_of(client_id)
        self.words: list[str] = []
        """"pos" or "API" for each."""

    async def note(self, message: Msg) -> None:
        if not message.subject.startswith(RESET) or message.subject.startswith(self._resets):
            self.words.append(message.subject.split(".")[1])


def resets_of(client_id: str) -> str:
    """How the subjects begin on which consumers of a session are set."""
    return f"{RESET}{name_hash(client_id)}_"


async def noted(stored: Stored, client_id: str) -> Noted:
    """From now on."""
    found = Noted(client_id)
    for subject in (f"$MQTT.pos.{name_hash(client_id)}", f"{RESET}>"):
        await stored.nats.subscribe(subject, cb=found.note)
    await fence(stored.nats)
    return found


async def over(stored: Stored, gateway: str, name: str) -> None:
    """Wait until a gateway has left a session, and sets none of its consumers any more."""
    await stored.nats.request(LEFT + gateway, name.encode(), timeout=30)


@pytest.mark.long
@pytest.mark.parametrize("qos", [1, 2])
async def test_a_gateway_that_has_left_a_session_sets_its_consumers_late(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy, qos: int
) -> None:
    """Whoever goes on waits for that, though the position is in order: what it has completed would come again."""
    client = await connect5(name, to=late, **OPTIONS)
    await client.subscribe(name, qos=qos)
    await stored.live(name)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver_all(name, PAYLOADS, qos)
    await client.messages(WINDOW)
    trap = proxy.set("up", resets_of(name), Action.HOLD)
    client.drop()
    await asyncio.wait_for(trap.sprung.wait(), 30)
    assert (await position(stored.js, name)).clean
    asked = await stored.nats.subscribe(f"{LEFT}*")
    done = await noted(stored, name)
    client = await connect5(name, to=gateway, **OPTIONS)
    while (await asked.next_msg(timeout=30)).data != name.encode():
        pass  # sessions of former tests
    await asyncio.sleep(WAITS)  # what is tested is that it waits
    assert done.words == []
    trap.release()
    await take_all(client, stored, name, PAYLOADS, WINDOW)


@pytest.mark.long
@pytest.mark.parametrize("late", ["never"], indirect=True)
@pytest.mark.parametrize("killed", [False, True], ids=["left", "killed"])
async def test_a_gateway_that_goes_on_with_a_session_sets_its_consumers_late(
    connect5: Connector5,
    name: str,
    stored: Stored,
    gateway: Gateway,
    late: Gateway,
    proxy: NatsProxy,
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
    killed: bool,
) -> None:
    """The position names it before it does, and says what it has said. Who comes next waits for it."""
    former = gateway_factory(nats_server, start=False)
    await asyncio.to_thread(former.start)
    client = await connect5(name, to=former, **OPTIONS)
    await client.subscribe(name, qos=1)
    await stored.live(name)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver_all(name, PAYLOADS, 1)
    await client.messages(WINDOW)

    async def written() -> None:  # a catch-up reader takes no more than the client's window
        assert len((await position(stored.js, name)).pending) in (WINDOW, len(PAYLOADS))

    await until(written)
    if killed:
        former.kill()
    else:
        client.drop()
    await stored.detached(name, killed=killed)
    before = await position(stored.js, name)
    assert (before.clean, len(before.unsent)) == ((False, 0) if killed else (True, len(before.pending) - WINDOW))
    if not killed:
        await over(stored, before.gateway, name)
    trap = proxy.set("up", resets_of(name), Action.HOLD)
    await connect5(name, to=late, **OPTIONS)
    await asyncio.wait_for(trap.sprung.wait(), 30)
    at = await position(stored.js, name)
    assert at.gateway != before.gateway
    assert at == replace(before, gateway=at.gateway, perhaps=at.perhaps)
    assert at.perhaps == (await stored.last_sequence() if killed else 0)
    asked = await stored.nats.subscribe(LEFT + at.gateway)
    done = await noted(stored, name)
    client = await connect5(name, to=gateway, **OPTIONS)
    await asked.next_msg(timeout=30)
    await asyncio.sleep(WAITS)  # what is tested is that it waits
    assert done.words == []
    trap.release()
    await take_all(client, stored, name, PAYLOADS, len(PAYLOADS) if killed else WINDOW)


@pytest.mark.parametrize("claimed", [False, True], ids=["its own", "somebody else's"])
async def test_a_gateway_that_hears_late_whose_the_session_is_asks_again(
    connect5: Connector5,
    name: str,
    stored: Stored,
    gateway: Gateway,
    late: Gateway,
    proxy: NatsProxy,
    claimed: bool,
) -> None:
    """Somebody else may not have waited for it any longer."""
    client = await connect5(name, to=late, **OPTIONS)
    await client.subscribe(name, qos=1)
    at = await stored.live(name)
    trap = proxy.set("answer", "$JS.API.STREAM.MSG.GET.$MQTT_sess", Action.HOLD)
    client.drop()
    await asyncio.wait_for(trap.sprung.wait(), 30)
    done = await noted(stored, name)
    if claimed:
        client = await connect5(name, to=gateway, **OPTIONS)
        await stored.live(name)
    else:
        await asyncio.sleep(OWNERSHIP_PROOF_S * 1.1)  # what is tested is that time passes
    assert "API" not in done.words
    trap.release()
    await over(stored, at.gateway, name)
    assert done.words.count("API") == (not claimed)
    client = await connect5(name, to=late, **OPTIONS)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver_all(name, PAYLOADS, 1)
    await take_all(client, stored, name, PAYLOADS, 0)


@pytest.mark.long
@pytest.mark.parametrize("late", ["never"], indirect=True)
async def test_a_gateway_whose_write_was_answered_late_writes_again_before_it_sets_consumers(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """The answer says whose the session was when it was written."""
    client = await connect5(name, to=gateway, **OPTIONS)
    await client.subscribe(name, qos=1)
    at = await stored.live(name)
    client.drop()
    await stored.detached(name)
    await over(stored, at.gateway, name)
    done = await noted(stored, name)
    trap = proxy.set("answer", f"$MQTT.pos.{name_hash(name)}", Action.HOLD)
    client = await connect5(name, to=late, **OPTIONS)
    await asyncio.wait_for(trap.sprung.wait(), 30)
    await asyncio.sleep(OWNERSHIP_PROOF_S * 1.1)  # what is tested is that time passes
    await fence(stored.nats)
    held = len(done.words)
    assert set(done.words) == {"pos"}
    trap.release()

    async def attached() -> None:
        assert "API" in done.words

    await until(attached)
    assert set(done.words[held : done.words.index("API")]) == {"pos"}  # more than once if an answer is late again
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver_all(name, PAYLOADS, 1)
    await take_all(client, stored, name, PAYLOADS, 0)
