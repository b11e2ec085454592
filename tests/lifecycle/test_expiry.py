# SPDX-License-Identifier: Apache-2.0
"""A session whose deadline has passed: which record ends it, and what an interruption leaves."""

from __future__ import annotations

from typing import cast

import pytest

from mqtt_nats.hooks.points import SESSION_TERMINATED
from mqtt_nats.lifecycle.expiry import expire
from mqtt_nats.lifecycle.will import Wills
from mqtt_nats.sessions.record import Exchanges, list_exchanges
from mqtt_streams.api import RequestTimeout
from mqtt_streams.hashing import name_hash
from mqtt_streams.sessions import PREFIX, V5, SessionRecord
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.timers import EXPIRY, FiredTimer
from tests.lifecycle.fakes import FakeEndingWills
from tests.sessions.fakes import as_services

pytestmark = [pytest.mark.sources, pytest.mark.anyio]

KEY = name_hash("client")


class Absent:
    """A session without a connection, and the timer of its deadline, which has fired."""

    def __init__(self) -> None:
        self.wills = FakeEndingWills()
        self.js = self.wills.services.fake_inbox
        self.record = SessionRecord("client", v5=V5(kind="durable", expiry=60, pos="p", q2=True))
        self.epoch = self.js.put(PREFIX + KEY, self.record.encode())
        self.js.put("$MQTT.pos." + KEY)

    async def expire(self, *, listed: bool = True) -> None:
        exchanges: Exchanges | None = None
        if listed:
            exchanges = await list_exchanges(as_services(self.wills.services))
        timer = FiredTimer(EXPIRY, KEY, self.epoch, 1, b"", b"client", "")
        await expire(cast(Wills, self.wills), timer, exchanges)

    @property
    def left(self) -> dict[str, int]:
        return {name: len(some) for name, some in self.js.messages.items() if some}


@pytest.mark.parametrize("listed", [True, False])
async def test_all_of_it_goes(listed: bool) -> None:
    """Also when the exchanges of all sessions are too many to be listed."""
    absent = Absent()
    await absent.expire(listed=listed)
    assert absent.left == {}
    assert absent.wills.services.quotas.fake_forgotten == ["client"]


async def test_a_session_takes_few_requests() -> None:
    """Beside three for all sessions: record and position are read, the record is claimed, both are removed."""
    absent = Absent()
    await absent.expire()
    assert [subject.removeprefix("$JS.API.") for subject in absent.js.asked[3:]] == [
        "DIRECT.GET.$MQTT_sess",
        "DIRECT.GET.$MQTT_pos",
        PREFIX + KEY,
        "STREAM.PURGE.$MQTT_pos",
        "STREAM.PURGE.$MQTT_sess",
    ]


@pytest.mark.parametrize("asked", ["DIRECT.GET.$MQTT_sess", "DIRECT.GET.$MQTT_pos", PREFIX])
async def test_a_session_that_goes_on_at_this_moment_stays(asked: str) -> None:
    """A client has claimed it before one of the requests up to the claim of its end is carried out."""
    absent = Absent()

    def claim(subject: str) -> None:
        if asked in subject:
            absent.js.before = lambda subject: None
            absent.js.messages[SESSIONS].clear()
            absent.js.put(PREFIX + KEY, absent.record.encode())

    absent.js.before = claim
    await absent.expire()
    assert absent.left == {SESSIONS: 1, "$MQTT_pos": 1}


@pytest.mark.parametrize("lost", ["PURGE.$MQTT_pos", "PURGE.$MQTT_sess", PREFIX])
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("lagging", [True, False])
async def test_what_was_interrupted_is_done_when_the_timer_comes_again(
    lost: str, done: bool, lagging: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the request without an answer was carried out or not, and whichever record a replica still has."""
    absent = Absent()

    def fail(subject: str) -> None:
        if lost in subject:
            absent.js.before = absent.js.after = lambda subject: None
            raise RequestTimeout("no answer")

    if done:
        absent.js.after = fail
    else:
        absent.js.before = fail
    with pytest.raises(RequestTimeout):
        await absent.expire()
    if lagging:

        async def former(key: str, sequence: int) -> SessionRecord | None:
            return absent.record

        monkeypatch.setattr(absent.wills.services.streams.sessions, "written_at", former)
    await absent.expire()
    assert absent.left == {}


@pytest.mark.parametrize("done", [True, False])
async def test_hooks_are_told_of_an_end_without_an_answer(done: bool) -> None:
    """The write that ends the session may have been carried out: then the timer finds it ended when it comes again."""
    absent = Absent()
    told: list[str] = []
    absent.wills.services.hooks.add(SESSION_TERMINATED, lambda event: told.append(event.client_id))

    def fail(subject: str) -> None:
        if subject.startswith(PREFIX):
            absent.js.before = absent.js.after = lambda subject: None
            raise RequestTimeout("no answer")

    if done:
        absent.js.after = fail
    else:
        absent.js.before = fail
    with pytest.raises(RequestTimeout):
        await absent.expire()
    assert told == []
    await absent.expire()
    assert told == ["client"]


async def test_a_record_that_no_replica_names() -> None:
    """Where direct gets are not answered the leader is asked."""
    absent = Absent()

    def refuse(subject: str) -> None:
        if subject.endswith("DIRECT.GET.$MQTT_sess"):
            absent.js.messages[SESSIONS][0] = absent.js.messages[SESSIONS][0]._replace(subject=PREFIX + "elsewhere")
        elif subject.endswith("STREAM.MSG.GET.$MQTT_sess"):
            absent.js.messages[SESSIONS][0] = absent.js.messages[SESSIONS][0]._replace(subject=PREFIX + KEY)

    absent.js.before = refuse
    await absent.expire()
    assert absent.left == {}
