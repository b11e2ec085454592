# SPDX-License-Identifier: Apache-2.0
"""What is new waits until what was pending has come again, and no longer."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from mqtt_nats.delivery.reconcile import Reconciling

from mqtt_nats.backbone import retry as patience
from mqtt_nats.backbone.transport import NatsTransport
from mqtt_nats.client.client import Client
from mqtt_nats.delivery import reconcile as reconciling
from mqtt_nats.delivery.receiver import SharedFeed
from mqtt_nats.delivery.states import DeliveryEvent
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.consumers import ConsumerInfo, ConsumerRef
from tests.delivery.fakes import FakeDeliveryServices, FakeReceiver, Side
from tests.harness.doubles import stands_for
from tests.protocol.recorder import session
from tests.sessions.fakes import as_services

CONSUMER = ConsumerRef("name", "deliver", "filter", 10)


def transport(link: Any) -> NatsTransport:
    """A connection to NATS."""
    return NatsTransport(link, asyncio.Transport(), asyncio.Protocol())


@stands_for(Client)
class FakeReconciled(FakeReceiver):
    """Stands for `Client`: gives its next job to the test."""

    fake_next: asyncio.Future[Coroutine[Any, Any, None]] | None = None

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        if self.fake_next is None:
            work.close()  # the test is over
        else:
            self.fake_next.set_result(work)


class Bench:
    """A session whose consumer has not sent again all that was pending when it was attached last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple[int, int]] = []
        """What JetStream says, one after the other: how many are pending, and up to where all is acknowledged."""
        self.attached = 0
        self.machine, self.ports = session()
        self.source = SubscriptionState(1, 1, 10)
        self.source.held = SubscriptionState.RETURNING
        self.machine.sources.append(self.source)
        self.binding = ConsumerBinding("a", CONSUMER, self.source)
        self.services = FakeDeliveryServices()
        link = self.services.fake_link
        link.wire = self.binding.wire = transport(link)
        self.client: Any = FakeReconciled(self.services)
        self.side: Any = Side(
            self.machine,
            client=self.client,
            bindings={"name": self.binding},
        )
        self.client.durable_side = self.side
        self.reconciling = Reconciling(as_services(self.services), self.services.registry, SharedFeed())
        self.machine.arrived(self.source, 8, 1, b"r", None, 1)

        async def info(*_: object) -> ConsumerInfo:
            pending, floor = self.told.pop(0)
            return ConsumerInfo({"deliver_subject": "deliver"}, True, 8, 8, floor, pending, 0)

        async def reattach(*_: object) -> None:
            self.attached += 1
            self.side.attempts = reconciling.ATTACH_ATTEMPTS

        async def patiently(client: object, work: Any) -> Any:
            return await work()

        monkeypatch.setattr(reconciling, "consumer_info", info)
        monkeypatch.setattr(reconciling, "rebind_consumers", reattach)
        monkeypatch.setattr(reconciling, "retry_until_answered", patiently)
        monkeypatch.setattr(reconciling, "SETTLE_BEFORE_CHECK_S", 0)

    @property
    def sent(self) -> list[object]:
        """Sequences of the messages that were sent."""
        return [call[1] for call in self.ports.calls if call[0] == "publish"]

    async def look(self, *told: tuple[int, int]) -> None:
        """Have the look made that is due."""
        self.told += told
        self.client.fake_next = asyncio.get_running_loop().create_future()
        look, self.client.fake_next = await self.client.fake_next, None
        await look
        assert self.told == []


async def test_what_is_new_goes_when_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest has come meanwhile."""
    bench = Bench(monkeypatch)
    bench.reconciling.due(bench.client, "name")
    await bench.look((1, 7))
    assert (bench.sent, bench.attached, bench.side.doubtful) == ([8], 0, set())


async def test_what_is_new_waits_while_something_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client acknowledges something else, so that the oldest that is pending is another one each time."""
    bench = Bench(monkeypatch)
    bench.reconciling.due(bench.client, "name")
    await bench.look((3, 3), (2, 4))
    assert (bench.sent, bench.attached, bench.side.doubtful) == ([], 0, {"name"})
    await bench.look((2, 4), (1, 6))
    assert (bench.sent, bench.attached, bench.side.doubtful) == ([8], 0, set())


async def test_what_does_not_come_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.reconciling.due(bench.client, "name")
    await bench.look((2, 4), (2, 4))
    assert (bench.sent, bench.attached) == ([], 1)


@pytest.mark.parametrize("why", ["live", "stalled", "missed", "elsewhere"])
async def test_what_is_new_waits_for_something_else(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Until it is known whose the session is, or the client reads, or the consumer is attached once more."""
    bench = Bench(monkeypatch)
    if why == "live":
        bench.source.live = True
    elif why == "elsewhere":
        bench.client.services.fake_link.wire = transport(bench.client.services.fake_link)  # NATS was lost once more
    bench.reconciling.due(bench.client, "name")

    async def info(*_: object) -> ConsumerInfo:
        if why == "stalled":
            bench.side.change(DeliveryEvent.NOT_READING)
        elif why == "missed":
            bench.binding.missed = True
        return ConsumerInfo({"deliver_subject": "deliver"}, True, 8, 8, 7, 1, 0)

    monkeypatch.setattr(reconciling, "consumer_info", info)
    await bench.look()
    assert bench.sent == []
    assert bench.side.doubtful == ({"name"} if why in ("missed", "elsewhere") else set())


async def test_who_is_not_answered_holds_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its consumer has no leader any more; as many are looked at as may be at the same time."""
    bench = Bench(monkeypatch)
    answered: asyncio.Future[ConsumerInfo] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(patience, "UNANSWERED_PLACE_MOST_S", 0.05)
    monkeypatch.setattr(reconciling, "SESSIONS_CHECKED_AT_ONCE", 1)
    bench.reconciling = Reconciling(as_services(bench.services), bench.services.registry, SharedFeed())
    asked = 0

    async def info(*_: object) -> ConsumerInfo:
        nonlocal asked
        asked += 1
        return await answered if asked == 1 else ConsumerInfo({"deliver_subject": "deliver"}, True, 8, 8, 7, 1, 0)

    monkeypatch.setattr(reconciling, "consumer_info", info)
    bench.client.fake_next = asyncio.get_running_loop().create_future()
    bench.reconciling.due(bench.client, "name")
    stuck = asyncio.create_task(await bench.client.fake_next)
    await asyncio.sleep(0)
    bench.reconciling.due(bench.client, "name")
    async with asyncio.timeout(5):
        await bench.look()
    assert bench.sent == [8]
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)
