# SPDX-License-Identifier: Apache-2.0
"""Events of clients that come and go: one for each change."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import orjson
import pytest
from nats.aio.client import Client as NatsClient

from mqtt_nats.codec import Connack, Connect
from mqtt_nats.config.settings import Settings
from mqtt_nats.messages.identity import Identity
from mqtt_nats.observability.presence import Presence
from mqtt_nats.observability.presence_events import TEXT_CHARACTERS_MOST, event, level, shortened
from mqtt_nats.pubsub.data_path import Path
from tests.conftest import GatewayFactory
from tests.harness.fence import fence
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeServices

Pair = tuple[InProcess, InProcess]
Event = dict[str, Any]


class Seen:
    """The events about some clients, as a NATS client reads them."""

    def __init__(self, client: NatsClient) -> None:
        self._client = client
        self.events: list[tuple[str, Event]] = []

    async def begin(self, name: str) -> None:
        async def cb(message: Any) -> None:
            event = orjson.loads(message.data)
            if event["clientid"].startswith(name):
                self.events.append((message.subject, event))

        await self._client.subscribe("$MQTT.presence.>", cb=cb)
        await fence(self._client)

    async def count(self, wanted: int) -> list[Event]:
        """Wait for this many events; more must not have come."""
        await aeventually(lambda: len(self.events) >= wanted)
        assert len(self.events) == wanted, self.events
        return [event for _, event in self.events]


@pytest.fixture
async def seen(nats_client: NatsClient, name: str) -> Seen:
    found = Seen(nats_client)
    await found.begin(name)
    return found


async def test_one_event_for_each_change(pair: Pair, name: str, seen: Seen) -> None:
    first, second = pair
    async with await RawClient.connect(second.port, f"watcher of {name}") as watcher:
        await watcher.subscribe("$SYS/brokers/+/clients/#")
        one = await RawClient.connect(first.port, name, clean=False, keepalive=60)
        (event,) = await seen.count(1)
        assert seen.events[0][0] == f"$MQTT.presence.connected.{name}"
        epoch = event.pop("epoch")
        assert event.pop("ts") == event.pop("connected_at")
        assert event == {
            "event": "connected",
            "clientid": name,
            "gateway": first.account.services.identity.id,
            "connection": first.call(lambda: first.account.registry.clients[name].connection.number),
            "username": None,
            "ipaddress": "127.0.0.1",
            "proto_name": "MQTT",
            "proto_ver": 4,
            "session_present": False,
            "keepalive": 60,
            "expiry_interval": None,
        }
        async with await RawClient.connect(second.port, name, clean=False) as two:
            await one.expect_closed()
            one.drop()
            events = await seen.count(3)
            (ended,) = (one for one in events[1:] if one["event"] == "disconnected")
            (begun,) = (one for one in events[1:] if one["event"] == "connected")
            assert (ended["gateway"], ended["reason"]) == (first.account.services.identity.id, "session_taken_over")
            assert (begun["gateway"], begun["session_present"]) == (second.account.services.identity.id, True)
            assert epoch <= ended["epoch"] < begun["epoch"]
            await two.disconnect()
        last = (await seen.count(4))[-1]
        assert (last["event"], last["reason"], last["reason_code"]) == ("disconnected", "normal_disconnection", 0)
        assert last["connected_at"] <= last["disconnected_at"]
        topics = [topic_of(packet) for packet in await watcher.messages(4)]
        prefixes = [f"$SYS/brokers/{gateway.account.services.identity.id}/clients/{name}/" for gateway in pair]
        assert sorted(topics) == sorted([f"{one}{how}" for one in prefixes for how in ("connected", "disconnected")])
        await watcher.quiet()


async def test_the_end_says_when_the_beginning_was(pair: Pair, name: str, seen: Seen) -> None:
    """To the millisecond; it was when the client was let in, not when it had opened its socket."""
    async with await RawClient.open(pair[0].port) as client:
        await asyncio.sleep(0.3)
        client.send(Connect(4, name, True, 0, None, None, None))
        await client.expect(Connack, code=0)
        await seen.count(1)
        await client.disconnect()
    begun, ended = await seen.count(2)
    assert ended["connected_at"] == begun["connected_at"] <= ended["disconnected_at"]


@pytest.mark.parametrize(
    ("how", "reason"),
    [("dropped", "unspecified_error"), ("violates", "protocol_error"), ("quits at once", "normal_disconnection")],
)
async def test_reasons(pair: Pair, name: str, seen: Seen, how: str, reason: str) -> None:
    client = await RawClient5.connect5(pair[0].port, name)
    if how == "dropped":
        client.drop()
    elif how == "violates":
        client.write(b"\x20\x03\x00\x00\x00")  # CONNACK is not a client's to send
    else:
        await client.disconnect()
    events = await seen.count(2)
    assert [one["event"] for one in events] == ["connected", "disconnected"]
    assert (events[1]["reason"], events[1]["proto_ver"]) == (reason, 5)
    assert events[0]["connection"] == events[1]["connection"]
    client.drop()


async def test_who_is_refused_was_never_there(pair: Pair, name: str, seen: Seen) -> None:
    async with await RawClient.open(pair[0].port) as client:
        client.send(Connect(4, "", False, 0, None, None, None))
        await client.expect(Connack, code=2)
    async with await RawClient.connect(pair[0].port, f"{name}/+ü.") as client:
        await client.disconnect()
    await seen.count(2)
    assert [subject for subject, _ in seen.events] == [
        f"$MQTT.presence.{change}.{level(f'{name}/+ü.')}" for change in ("connected", "disconnected")
    ]


@pytest.mark.long
async def test_a_killed_gateway(
    nats_server: NatsServer, gateway_factory: GatewayFactory, name: str, seen: Seen
) -> None:
    """Whoever deals with its clients tells; those that had left before are not told of again."""
    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,), gateway_lease=5, sys_interval=0)
    with running(settings) as survivor:
        victim = gateway_factory(nats_server, "--gateway-lease", "5", "--session-expiry-interval", "7200")
        clients = [
            await RawClient.connect(victim.port, f"{name}-regular"),
            await RawClient.connect(victim.port, f"{name}-durable", clean=False),
            await RawClient5.connect5(victim.port, f"{name}-ever", clean=False, session_expiry_interval=0xFFFFFFFF),
            await RawClient.connect(victim.port, f"{name}-moves", clean=False),
        ]
        async with await RawClient.connect(victim.port, f"{name}-left", clean=False) as left:
            await left.disconnect()
        async with await RawClient5.connect5(
            victim.port, f"{name}-left-ever", clean=False, session_expiry_interval=0xFFFFFFFF
        ) as left:
            await left.disconnect()
        identity = (await seen.count(8))[0]["gateway"]
        victim.kill()
        for one in clients:
            one.drop()
        moved = await RawClient.connect(survivor.port, f"{name}-moves", clean=False)
        events = (await seen.count(12))[8:]
        lost = {one["clientid"]: one for one in events if one["event"] == "disconnected"}
        assert lost.keys() == {f"{name}-regular", f"{name}-durable", f"{name}-ever"}
        assert {(one["gateway"], one["reason"]) for one in lost.values()} == {(identity, "gateway_lost")}
        await aeventually(lambda: not survivor.call(lambda: cast(Any, survivor.account.lease)._reaping))
        await seen.count(12)
        moved.drop()


async def test_events_wait_for_nats() -> None:
    path = FakeServices().path
    link = path.link
    link.wire, link.online = None, False
    presence = Presence(cast(Path, path), Identity("present0"), wanted=True)
    presence.lost("aaaaaaaa", "lamp", 7)
    assert not link.out
    link.wire, link.online = object(), True
    presence.flush()
    assert [frame.split()[1] for frame in link.out] == [
        b"$MQTT.presence.disconnected.lamp",
        b"$MQTT_SYS.brokers.aaaaaaaa.clients.lamp.disconnected",
    ]
    presence.flush()
    assert len(link.out) == 2


def test_events_are_small_whatever_clients_call_themselves() -> None:
    found = event("connected", "g", "x" * 60_000, 1, 0.0, {"username": shortened("\0" * 60_000)})
    assert len(found) < 10 * TEXT_CHARACTERS_MOST
    assert orjson.loads(found)["clientid"] == "x" * (TEXT_CHARACTERS_MOST - 1) + "…"
    assert shortened("y" * TEXT_CHARACTERS_MOST) == "y" * TEXT_CHARACTERS_MOST
