# SPDX-License-Identifier: Apache-2.0
"""State of JetStream for metrics: what is not answered is missing, and the rest is there nevertheless."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mqtt_nats.base import server_clock as natstime
from mqtt_nats.observability import jetstream_state as module
from mqtt_nats.observability.jetstream_state import JetStreamState, StreamState, jetstream_state, storage, stream_state
from mqtt_streams.account import AccountStorage
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.definitions import EVERY
from mqtt_streams.gateways import Entry
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.timers import EXPIRY, timer_subject
from mqtt_streams.timers import STREAM as TIMERS
from mqtt_streams.wills import will_subject
from tests.sessions.fakes import FakeInbox, FakeServices, as_inbox

INFO: dict[str, Any] = {
    "config": {"max_age": 86_400_000_000_000},
    "state": {"messages": 3, "bytes": 70, "consumer_count": 2},
}
SCHEDULED = b"NATS/1.0\r\nNats-Schedule: @at 2026-01-01T00:00:00Z\r\n\r\n"


class Account(FakeInbox):
    """JetStream in memory that also tells of its account."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = 1000
        self.missing: set[str] = set()

    def _api(self, tokens: list[str], body: dict[str, Any]) -> dict[str, Any]:
        match tokens:
            case ["INFO"]:
                return {"storage": self.storage, "limits": {"max_storage": 5000}}
            case ["STREAM", "INFO", name] if name in self.missing:
                raise ApiError(404, 10059, "stream not found")
            case ["STREAM", "INFO", _]:
                return INFO
        return super()._api(tokens, body)

    def silent(self, *words: str, error: type[Exception] = RequestTimeout) -> None:
        """Give no answer to requests whose subject has one of these words."""

        def before(subject: str) -> None:
            if any(word in subject for word in words):
                raise error

        self.before = before


class Services(FakeServices):
    """Services with such a JetStream, and gateways that are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.js = Account()
        self.nats.inbox = as_inbox(self.js)
        self.gateways: list[Entry] = []

    async def registered(self) -> list[Entry]:
        return self.gateways

    async def state(self) -> JetStreamState:
        return await jetstream_state(self.nats, self.registered)


@pytest.fixture
def services() -> Services:
    return Services()


def gateway(identity: str, *, lapsed: bool = False, reaper: str = "") -> Entry:
    return Entry(identity, 0.0, {}, 1, lapsed, reaper)


async def test_everything_that_jetstream_answers(services: Services) -> None:
    found = await services.state()
    assert found.streams == dict.fromkeys(EVERY, StreamState(True, 3, 70, 2, 0, 0, 86_400.0))
    assert (found.storage, found.dead, found.with_wills) == (AccountStorage(1000, 5000), 0, 0)
    assert (found.absent, found.retention) == (0.0, 86_400.0)


async def test_nothing_is_asked_while_nats_is_lost(services: Services) -> None:
    services.nats.online.clear()
    assert await services.state() == JetStreamState({})
    assert await storage(services.nats) is None
    assert services.js.asked == []


async def test_a_stream_without_an_answer_is_not_available_and_one_that_does_not_exist_is_missing(
    services: Services,
) -> None:
    services.js.missing.add(TIMERS)
    services.js.silent(f"STREAM.INFO.{MESSAGES}")
    found = await services.state()
    assert found.streams.keys() == set(EVERY) - {TIMERS}
    assert found.streams[MESSAGES] == StreamState(False)
    assert found.retention is None
    assert found.storage is not None


@pytest.mark.parametrize("error", [RequestTimeout, NoResponders])
async def test_each_part_without_an_answer_is_unknown_alone(services: Services, error: type[Exception]) -> None:
    services.js.silent("API.INFO", TIMERS, error=error)
    found = await services.state()
    assert (found.storage, found.absent, found.dead) == (None, None, 0)

    async def unknown() -> list[Entry]:
        raise error

    found = await jetstream_state(services.nats, unknown)
    assert (found.dead, found.with_wills) == (None, None)


@pytest.mark.parametrize(
    ("streams", "seconds"),
    [({MESSAGES: StreamState(True, max_age=60.0)}, 60.0), ({MESSAGES: StreamState(True)}, math.inf), ({}, None)],
)
def test_retention(streams: dict[str, StreamState], seconds: float | None) -> None:
    assert JetStreamState(streams).retention == seconds


def test_replicas_that_are_behind() -> None:
    replicas = [
        {"current": True, "lag": 3},
        {"current": False, "lag": 40},
        {"current": True, "offline": True},
    ]
    found = stream_state(INFO | {"cluster": {"leader": "one", "replicas": replicas}})
    assert (found.available, found.behind, found.lag) == (True, 2, 40)
    assert not stream_state(INFO | {"cluster": {"leader": "", "replicas": replicas}}).available


# -- storage ----------------------------------------------------------------------------------------------


async def test_the_storage_is_asked_for_once_a_minute(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await storage(services.nats) == AccountStorage(1000, 5000)
    services.js.storage = 2000
    assert await storage(services.nats) == AccountStorage(1000, 5000)
    assert len(services.js.asked) == 1
    monkeypatch.setattr(module, "STORAGE_S", 0.0)
    assert await storage(services.nats) == AccountStorage(2000, 5000)


async def test_an_answer_that_did_not_come_is_asked_for_again(services: Services) -> None:
    services.js.silent("API.INFO")
    assert await storage(services.nats) is None
    services.js.silent()
    assert await storage(services.nats) == AccountStorage(1000, 5000)


# -- dead gateways ----------------------------------------------------------------------------------------


async def test_a_gateway_is_dead_until_another_one_has_dealt_with_its_clients(services: Services) -> None:
    services.gateways = [gateway("alive"), gateway("lapsed", lapsed=True), gateway("reaped", reaper="alive")]
    services.js.put(will_subject("reaped", "client"))
    services.js.put(will_subject("alive", "client"))
    found = await services.state()
    assert (found.dead, found.with_wills) == (2, 1)


async def test_wills_of_many_dead_gateways_are_not_all_looked_for(services: Services) -> None:
    services.gateways = [gateway(f"gone{number}", lapsed=True) for number in range(module.DEAD_MOST + 5)]
    for one in services.gateways:
        services.js.put(will_subject(one.identity, "client"))
    found = await services.state()
    assert (found.dead, found.with_wills) == (module.DEAD_MOST + 5, module.DEAD_MOST)


# -- absent sessions --------------------------------------------------------------------------------------


def leaves(services: Services, name: str, seconds_ago: float, *, expires: bool = True) -> None:
    """The connection of a session ends: its timer is set."""
    services.js.now = int((natstime.now() - seconds_ago - 1) * 1e9)  # each store is a second later
    services.js.put(timer_subject(EXPIRY, name), b"", SCHEDULED if expires else b"")


async def test_the_session_that_was_absent_longest(services: Services) -> None:
    leaves(services, "never", 900, expires=False)
    leaves(services, "long", 500)
    leaves(services, "short", 5)
    assert (await services.state()).absent == pytest.approx(500, abs=10)


async def test_sessions_that_do_not_expire_are_passed_once(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE", 2)
    for number in range(5):
        leaves(services, f"never-{number}", 900, expires=False)
    assert (await services.state()).absent == 0.0
    pages = [one for one in services.js.asked if "DIRECT.GET" in one and TIMERS in one]
    assert len(pages) > 2
    services.js.asked.clear()
    leaves(services, "late", 50)
    assert (await services.state()).absent == pytest.approx(50, abs=10)
    assert len([one for one in services.js.asked if "DIRECT.GET" in one and TIMERS in one]) < len(pages)
