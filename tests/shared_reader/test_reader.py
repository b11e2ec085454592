# SPDX-License-Identifier: Apache-2.0
"""When the shared reader changes what it reads."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import orjson
import pytest

from mqtt_nats.backbone.connect import NatsLinks
from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.sessions.message_stream import StreamHead
from mqtt_nats.shared_reader import reader as reading
from mqtt_nats.shared_reader.filters import FILTERS_MOST, FilterSet
from mqtt_nats.shared_reader.reader import (
    CHANGE_PAUSE,
    FILTERED_FRACTION,
    NARROWING_PAUSE_LEAST_S,
    SAMPLE_MESSAGES,
    UNFILTERED_FRACTION,
    SharedReader,
)
from mqtt_streams.api import Reply, RequestTimeout
from mqtt_streams.messages import PREFIX
from tests.harness.doubles import stands_for
from tests.harness.waiting import aeventually
from tests.sessions.fakes import as_services
from tests.shared_reader.fakes import FakeReaderServices


@stands_for(RequestInbox)
class FakeServer:
    """Stands for `RequestInbox`: the reader's consumer. A request may not be carried out, or not be answered."""

    api_prefix = "$JS.API"
    max_ack_pending = 0

    def __init__(self) -> None:
        self.fake_filters: list[str] = []
        self.fake_lost = self.fake_unanswered = False

    async def request(self, subject: str, payload: bytes = b"", headers: bytes = b"", **_: object) -> Reply:
        if ".CREATE." in subject:
            if self.fake_lost:
                raise RequestTimeout("lost")
            self.fake_filters = orjson.loads(payload)["config"]["filter_subjects"]
            if self.fake_unanswered:
                raise RequestTimeout("not answered")
        return Reply("", b"", b"{}")


@stands_for(StreamHead)
class FakeHead:
    """Stands for `StreamHead`: the last sequence of the stream."""

    def __init__(self) -> None:
        self.fake_last = 100

    async def state(self) -> dict[str, Any]:
        return {"last_seq": self.fake_last}


class Reading:
    """A reader without its task: what that does at a time is :meth:`keep`."""

    def __init__(self, *filters: str) -> None:
        self.server, self.head = FakeServer(), FakeHead()
        self.services = FakeReaderServices()
        others = self.services.nats
        inbox = cast(RequestInbox, self.server)
        self.services.nats = NatsLinks(others.link, others.wild, others.shared, inbox, others.store)
        self.services.head = cast(StreamHead, self.head)
        self.reader = SharedReader(as_services(self.services), lambda *message: None)
        self.want(*filters)

    def want(self, *filters: str) -> None:
        self.reader.wanted.clear()
        self.reader.wanted.update(PREFIX + one for one in filters)

    async def keep(self, *, lost: bool = False, unanswered: bool = False) -> None:
        self.server.fake_lost, self.server.fake_unanswered = lost, unanswered
        with contextlib.suppress(RequestTimeout):
            await self.reader._keep()

    async def ready(self, **how: bool) -> asyncio.Task[int]:
        """Somebody asks, and it is kept once."""
        asking = asyncio.create_task(self.reader.ready())
        await asyncio.sleep(0)
        await self.keep(**how)
        await asyncio.sleep(0)
        return asking

    async def stored(self, count: int, used: int, brought: int | None = None, **how: bool) -> None:
        """So many messages come by, some of which are wanted; ``brought``: those that the reader gets, if more."""
        self.reader.position += count
        self.head.fake_last = self.reader.position
        self.reader.used += used
        self.reader._next += used if brought is None else brought
        await self.keep(**how)

    @property
    def read(self) -> list[str]:
        return [one.removeprefix(PREFIX) for one in self.server.fake_filters]


