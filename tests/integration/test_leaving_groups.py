# SPDX-License-Identifier: Apache-2.0
"""Registrations in groups whose sessions have moved or ended: one that stays keeps the group's consumer for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mqtt_nats.codec import Subscribe, Subscription, Unsubscribe
from mqtt_streams.api import ApiError
from mqtt_streams.hashing import name_hash
from mqtt_streams.shared import CONSUMER_PREFIX, SharedStore, group_hash, members_subject
from tests.chaos.points.proxy import Action, NatsProxy
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.integration.conftest import Connector5, Stored, answers, until
from tests.integration.inprocess import running
from tests.integration.test_late_stores import find_again, lose
from tests.integration.test_refused_claims import refused

OPTIONS: dict[str, Any] = {"session_expiry_interval": 300}
REGISTRATION = "$MQTT.shared.members."
REMOVAL = "$JS.API.STREAM.PURGE.$MQTT_shared"


def text_of(name: str) -> str:
    """The shared subscription of a test."""
    return f"$share/group/{name}"


async def nothing_left(stored: Stored, name: str) -> None:
    """Wait until neither a registration in the test's group nor its consumer is there."""
    group = group_hash("group", name)

    async def gone() -> None:
        assert not await stored.count("$MQTT_shared", members_subject(group))
        assert not await stored.consumers("$MQTT_msgs", CONSUMER_PREFIX + group)

    await until(gone, 20)


async def registered(stored: Stored, name: str) -> None:
    """The client of the test has its registration."""
    assert await stored.count("$MQTT_shared", members_subject(group_hash("group", name), name_hash(name))) == 1


async def test_a_session_moves_while_its_client_joins(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """The registration is stored when the next connection has removed those of the former session."""
    first = await connect5(name, to=late)
    trap = proxy.set("up", REGISTRATION, Action.HOLD)
    first.send(Subscribe(7, (Subscription(text_of(name), 1),)))
    await asyncio.wait_for(trap.sprung.wait(), 10)
    await connect5(name)
    trap.release()
    await answers(late, f"{name}-probe")
    await nothing_left(stored, name)


async def test_a_late_registration_takes_the_place_of_a_later_one(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """The session goes on elsewhere: its subscription stays registered, and ends with UNSUBSCRIBE."""
    first = await connect5(name, **OPTIONS)
    await first.subscribe(text_of(name), qos=1)
    await first.disconnect5()
    trap = proxy.set("up", REGISTRATION, Action.HOLD)
    resuming = asyncio.create_task(connect5(name, to=late, clean=False, **OPTIONS))
    await asyncio.wait_for(trap.sprung.wait(), 10)
    later = await connect5(name, clean=False, **OPTIONS)
    await later.quiet()
    trap.release()
    await answers(late, f"{name}-probe")
    await asyncio.gather(resuming, return_exceptions=True)
    await registered(stored, name)
    await later.unsubscribe(text_of(name))
    await nothing_left(stored, name)


@pytest.mark.long
@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
async def test_unsubscribe_is_not_answered(
    connect5: Connector5, name: str, stored: Stored, late: Gateway, proxy: NatsProxy, clean: bool
) -> None:
    """The removal of the registration is lost, and the client leaves: it is done at the end, or at the resume."""
    client = await connect5(name, to=late, **({} if clean else OPTIONS))
    await client.subscribe(text_of(name), qos=1)
    trap = proxy.set("up", REMOVAL, Action.DROP)
    client.send(Unsubscribe(8, (text_of(name),)))
    await asyncio.wait_for(trap.sprung.wait(), 10)
    client.drop()
    if not clean:
        await connect5(name, to=late, clean=False, **OPTIONS)
    await nothing_left(stored, name)


async def test_nobody_answers_at_the_end(
    connect5: Connector5, name: str, stored: Stored, late: Gateway, proxy: NatsProxy
) -> None:
    """A session that ends with its connection leaves its groups when NATS is there again."""
    client = await connect5(name, to=late)
    await client.subscribe(text_of(name), qos=1)
    trap = proxy.set("up", REMOVAL, Action.DROP)
    client.drop()
    await asyncio.wait_for(trap.sprung.wait(), 10)
    await lose(proxy, late)
    await find_again(proxy, late, f"{name}-probe")
    await nothing_left(stored, name)
    await stored.gone(name)


@pytest.mark.sources
async def test_jetstream_refuses_it_at_the_end(
    nats_server: NatsServer, name: str, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the session stays, and names what is left, until a timer removes both."""
    tidy = SharedStore.tidy
    refusals = [ApiError(500, 10074, "on purpose")]

    async def refuse(self: SharedStore, group: str) -> None:
        if refusals:
            raise refusals.pop()
        await tidy(self, group)

    monkeypatch.setattr(SharedStore, "tidy", refuse)
    with running(nats=(nats_server.url,)) as found:
        client = await RawClient5.connect5(found.port, name)
        await client.subscribe(text_of(name), qos=1)
        await client.disconnect5()
        await aeventually(lambda: not refusals)
        await nothing_left(stored, name)
        await stored.gone(name)


@pytest.mark.parametrize("clean", [True, False], ids=["clean start", "resume"])
async def test_a_gateway_is_killed_while_a_client_leaves(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy, clean: bool
) -> None:
    """The session record says which registration is still there."""
    client = await connect5(name, to=late, **OPTIONS)
    await client.subscribe(text_of(name), qos=1)
    trap = proxy.set("up", REMOVAL, Action.HOLD)
    client.send(Unsubscribe(8, (text_of(name),)))
    await asyncio.wait_for(trap.sprung.wait(), 10)
    proxy.crash()
    await asyncio.to_thread(late.kill)
    await connect5(name, clean=clean, **OPTIONS)
    await nothing_left(stored, name)


@pytest.mark.long
@pytest.mark.parametrize("expiry", [0, 300], ids=["regular", "durable"])
async def test_a_refused_clean_start(
    connect5: Connector5, name: str, stored: Stored, late: Gateway, proxy: NatsProxy, expiry: int
) -> None:
    """The record of the session that was to begin names the groups of the former one."""
    first = await connect5(name, to=late, session_expiry_interval=expiry)
    await first.subscribe(text_of(name), qos=1)
    await refused(name, late, proxy, REMOVAL, first, clean=True, expiry=0)
    await nothing_left(stored, name)
    await stored.gone(name)
