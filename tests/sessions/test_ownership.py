# SPDX-License-Identifier: Apache-2.0
"""Whether a session is still a connection's, after NATS was lost."""

from __future__ import annotations

import asyncio

import pytest

from mqtt_nats.sessions import takeover
from mqtt_nats.sessions.takeover import still_owner
from mqtt_streams.api import RequestTimeout
from mqtt_streams.sessions import PREFIX
from tests.sessions.fakes import FakeClient, FakeServices, as_client


@pytest.fixture
def client() -> FakeClient:
    client = FakeClient(FakeServices())
    assert client.record is not None
    client.epoch = client.services.fake_inbox.put(PREFIX + client.hash, client.record.encode())
    return client


async def test_the_record_has_its_epoch(client: FakeClient) -> None:
    assert await still_owner(as_client(client))
    assert client.fake_ended == []


@pytest.mark.parametrize("there", [True, False])
async def test_the_session_has_moved(client: FakeClient, there: bool) -> None:
    """Another connection has written the record, or has removed it."""
    client.epoch -= 1
    if not there:
        client.services.fake_inbox.messages["$MQTT_sess"].clear()
    assert not await still_owner(as_client(client))
    assert client.fake_ended == ["taken over"]


async def test_a_record_that_cannot_be_read(client: FakeClient) -> None:
    client.services.fake_inbox.put(PREFIX + client.hash, b"{")
    assert not await still_owner(as_client(client))
    (error,) = client.fake_ended
    assert str(error) == "the record of the session cannot be read"


async def test_nats_is_lost_once_more(client: FakeClient) -> None:
    """The connection goes on; after the next reconnect the record is read again."""

    def lose(subject: str) -> None:
        client.services.fake_link.online = False
        raise RequestTimeout("no answer")

    client.services.fake_inbox.before = lose
    assert not await still_owner(as_client(client))
    assert client.fake_ended == []


async def test_the_stream_has_no_leader_for_a_while(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "RECORDS_READABLE_RETRY_S", 0.0)
    failures = [RequestTimeout("no answer")] * 2

    def fail(subject: str) -> None:
        if failures:
            raise failures.pop()

    client.services.fake_inbox.before = fail
    assert await still_owner(as_client(client))
    assert failures == []


async def test_the_stream_has_no_leader_for_long(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection goes on; one question is asked for all sessions that wait, until it is answered."""
    monkeypatch.setattr(takeover, "RECORDS_READABLE_RETRY_S", 0.0)
    asked: list[str] = []
    loop = asyncio.get_running_loop()
    begun = loop.time()
    monkeypatch.setattr(loop, "time", lambda: begun + 100.0 * len(asked))  # each question takes long

    def fail(subject: str) -> None:
        asked.append(subject)
        if len(asked) < 50:
            raise RequestTimeout("no answer")

    client.services.fake_inbox.before = fail
    assert all(await asyncio.gather(*(still_owner(as_client(client)) for _ in range(10))))
    assert client.fake_ended == []
    assert len(asked) < 50 + 2 * 10 + 1


async def test_the_client_goes_meanwhile(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "RECORDS_READABLE_RETRY_S", 0.0)

    def fail(subject: str) -> None:
        if client.alive:
            client.alive = False
            raise RequestTimeout("no answer")

    client.services.fake_inbox.before = fail
    assert not await still_owner(as_client(client))
    assert client.fake_ended == []
