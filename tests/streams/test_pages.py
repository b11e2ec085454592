# SPDX-License-Identifier: Apache-2.0
"""Pages of a subject: the first one comes by direct get, all others through one consumer."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import pytest

from mqtt_streams import bans, fleet, gateways, messages, pages, quotas
from mqtt_streams.api import Reply
from mqtt_streams.bans import BanStore
from mqtt_streams.consumers import consumer_names, delete_consumer
from mqtt_streams.definitions import ensure_streams
from mqtt_streams.fleet import FleetStore
from mqtt_streams.gateways import GatewayStore
from mqtt_streams.pages import pages_of
from mqtt_streams.qos2 import releases_stored
from mqtt_streams.quotas import QuotaStore, note_subject
from mqtt_streams.repeats import find_ids
from mqtt_streams.shared import STREAM
from mqtt_streams.stored import rfc3339
from tests.streams.support import NatsPyJetStream

MANY = pages.PAGE_FIRST * 4 + 1
NOTES = note_subject("quota", "*")


class Counting(NatsPyJetStream):
    """Counts the direct gets, and the consumers that are created."""

    def __init__(self, js: NatsPyJetStream) -> None:
        super().__init__(js.client, js.api_prefix)
        self.direct = self.created = 0

    async def _answers(
        self, subject: str, payload: bytes, headers: bytes, timeout: float, inbox: str
    ) -> AsyncGenerator[Reply, None]:
        self.direct += ".DIRECT.GET." in subject
        self.created += ".CONSUMER.CREATE." in subject
        async for answer in super()._answers(subject, payload, headers, timeout, inbox):
            yield answer


async def fill(js: NatsPyJetStream, subject: Callable[[int], str], payload: bytes) -> None:
    """Store `MANY` messages."""
    await ensure_streams(js)
    for start in range(0, MANY, 100):
        some = range(start, min(start + 100, MANY))
        await asyncio.gather(*(js.request(subject(number), payload) for number in some))


async def notes(js: NatsPyJetStream) -> None:
    await fill(js, lambda number: note_subject("quota", f"{number:04}"), b"1")


async def test_a_long_subject_takes_one_direct_get(js: NatsPyJetStream) -> None:
    """All messages come, in order; the consumer is removed."""
    await notes(js)
    counting, found = Counting(js), []
    async for page in pages_of(counting, STREAM, NOTES, messages=300):
        assert 0 < len(page) <= 300
        found += [message.seq for message in page]
    assert len(found) == MANY
    assert found == sorted(found)
    assert (counting.direct, counting.created) == (1, 1)
    assert await consumer_names(js, STREAM) == []


async def test_a_short_subject_takes_no_consumer(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    counting = Counting(js)
    assert [page async for page in pages_of(counting, STREAM, NOTES)] == []
    await js.request(note_subject("quota", "key"), b"1")
    assert [len(page) async for page in pages_of(counting, STREAM, NOTES)] == [1]
    assert (counting.direct, counting.created) == (2, 0)


async def test_where_the_pages_begin(js: NatsPyJetStream) -> None:
    """At a sequence, or at a time."""
    await notes(js)
    every = [message async for page in pages_of(js, STREAM, NOTES) for message in page]
    first = every[500]
    for start in ({"seq": first.seq}, {"start_time": rfc3339(first.time_ns)}):
        assert [message async for page in pages_of(js, STREAM, NOTES, start) for message in page] == every[500:]


async def test_a_caller_that_stops_leaves_no_consumer(js: NatsPyJetStream) -> None:
    await notes(js)
    async with aclosing(pages_of(js, STREAM, NOTES, messages=10)) as every:
        await anext(every)
        await anext(every)
        assert len(await consumer_names(js, STREAM)) == 1
    assert await consumer_names(js, STREAM) == []


async def test_a_lost_consumer_is_replaced(js: NatsPyJetStream) -> None:
    """The next page comes by direct get, the page after that through another consumer."""
    await notes(js)
    counting, lost, found = Counting(js), False, 0
    async for page in pages_of(counting, STREAM, NOTES, messages=100):
        found += len(page)
        for name in () if lost else await consumer_names(js, STREAM):
            await delete_consumer(js, STREAM, name)
            lost = True
    assert found == MANY
    assert (counting.direct, counting.created) == (2, 2)


async def _ids(js: NatsPyJetStream) -> None:
    assert await find_ids(js, 0.0, [b"unknown"]) == ({}, True)


async def _releases(js: NatsPyJetStream) -> None:
    assert await releases_stored(js, "a", {"unknown"}, 0) == set()


async def _totals(js: NatsPyJetStream) -> None:
    assert (await QuotaStore(js).totals("quota", 1)).sessions == MANY


async def _bans(js: NatsPyJetStream) -> None:
    assert len(await BanStore(js).all()) == MANY


async def _wishes(js: NatsPyJetStream) -> None:
    assert len(await FleetStore(js).all()) == MANY


async def _entries(js: NatsPyJetStream) -> None:
    assert len(await GatewayStore(js).entries()) == MANY


async def _oldest(js: NatsPyJetStream) -> None:
    assert len(await GatewayStore(js).oldest()) == MANY


async def _registrations(js: NatsPyJetStream) -> None:
    assert len(await GatewayStore(js).registrations()) == MANY


@pytest.mark.parametrize(
    ("subject", "payload", "walk"),
    [
        (f"{messages.PREFIX}a.%d", b"x", _ids),
        (f"{messages.PREFIX}a", b"x", _releases),
        (f"{quotas.PREFIX}quota.%d", b"1", _totals),
        (f"{bans.PREFIX}client.%d", b'{"kind":"client","value":"a","until":0}', _bans),
        (f"{fleet.PREFIX}plugin.%d", b'{"kind":"plugin","id":"a"}', _wishes),
        (f"{gateways.PREFIX}gateway.%d", b'{"alive":1}', _entries),
        (f"{gateways.PREFIX}gateway.%d", b'{"alive":1}', _oldest),
        (f"{gateways.PREFIX}gateway.%d", b'{"alive":1}', _registrations),
    ],
)
async def test_each_long_walk_takes_one_direct_get(
    js: NatsPyJetStream, subject: str, payload: bytes, walk: Callable[[NatsPyJetStream], Awaitable[None]]
) -> None:
    await fill(js, lambda number: subject.replace("%d", f"{number}"), payload)
    counting = Counting(js)
    await walk(counting)
    assert (counting.direct, counting.created) == (1, 1)
