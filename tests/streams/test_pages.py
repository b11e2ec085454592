# SPDX-License-Identifier: Apache-2.0
"""Pages of a subject: the first one comes by direct get, all others through one consumer."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import orjson
import pytest

from mqtt_streams import bans, fleet, gateways, headers, messages, pages, quotas
from mqtt_streams.api import NoResponders, Reply, publish
from mqtt_streams.bans import BanStore
from mqtt_streams.consumers import consumer_names, delete_consumer
from mqtt_streams.definitions import ensure_streams
from mqtt_streams.fleet import FleetStore
from mqtt_streams.gateways import GatewayStore
from mqtt_streams.pages import pages_of
from mqtt_streams.qos2 import releases_stored
from mqtt_streams.quotas import QuotaStore, note_subject
from mqtt_streams.repeats import find_stored_keys
from mqtt_streams.shared import STREAM
from mqtt_streams.stored import all_of, get_last, remove, rfc3339
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
    assert await find_stored_keys(js, [b"unknown"], 0.0) == ({}, True)


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
    ],
)
async def test_each_long_walk_takes_one_direct_get(
    js: NatsPyJetStream, subject: str, payload: bytes, walk: Callable[[NatsPyJetStream], Awaitable[None]]
) -> None:
    await fill(js, lambda number: subject.replace("%d", f"{number}"), payload)
    counting = Counting(js)
    await walk(counting)
    assert (counting.direct, counting.created) == (1, 1)


# -- records that were replaced, and not removed --------------------------------------------------------


@pytest.mark.parametrize("first", [2, 5, pages.PAGE_FIRST])
async def test_only_the_last_record_of_a_subject_counts(
    js: NatsPyJetStream, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """A nats-server that was killed has stored a record, and not removed the one before."""
    monkeypatch.setattr(pages, "PAGE_FIRST", first)
    await ensure_streams(js)
    for number in (1, 2, 3, 1, 4, 3, 5, 1):
        await js.request(note_subject("quota", str(number)), b"%d" % number)
    found = [page async for page in pages_of(js, STREAM, NOTES, newest=True, messages=first)]
    assert [one.payload for page in found for one in page] == [b"2", b"4", b"3", b"5", b"1"]
    totals = await QuotaStore(js).totals("quota", 10)
    assert (totals.sessions, totals.consumers) == (5, 15)
    assert list(totals.oldest) == ["2", "4", "3", "5", "1"]


async def test_a_record_that_is_replaced_while_it_is_read_is_found(
    js: NatsPyJetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGE_FIRST", 1)
    await ensure_streams(js)
    for number in (9, 1, 2, 1, 2):
        await js.request(note_subject("quota", str(number)), b"old")
    found: dict[str, bytes] = {}
    async with aclosing(pages_of(js, STREAM, NOTES, newest=True, messages=1)) as every:
        async for page in every:
            if not found:
                await js.request(note_subject("quota", "1"), b"new", headers.REPLACING)
                assert await remove(js, STREAM, note_subject("quota", "2"), 5)
            found |= {one.subject.rpartition(".")[2]: one.payload for one in page}
    assert found == {"9": b"old", "1": b"new"}


async def test_removal_of_a_record_removes_those_before(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    subject = note_subject("quota", "1")
    sequences = [await publish(js, subject, b"%d" % number) for number in range(3)]
    assert await remove(js, STREAM, subject, sequences[1])
    assert await all_of(js, STREAM, subject) == [await get_last(js, STREAM, subject)]
    assert await remove(js, STREAM, subject, sequences[2])
    assert not await remove(js, STREAM, subject, sequences[2])
    assert await get_last(js, STREAM, subject) is None


async def test_a_stream_that_is_not_there(js: NatsPyJetStream) -> None:
    """The same as for a reader of all messages."""
    with pytest.raises(NoResponders):
        _ = [page async for page in pages_of(js, STREAM, NOTES, newest=True)]


async def test_bans_wishes_and_gateways_that_were_written_again(js: NatsPyJetStream) -> None:
    """Of each the last record counts, although former ones are there."""
    await ensure_streams(js)
    for until, lifted in ((0, False), (0, True)):
        body = {"kind": "user", "value": "mallory", "until": until, "lifted": lifted}
        await js.request(bans.ban_subject("user", "mallory"), orjson.dumps(body))
    assert [(one["value"], one["lifted"]) for one in await BanStore(js).all()] == [("mallory", True)]
    for identity in ("first", "second"):
        wish = fleet.Wish("reload", identity)
        await js.request(fleet.wish_subject(wish), orjson.dumps({"kind": "reload", "id": identity}))
    assert [wish.identity for wish in await FleetStore(js).all()] == ["second"]
    for alive in (1.0, 2.0):
        await js.request(f"{gateways.PREFIX}gateway.aaaaaaaa", orjson.dumps({"alive": alive}))
    for found in (await GatewayStore(js).entries(), await GatewayStore(js).oldest()):
        assert [(one.identity, one.alive) for one in found] == [("aaaaaaaa", 2.0)]
