# SPDX-License-Identifier: Apache-2.0
"""The counters of a gateway, and its clients summed up without keeping the event loop."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import orjson
import pytest

from mqtt_nats.backbone.acked_publisher import AckedPublisher
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.backbone.pending_stores import Refusals
from mqtt_nats.client.account import Account
from mqtt_nats.client.client import Client
from mqtt_nats.client.kept_messages import KeptMessages
from mqtt_nats.config.build_info import build_and_reason
from mqtt_nats.control import snapshot as module
from mqtt_nats.control.snapshot import snapshot
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.lifecycle.lease import Lease
from mqtt_nats.lifecycle.readiness import Readiness
from mqtt_nats.messages.copies import Copies
from mqtt_nats.observability.counters import Counters
from mqtt_nats.protocol.allocated_identifiers import AllocatedIdentifiers
from mqtt_nats.protocol.durable_sender import DurableSender
from mqtt_nats.protocol.transient_sender import TransientSender
from mqtt_nats.sessions.services import Services
from mqtt_nats.transport.write_buffer import FlushRound, WriteBuffer
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeLink, FakeServices, FakeStore


@stands_for(NatsConnection)
class FakeCountedLink(FakeLink):
    """Stands for `NatsConnection`: whether bytes can be sent."""

    writable = False


@stands_for(AckedPublisher)
class FakeCountedStore(FakeStore):
    """Stands for `AckedPublisher`: two stores without an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = {b"1": object(), b"2": object()}
        self.bytes, self.resent = 300, 1
        self.refusals = Refusals()
        self.refusals.counts["storage_full"] = 4


@stands_for(Services)
class FakeCountedServices(FakeServices):
    """Stands for `Services`, with counters."""

    def __init__(self) -> None:
        super().__init__()
        self.counters = Counters([3, 2, 1], [30, 20, 10])
        self.path.round = FlushRound(lambda flush: None)
        links: Any = self.nats
        links.link, links.wild, links.shared = FakeCountedLink(), FakeCountedLink(), FakeCountedLink()
        links.store = FakeCountedStore()
        links.wild.online = False


@stands_for(Lease)
class FakeLease:
    """Stands for `Lease`: the registration of the gateway."""

    def __init__(self) -> None:
        self.info = {"name": "edge"}


@stands_for(Readiness)
class FakeReadiness:
    """Stands for `Readiness`."""

    reason = "JetStream does not answer"


@stands_for(Copies)
class FakeCopies:
    """Stands for `Copies`."""

    stored = 5


@stands_for(Account)
class FakeAccount:
    """Stands for `Account`."""

    def __init__(self) -> None:
        self.services = FakeCountedServices()
        self.registry = self.services.registry
        self.lease, self.readiness, self.copies = FakeLease(), FakeReadiness(), FakeCopies()
        self.refused = {"acme": "its streams are others"}
        self.kept = KeptMessages()


@stands_for(DurableSender)
class FakeDurable:
    """Stands for `DurableSender`: messages in flight and waiting."""

    def __init__(self, inflight: int, queued: int) -> None:
        self.inflight, self.queued = {one: object() for one in range(inflight)}, [None] * queued
        self.releases: dict[int, object] = {}
        self.identifiers = AllocatedIdentifiers({}, {}, set())


@stands_for(DurableDelivery)
class FakeDelivery:
    """Stands for `DurableDelivery`."""

    def __init__(self, inflight: int, queued: int, stalled: bool) -> None:
        self.machine, self.stalled = FakeDurable(inflight, queued), stalled


@stands_for(TransientSender)
class FakeTransient:
    """Stands for `TransientSender`: messages in flight and waiting."""

    def __init__(self, inflight: int, waiting: int) -> None:
        self.inflight, self.waiting = dict.fromkeys(range(inflight)), waiting


@stands_for(WriteBuffer)
class FakeBuffer:
    """Stands for `WriteBuffer`: whether its client reads."""

    def __init__(self, clogged: bool) -> None:
        self.clogged = clogged


