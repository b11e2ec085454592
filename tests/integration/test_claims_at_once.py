# SPDX-License-Identifier: Apache-2.0
"""Many clients that connect at the same time: each claims its session in its turn."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, ExitStack

import pytest

from mqtt_nats.backbone import retry
from mqtt_nats.client.client import Client
from mqtt_nats.client.disconnect import end_silent
from mqtt_nats.delivery.receiver import CLAIMED_AT_ONCE
from mqtt_streams.quotas import QuotaStore, Totals
from tests.base import support
from tests.base.support import PATIENCE, Inside, running
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import eventually


def no_places(inside: Inside) -> AbstractContextManager[None]:
    """Other claims have all places until the block ends."""
    assert inside.gateway.account is not None
    return support.no_places(inside, inside.gateway.account.delivery.claims, CLAIMED_AT_ONCE)


def waiting(inside: Inside) -> list[Client]:
    """Clients whose claims wait for a place."""
    account = inside.gateway.account
    assert account is not None
    return [one for one in inside.call(lambda: list(account.registry.connections)) if one.unanswered and one.hash]


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("kind", [raw, raw5], ids=["3.1.1", "5.0"])
def test_a_claim_waits_for_a_place(nats_server: NatsServer, clean: bool, kind: object) -> None:
    """Other clients are served meanwhile, and the wait does not count in the time to answer CONNECT."""
    packet = raw.connect("device", clean=clean) if kind is raw else raw5.connect("device", clean=clean)
    with (
        running(nats_server.url) as inside,
        Raw.connected(inside.ports[0], "other") as other,
        Raw(inside.ports[0]) as device,
    ):
        with no_places(inside):
            device.send(packet)
            eventually(lambda: len(waiting(inside)) == 1)
            other.ping()
        device.expect(raw.CONNACK)
        assert not waiting(inside)


def test_those_that_wait_are_served_in_their_order(nats_server: NatsServer) -> None:
    """[MQTT-3.1.4-2] (3.1.1): of two connections of one client the later one keeps the session."""
    with running(nats_server.url) as inside:
        (port,) = inside.ports
        with Raw(port) as first, Raw(port) as second:
            with no_places(inside):
                first.send(raw.connect("device", clean=False))
                eventually(lambda: len(waiting(inside)) == 1)
                second.send(raw.connect("device", clean=False))
                eventually(lambda: len(waiting(inside)) == 2)
            assert second.expect(raw.CONNACK).body[1:] == b"\0"
            first.expect_closed()
            second.ping()


def test_packets_behind_connect_are_handled_although_the_client_has_gone(nats_server: NatsServer) -> None:
    """A client sends all it has to say at once and leaves, while others have all places."""
    said = raw.connect("device") + raw.publish("said/a", b"x", qos=1) + raw.packet(raw.DISCONNECT << 4, b"")
    with running(nats_server.url) as inside:
        (port,) = inside.ports
        with Raw.connected(port, "reader") as reader:
            assert reader.subscribe(("said/+", 1)) == [1]
            with no_places(inside):
                with Raw(port) as device:
                    device.send(said)
                eventually(lambda: len(waiting(inside)) == 1)
            assert reader.expect(raw.PUBLISH).payload == b"x"


def test_those_that_wait_are_refused_when_nobody_is_served(nats_server: NatsServer) -> None:
    """Thousands wait while JetStream does not answer: each would wait for all before it, five seconds for a place."""
    with running(nats_server.url, {"connect_timeout": 15}) as inside, Raw(inside.ports[0]) as device:
        account = inside.gateway.account
        assert account is not None
        now = inside.loop.time()
        with no_places(inside):
            device.send(raw.connect("device", clean=False))
            eventually(lambda: len(waiting(inside)) == 1)
            inside.call(lambda: end_silent(account.registry, now + 10))
            inside.call(lambda: setattr(account.delivery, "claimed", now + 10))  # another client has got its session
            inside.call(lambda: end_silent(account.registry, now + 20))
            assert len(waiting(inside)) == 1
            inside.call(lambda: end_silent(account.registry, now + 30))
            assert device.expect(raw.CONNACK).body[1:] == b"\3"
            device.expect_closed()
            eventually(lambda: not inside.call(lambda: account.registry.connections))
        assert account.services.counters.refused == {"server_unavailable": 1}


@pytest.mark.sources  # it replaces a constant and a method of native modules
def test_clients_whose_quota_is_read_for_long_leave_places_to_others(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user with a million sessions: nobody knows yet whether there is room for more."""
    go_on, totals = asyncio.Event(), QuotaStore.totals

    async def held(store: QuotaStore, quota: str, oldest: int) -> Totals:
        await go_on.wait()
        return await totals(store, quota, oldest)

    monkeypatch.setattr(QuotaStore, "totals", held)
    monkeypatch.setattr(
        retry, "UNANSWERED_PLACE_MOST_S", 2 * PATIENCE
    )  # not by this, which would be five seconds for 128 of them
    with running(nats_server.url) as inside, ExitStack() as stack:
        (port,) = inside.ports
        devices = [stack.enter_context(Raw(port)) for _ in range(CLAIMED_AT_ONCE + 1)]
        for number, device in enumerate(devices):
            device.send(raw.connect(f"device {number}", clean=False))
        eventually(lambda: len(waiting(inside)) == len(devices))
        Raw.connected(port, "other").close()
        inside.call(go_on.set)
        for device in devices:
            device.expect(raw.CONNACK)
