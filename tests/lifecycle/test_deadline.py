# SPDX-License-Identifier: Apache-2.0
"""The timer that ends a session: whose it may replace, and what a refusal means."""

from __future__ import annotations

import pytest

from mqtt_nats.lifecycle.deadline import DeadlineOp, set_deadline
from mqtt_streams.api import ApiError, NoResponders
from mqtt_streams.sessions import PREFIX
from mqtt_streams.timers import EXPIRY, timer_subject
from tests.sessions.fakes import FakeClient, FakeServices, as_client

AT = 2_000_000_000.0
EXISTS = ApiError(400, 10071, "wrong last sequence: 7")


class Session:
    """A session whose connection has ended, and its record."""

    def __init__(self) -> None:
        self.services = FakeServices()
        self.client = FakeClient(self.services)
        self.js, self.put = self.services.fake_inbox, self.services.fake_store.fake_put
        self.timer = timer_subject(EXPIRY, self.client.hash)

    async def write(self) -> int:
        """Write the session's record; returns its sequence."""
        assert self.client.record is not None
        return await self.services.streams.sessions.save(self.client.record, expected=None)

    def operation(self) -> DeadlineOp:
        """What waits for the store of the timer."""
        set_deadline(as_client(self.client), AT)
        operation = self.put.pop()[3]
        assert isinstance(operation, DeadlineOp)
        return operation

    async def refused(self, error: ApiError = EXISTS) -> None:
        """JetStream refuses to store the timer."""
        self.operation().failed(error)
        await self.services.tasks.fake_settle()


@pytest.mark.parametrize("at", [AT, None])
def test_a_timer_is_stored_only_where_there_is_none(at: float | None) -> None:
    session = Session()
    session.client.epoch = 5
    set_deadline(as_client(session.client), at)
    ((target, headers, payload, _),) = session.put
    assert (target, payload) == (b"HPUB %b " % session.timer.encode(), b"client")
    assert b"\r\nNats-Expected-Last-Subject-Sequence:0\r\n" in headers
    assert (b"Nats-Schedule:@at 2033-05-18T03:33:20" in headers) is (at is not None)


async def test_the_owner_of_the_record_replaces_a_timer() -> None:
    session = Session()
    session.client.epoch = await session.write()
    session.js.put(session.timer, b"client")
    await session.refused()
    ((target, headers, _, _),) = session.put
    assert target == b"HPUB %b " % session.timer.encode()
    assert b"Expected-Last" not in headers
    assert session.js.subjects("$MQTT_timers") == []


@pytest.mark.parametrize("how", ["moved", "ended", "poisoned"])
async def test_who_learns_late_that_the_session_has_moved_replaces_nothing(how: str) -> None:
    session = Session()
    session.client.epoch = await session.write()
    if how == "moved":
        await session.write()
    elif how == "ended":
        await session.services.streams.sessions.delete(session.client.hash, session.client.epoch)
    else:
        session.js.put(PREFIX + session.client.hash, b"no JSON")
    session.js.put(session.timer, b"of the later owner")
    before = session.js.subjects("$MQTT_timers")
    await session.refused()
    assert (session.put, session.js.subjects("$MQTT_timers")) == ([], before)


async def test_any_other_refusal_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    session = Session()
    await session.refused(ApiError(503, 10023, "insufficient resources"))
    assert session.put == []
    assert "the session of 'client' may not end in time: insufficient resources" in caplog.text


async def test_jetstream_does_not_say_whose_the_session_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session()

    def silent(subject: str) -> None:
        raise NoResponders("no leader")

    monkeypatch.setattr(session.js, "before", silent)
    await session.refused()
    assert session.put == []
    assert "the session of 'client' may not end in time: no leader" in caplog.text