@pytest.fixture(autouse=True)
def pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few filters may be changed at any time."""
    monkeypatch.setattr(reading, "CHANGE_PAUSE_LEAST", 0.0)
    monkeypatch.setattr(reading, "CHANGE_PAUSE", 0.0)


@pytest.mark.sources
async def test_what_is_wanted_decides() -> None:
    one = Reading("a")
    assert (await one.ready()).done()
    assert one.read == ["a"]
    await one.stored(SAMPLE_MESSAGES, int(SAMPLE_MESSAGES * UNFILTERED_FRACTION))
    assert one.read == ["a"], "not more than that"
    await one.stored(SAMPLE_MESSAGES, SAMPLE_MESSAGES)
    assert one.read == [">"]
    await one.stored(SAMPLE_MESSAGES, int(SAMPLE_MESSAGES * (FILTERED_FRACTION + UNFILTERED_FRACTION) / 2))
    assert one.read == [">"]
    await one.stored(SAMPLE_MESSAGES - 1, 0)
    assert one.read == [">"], "too few to say"
    await one.stored(1, int(SAMPLE_MESSAGES * FILTERED_FRACTION))
    assert one.read == ["a"]
    one.want()
    await one.stored(SAMPLE_MESSAGES, 0)
    assert one.read == ["$MQTT"]
    one.want("b")
    assert (await one.ready()).done()
    assert one.read == ["b"]


@pytest.mark.sources
async def test_fewer_filters_that_are_not_answered() -> None:
    """They may be read or not: whoever comes then is not told that its own is."""
    one = Reading("a")
    await one.ready()
    one.want()
    await one.stored(SAMPLE_MESSAGES, 0, unanswered=True)
    assert one.read == ["$MQTT"]
    one.want("a")
    assert (await one.ready()).done()
    assert one.read == ["a"]


async def test_other_filters_that_are_not_answered() -> None:
    one = Reading("a", "b")
    await one.ready()
    one.want("a", "c")
    asking = await one.ready(unanswered=True)
    assert not asking.done()
    asking.cancel()
    one.want("a", "b")
    assert (await one.ready()).done()
    assert sorted(one.read) == ["a", "b"]


async def test_who_has_gone_is_no_reason_to_choose() -> None:
    one = Reading("a")
    await one.ready()
    one.want("a", "b")
    asking = asyncio.create_task(one.reader.ready())
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.sleep(0)
    one.want()
    await one.keep()
    assert one.read == ["a"]


@pytest.mark.sources
@pytest.mark.parametrize("how", ["lost", "unanswered"])
async def test_a_change_of_mind_is_tried_again(how: str) -> None:
    one = Reading("a")
    await one.ready()
    await one.stored(SAMPLE_MESSAGES, SAMPLE_MESSAGES, **{how: True})
    await one.keep()
    assert one.read == [">"]
    await one.stored(SAMPLE_MESSAGES, 0, **{how: True})
    await one.keep()
    assert one.read == ["a"]


async def test_a_reader_that_is_made_again() -> None:
    """Its consumer may have gone with the stream: that is looked at first, as the advisory may have been lost."""
    one = Reading("a")
    await one.ready()
    assert one.services.stream.fake_checks == 0
    one.reader.broken()
    await one.keep()
    assert one.services.stream.fake_checks == 1


@pytest.mark.sources
async def test_a_reader_whose_server_may_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without heartbeats after an election it is made again soon; heartbeats in between do not end the suspicion."""
    monkeypatch.setattr(reading, "READER_SILENCE_S", 60.0)
    monkeypatch.setattr(reading, "HEARTBEAT", 0.01)
    monkeypatch.setattr(reading, "SUSPICIOUS_SILENCE_S", 0.1)
    one = Reading("a")
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(one.reader.run())
    await one.reader.ready()
    former = one.reader.name
    await asyncio.sleep(0.2)
    assert one.reader.name == former, "nobody suspects it"
    one.services.clock.now = loop.time()
    one.reader._arrived(b"", b"", b"NATS/1.0 100\r\nNats-Last-Consumer:0\r\nNats-Last-Stream:100\r\n\r\n", b"")
    one.reader.suspect()
    await asyncio.sleep(0.03)
    assert one.reader.name == former
    await aeventually(lambda: one.reader.name != former)
    running.cancel()


