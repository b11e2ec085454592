# SPDX-License-Identifier: Apache-2.0
"""Whether a session is still a connection's, after NATS was lost."""

from __future__ import annotations

import pytest

from mqtt_nats.sessions import ownership
from mqtt_nats.sessions.ownership import still_owner
from mqtt_streams.api import RequestTimeout
from mqtt_streams.sessions import PREFIX
from tests.sessions.fakes import FakeBroker, FakeClient, as_client


@pytest.fixture
def client() -> FakeClient:
    client = FakeClient(FakeBroker())
    assert client.record is not None
    client.epoch = client.broker.inbox.put(PREFIX + client.hash, client.record.encode())
    return client


async def test_the_record_has_its_epoch(client: FakeClient) -> None:
    assert await still_owner(as_client(client))
    assert client.fake_ended == []


@pytest.mark.parametrize("there", [True, False])
async def test_the_session_has_moved(client: FakeClient, there: bool) -> None:
    """Another connection has written the record, or has removed it."""
    client.epoch -= 1
    if not there:
        client.broker.inbox.messages["$MQTT_sess"].clear()
    assert not await still_owner(as_client(client))
    assert client.fake_ended == ["taken over"]


async def test_a_record_that_cannot_be_read(client: FakeClient) -> None:
    client.broker.inbox.put(PREFIX + client.hash, b"{")
    assert not await still_owner(as_client(client))
    assert client.fake_ended == ["close"]


async def test_nats_is_lost_once_more(client: FakeClient) -> None:
    """The connection goes on; after the next reconnect the record is read again."""

    def lose(subject: str) -> None:
        client.broker.link.online = False
        raise RequestTimeout("no answer")

    client.broker.inbox.before = lose
    assert not await still_owner(as_client(client))
    assert client.fake_ended == []


async def test_the_stream_has_no_leader_for_a_while(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "RETRY", 0.0)
    failures = [RequestTimeout("no answer")] * 2

    def fail(subject: str) -> None:
        if failures:
            raise failures.pop()

    client.broker.inbox.before = fail
    assert await still_owner(as_client(client))
    assert failures == []


async def test_the_stream_has_no_leader_for_too_long(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "RETRY", 0.0)
    monkeypatch.setattr(ownership, "PATIENCE", -1.0)

    def fail(subject: str) -> None:
        raise RequestTimeout("no answer")

    client.broker.inbox.before = fail
    assert not await still_owner(as_client(client))
    assert client.fake_ended == ["close"]
