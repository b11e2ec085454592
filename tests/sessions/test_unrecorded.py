# SPDX-License-Identifier: Apache-2.0
"""Clean sessions that have begun without a record, and writes that wait for room."""

from __future__ import annotations

import asyncio

import pytest

from mqtt_nats.sessions import unrecorded
from mqtt_nats.sessions.record import save_record
from mqtt_nats.sessions.unrecorded import begin_unrecorded, save_when_room
from mqtt_streams.api import ApiError, RequestTimeout
from mqtt_streams.sessions import FIRST, PREFIX, V5
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeClient, FakeServices, as_client

pytestmark = pytest.mark.sources

FULL = ApiError(503, 10023, "insufficient resources")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrecorded, "ROOM_AGAIN_S", 0.001)


class Storage:
    """Storage that is full until a test makes room, and the session records that it has refused."""

    def __init__(self, services: FakeServices) -> None:
        self.full = True
        self.error = FULL
        self.refused: list[str] = []
        services.fake_inbox.before = self.store

    def store(self, subject: str) -> None:
        if self.full and subject.startswith(PREFIX):
            self.refused.append(subject)
            raise self.error


def begun(services: FakeServices, client_id: str) -> FakeClient:
    """A client whose clean session has begun without a record."""
    client = FakeClient(services, client_id, V5(first=FIRST))
    client.durable = False
    client.claim(1)
    begin_unrecorded(as_client(client))
    return client


async def work(clients: list[FakeClient], until: Storage, refusals: int) -> None:
    """Run the jobs of clients until so many records were refused."""

    async def refused() -> bool:
        for client in clients:
            await client.fake_work()
        return len(until.refused) >= refusals

    await aeventually(refused)


async def recorded(services: FakeServices, clients: list[FakeClient]) -> None:
    """Run the jobs of clients until none waits for its record any more."""

    async def done() -> bool:
        for client in clients:
            await client.fake_work()
        return not services.unrecorded

    await aeventually(done)
    await services.tasks.fake_settle()


async def test_records_are_written_when_there_is_room() -> None:
    """One session tries at a time; all follow."""
    services = FakeServices()
    storage = Storage(services)
    clients = [begun(services, f"client{number}") for number in range(3)]
    assert len(services.tasks.fake_spawned) == 1
    await work(clients, storage, 3)
    assert set(storage.refused) == {PREFIX + clients[0].hash}
    storage.full = False
    await recorded(services, clients)
    for client in clients:
        found = await services.streams.sessions.load(client.hash, client.client_id)
        assert found is not None
        assert found[1] == client.epoch


async def test_a_session_that_has_ended_gets_no_record() -> None:
    services = FakeServices()
    storage = Storage(services)
    client, other = begun(services, "client"), begun(services, "other")
    await work([client, other], storage, 1)
    services.unrecorded.pop(as_client(client))
    storage.full = False
    await recorded(services, [client, other])
    assert await services.streams.sessions.load(client.hash, "client") is None
    assert await services.streams.sessions.load(other.hash, "other") is not None


async def test_a_client_that_is_busy_does_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrecorded, "WRITTEN_S", 0.01)
    services = FakeServices()
    busy, other = begun(services, "busy"), begun(services, "other")

    async def others_turn() -> bool:
        await other.fake_work()
        return list(services.unrecorded) == [as_client(busy)]

    await aeventually(others_turn)
    await recorded(services, [busy, other])


async def test_another_connection_has_claimed_the_session() -> None:
    services = FakeServices()
    client = begun(services, "client")
    services.fake_inbox.put(PREFIX + client.hash, b"{}")

    async def told() -> bool:
        await client.fake_work()
        return client.taken

    await aeventually(told)
    services.unrecorded.clear()
    await services.tasks.fake_settle()


async def test_a_write_waits_for_room() -> None:
    services = FakeServices()
    client = FakeClient(services, v5=V5(first=FIRST))
    await save_record(as_client(client), 0)
    storage = Storage(services)
    writing = asyncio.create_task(save_when_room(as_client(client)))
    await aeventually(lambda: len(storage.refused) > 2)
    storage.full = False
    assert await writing == client.epoch == 2


async def test_a_write_ends_with_its_client() -> None:
    services = FakeServices()
    client = FakeClient(services, v5=V5(first=FIRST))
    Storage(services)
    client.alive = False
    with pytest.raises(RequestTimeout, match="insufficient resources"):
        await save_when_room(as_client(client))


async def test_another_refusal_is_not_waited_for() -> None:
    services = FakeServices()
    client = FakeClient(services, v5=V5(first=FIRST))
    storage = Storage(services)
    storage.error = ApiError(400, 10054, "message size exceeds maximum allowed")
    with pytest.raises(ApiError, match="message size"):
        await save_when_room(as_client(client))