@stands_for(Client)
class FakeCounted:
    """Stands for `Client`: a session with subscriptions, and publishes without an answer."""

    def __init__(
        self, side: FakeDelivery | FakeTransient | None, *, clogged: bool = False, shares: bool = False
    ) -> None:
        self.filters = {"a": 1, "b": 0}
        self.shares = {"$share/g/a": None} if shares else None
        self.receipts = [None] * 3
        self.write_buffer = FakeBuffer(clogged)
        self.durable_side = side if isinstance(side, FakeDelivery) else None
        self.regular_side = side if isinstance(side, FakeTransient) else None


@pytest.fixture
def account() -> FakeAccount:
    return FakeAccount()


def connect(account: FakeAccount, *clients: FakeCounted) -> None:
    account.registry.connections.update(cast("list[Client]", clients))


async def seen(account: FakeAccount) -> dict[str, Any]:
    return await snapshot(cast("Account", account))


async def test_sessions_are_summed_up_by_kind(account: FakeAccount) -> None:
    connect(
        account,
        FakeCounted(FakeDelivery(2, 10, stalled=True), clogged=True, shares=True),
        FakeCounted(FakeDelivery(1, 0, stalled=False)),
        FakeCounted(FakeTransient(4, 100)),
        FakeCounted(None),  # its CONNECT is not answered yet
    )
    found = await seen(account)
    assert (found["connections"], found["durable"], found["regular"]) == (4, 2, 1)
    assert (found["inflight"], found["queued"]) == (7, 110)
    assert (found["subscriptions"], found["unacknowledged"]) == (9, 12)
    assert (found["slow"], found["stalled"]) == (1, 1)
    assert found["oldest_unacknowledged"] == 0.0


async def test_the_longest_time_for_which_a_client_keeps_a_message(account: FakeAccount) -> None:
    times = [1000.0]
    account.kept = KeptMessages(lambda: times[0])
    client = FakeCounted(FakeDelivery(2, 0, stalled=False))
    connect(account, client, FakeCounted(FakeTransient(4, 100)))
    await account.kept.look_at_clients(account.registry.connections)
    times[0] += 120.0
    assert (await seen(account))["oldest_unacknowledged"] == 120.0


async def test_numbers_of_the_gateway_and_of_its_connections_to_nats(account: FakeAccount) -> None:
    account.services.counters.connect()
    found = await seen(account)
    assert (found["id"], found["name"], found["obstacle"]) == ("gateway0", "edge", "JetStream does not answer")
    assert found["build"] == build_and_reason()
    assert (found["sent"], found["sent_bytes"], found["connects"]) == ([3, 2, 1], [30, 20, 10], 1)
    assert (found["pending_stores"], found["pending_store_bytes"], found["resent_stores"]) == (2, 300, 1)
    assert (found["refused_stores"], found["copies_stored"]) == (account.services.nats.store.refusals.counts, 5)
    assert [(one["link"], one["online"], one["writable"]) for one in found["nats"]] == [
        ("main", True, False),
        ("wildcards", False, False),
        ("shared", True, False),
    ]
    assert found["refused_stores"]["storage_full"] == 4
    assert found["memory"] > 1_000_000
    assert orjson.loads(orjson.dumps(found)) == found  # every value can be sent


async def test_a_snapshot_is_not_changed_by_what_is_counted_later(account: FakeAccount) -> None:
    found = await seen(account)
    account.services.counters.sent[0] += 1
    account.services.counters.leave("client")
    assert found["sent"] == [3, 2, 1]
    assert found["disconnects"]["client"] == 0


async def test_other_tasks_run_while_many_clients_are_summed_up(
    account: FakeAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLIENTS_PER_TURN", 2)
    connect(account, *(FakeCounted(FakeTransient(1, 0)) for _ in range(5)))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    found = await seen(account)
    assert turns == 2  # after two clients, and after four
    task.cancel()
    assert found["regular"] == 5