@pytest.mark.sources
async def test_filters_of_those_that_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay until more than half of what is brought is not wanted, and are looked at seldom."""
    one = Reading("a", "b")
    await one.ready()
    one.want("a")
    await one.stored(SAMPLE_MESSAGES, 100, 200)
    assert one.read == ["a", "b"]
    await one.stored(SAMPLE_MESSAGES, 100, 201)
    assert one.read == ["a"]
    one.want("c")
    assert (await one.ready()).done()
    await one.stored(SAMPLE_MESSAGES, 0, 100)
    one.want("d")
    await one.stored(SAMPLE_MESSAGES, 0, 100)
    assert one.read == ["c"]
    monkeypatch.setattr(one.reader, "_narrowed", one.reader._narrowed - NARROWING_PAUSE_LEAST_S)
    await one.stored(SAMPLE_MESSAGES, 0, 100)
    assert one.read == ["d"]


async def test_what_covers_is_enough() -> None:
    one = Reading("a.>")
    await one.ready()
    one.want("a.>", "a.b")
    one.server.fake_filters = []
    assert (await one.ready()).done()
    assert one.read == [], "nothing was changed"


@pytest.mark.sources
async def test_a_filter_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of clients may connect at once, each with filters of its own."""
    compared: list[str] = []
    covers = FilterSet.covers

    def count(self: FilterSet, text: str) -> bool:
        compared.append(text)
        return covers(self, text)

    one = Reading("a.>")
    await one.ready()
    monkeypatch.setattr(FilterSet, "covers", count)
    for number in range(200):
        one.reader.wanted[f"{PREFIX}a.{number}"] = 1
        assert (await one.ready()).done()
    assert len(compared) == len(set(compared)) == 201
    one.want("a.>")
    assert (await one.ready()).done()
    one.want("b")
    assert (await one.ready()).done()
    assert one.read == ["b"]


async def test_many_filters_are_not_changed_for_each_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change costs nats-server the square of their number; those that come meanwhile share one."""
    monkeypatch.setattr(reading, "CHANGE_PAUSE", CHANGE_PAUSE)
    one = Reading(*(f"device{number}" for number in range(FILTERS_MOST - 3)))
    assert (await one.ready()).done()
    assert len(one.read) == FILTERS_MOST - 3
    asked = []
    for name in "abc":
        one.reader.wanted[PREFIX + name] = 1
        asked.append(await one.ready())
    assert not any(each.done() for each in asked)
    assert len(one.read) == FILTERS_MOST - 3
    monkeypatch.setattr(one.reader, "_changeable", 0.0)
    await one.keep()
    await asyncio.sleep(0)
    assert all(each.done() for each in asked)
    assert len(one.read) == FILTERS_MOST


async def test_sessions_that_subscribe_at_the_same_time_share_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose filters are read already do not wait for it."""
    monkeypatch.setattr(reading, "CHANGE_PAUSE_LEAST", 60.0)
    one = Reading("a")
    assert (await one.ready()).done()
    assert (await one.ready()).done()
    asked = []
    for name in "bc":
        one.reader.wanted[PREFIX + name] = 1
        asked.append(await one.ready())
    assert not any(each.done() for each in asked)
    assert one.read == ["a"]
    monkeypatch.setattr(one.reader, "_changeable", 0.0)
    await one.keep()
    await asyncio.sleep(0)
    assert all(each.done() for each in asked)
    assert one.read == ["a", "b", "c"]


async def test_a_reader_with_many_filters_is_made_again_at_once() -> None:
    one = Reading(*(f"device{number}" for number in range(FILTERS_MOST)))
    await one.ready()
    one.want("a")
    one.reader.broken()
    assert (await one.ready()).done()
    assert one.read == ["a"]
