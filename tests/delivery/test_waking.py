# SPDX-License-Identifier: Apache-2.0
"""What a client that reads again has yet to get of subscriptions that have ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from mqtt_nats.delivery.reconcile import Reconciling

from mqtt_nats.delivery import reconcile as reconciling
from mqtt_nats.delivery import slow_clients as stalling
from mqtt_nats.delivery.draining import note_exhausted, note_redelivered
from mqtt_nats.delivery.receiver import SharedFeed
from mqtt_nats.delivery.slow_clients import SlowClient
from mqtt_nats.delivery.states import DeliveryState
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.consumers import ConsumerInfo, ConsumerRef
from tests.delivery.fakes import FakeDeliveryServices, FakeReceiver, Side
from tests.protocol.recorder import session
from tests.sessions.fakes import as_services

CONSUMER = ConsumerRef("ended", "deliver", "filter", 10)


@pytest.mark.parametrize("why", ["missed", "returning"])
async def test_what_an_ended_subscription_has_yet_to_bring(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """It was lost on its way while the client did not read, and is looked for once it does."""

    async def nothing(*_: object) -> None:
        pass

    async def info(*_: object) -> ConsumerInfo:
        return ConsumerInfo({"deliver_subject": "deliver"}, True, 8, 8, 8, 0, 0)

    async def patiently(client: object, attempt: Any) -> Any:
        return await attempt()

    async def reattach(client: Any, side: Any) -> None:
        ended.missed = False
        note_redelivered(side, ended)

    for name in ("save_when_room", "write_changed_record", "fetch_in_flight"):
        monkeypatch.setattr(stalling, name, nothing)
    for name in ("limit_in_flight", "ask_again"):
        monkeypatch.setattr(stalling, name, lambda *_: None)
    for module in (stalling, reconciling):
        monkeypatch.setattr(module, "retry_until_answered", patiently)
    monkeypatch.setattr(reconciling, "consumer_info", info)
    monkeypatch.setattr(reconciling, "rebind_consumers", reattach)
    monkeypatch.setattr(reconciling, "ATTACH_ATTEMPTS", 0)
    monkeypatch.setattr(reconciling, "SETTLE_BEFORE_CHECK_S", 0)
    machine, _ = session(started=False)
    source, heir = SubscriptionState(1, 1, 10, 8), SubscriptionState(1, 1, 10)
    ended = ConsumerBinding("", CONSUMER, source)
    ended.missed, ended.redelivering, source.held = why == "missed", True, SubscriptionState.RETURNING
    ended.stand_before([heir])
    work: asyncio.Queue[Any] = asyncio.Queue()
    services = FakeDeliveryServices()
    services.fake_link.wire = None
    client: Any = FakeReceiver(services)
    client.do = work.put_nowait
    stall = SlowClient()
    side: Any = Side(
        machine,
        DeliveryState.WAKING,
        client=client,
        bindings={"ended": ended},
        stall=stall,
        point_anew=lambda: None,
        collect=nothing,
    )
    client.durable_side = side
    client.delivery.reconciling = found = Reconciling(as_services(services), services.registry, SharedFeed())
    note_exhausted(side, ended)
    found.due(client, "ended")
    async with asyncio.timeout(5):
        await (await work.get())
        assert heir.held == SubscriptionState.BEHIND, "it waits for what the client cannot get now"
        await stalling._wake(client, side, stall)
        await (await work.get())
    assert (heir.held, ended.drained, ended.missed, ended.redelivering) == (0, True, False, False)
    while not work.empty():
        work.get_nowait().close()
