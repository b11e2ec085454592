# SPDX-License-Identifier: Apache-2.0
"""Retained messages: formats, and reading them back from a real server."""

import base64
import time
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_streams import headers, pages, retained, stored
from mqtt_streams.api import NoLeader, NoResponders, Reply, call, publish
from mqtt_streams.consumers import consumer_names, delete_consumer
from mqtt_streams.definitions import ensure_streams
from mqtt_streams.retained import (
    STREAM,
    RetainedMessage,
    RetainedStore,
    parse,
    retained_subject,
    set_block,
    tombstone_block,
)
from mqtt_streams.stored import StoredMessage
from mqtt_streams.subjects import encode_topic, filter_to_subjects
from tests.harness.jetstream import MemoryJetStream
from tests.streams.support import Lagging, NatsPyJetStream, eventually

ORIGIN = "7BA7vU7Z"


def test_same_bytes_as_nats_server_behind_the_rollup() -> None:
    assert set_block("dev/2/temp", 3, ORIGIN) == (
        b"NATS/1.0\r\nNats-Rollup:sub\r\nNmqtt-RTopic:dev/2/temp\r\nNmqtt-RFlags:3\r\nNmqtt-ROrigin:7BA7vU7Z\r\n\r\n"
    )
    assert tombstone_block("ret/q0", ORIGIN) == (
        b"NATS/1.0\r\nNats-Rollup:sub\r\nNmqtt-RTopic:ret/q0\r\nNmqtt-RFlags:-1\r\nNmqtt-ROrigin:7BA7vU7Z\r\n\r\n"
    )


def test_further_lines() -> None:
    block = set_block("a", 1, ORIGIN, b"Nmqtt-RSource:bob\r\nNats-TTL:5s\r\n")
    assert headers.parse(block)[-2:] == [("Nmqtt-RSource", "bob"), ("Nats-TTL", "5s")]
    assert block.endswith(b"\r\n\r\n")


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0+#"), min_size=1))
def test_no_topic_breaks_the_block(topic: str) -> None:
    for block in (set_block(topic, 1, ORIGIN), tombstone_block(topic, ORIGIN)):
        names = [name for name, _ in headers.parse(block)]
        assert names == ["Nats-Rollup", "Nmqtt-RTopic", "Nmqtt-RFlags", "Nmqtt-ROrigin"]


@pytest.mark.parametrize(("flags", "qos"), [(1, 0), (3, 1), (5, 2), (0xB, 1)])
def test_parse(flags: int, qos: int) -> None:
    block = set_block("a/b", flags, ORIGIN)
    assert parse(StoredMessage("$MQTT.rmsgs.a.b", 7, 9, block, b"x")) == RetainedMessage("a.b", qos, b"x", block, 7, 9)


def test_a_subject_that_is_no_text() -> None:
    """Nobody could subscribe it: it is not shown under another name."""
    block = set_block("a", 3, ORIGIN)
    assert parse(StoredMessage("$MQTT.rmsgs.a.\udcff", 7, 9, block, b"x")) is None
    assert parse(StoredMessage("$MQTT.rmsgs.a.\u00ff\U0001f600", 7, 9, block, b"x")) is not None


def test_the_older_json_body() -> None:
    body = {"origin": ORIGIN, "subject": "a", "topic": "a", "msg": base64.b64encode(b"old").decode(), "flags": 3}
    assert parse(StoredMessage("$MQTT.rmsgs.a", 1, 2, b"", orjson.dumps(body))) == RetainedMessage(
        "a", 1, b"old", b"", 1, 2
    )


@pytest.mark.parametrize(
    ("block", "payload"),
    [
        (tombstone_block("a", ORIGIN), b""),
        (tombstone_block("a", ORIGIN), b"x"),
        (set_block("a", 3, ORIGIN), b""),
        (headers.build([("Nmqtt-RFlags", "7")]), b"x"),
        (headers.build([("Nmqtt-RFlags", "zz")]), b"x"),
        (headers.build([("Nmqtt-RFlags", "")]), b"x"),
        (headers.build([("Nats-Marker-Reason", "MaxAge")]), b""),
        (b"", b"plain"),
        (b"", b"[]"),
        (b"", b"{}"),
        (b"", b'{"msg":7}'),
        (b"", b'{"msg":"*"}'),
        (b"", b'{"msg":"eA==","flags":15}'),
        (b"", b'{"msg":"eA==","flags":"1"}'),
        (b"", b'{"msg":"","flags":1}'),
    ],
)
def test_what_is_no_message(block: bytes, payload: bytes) -> None:
    assert parse(StoredMessage("$MQTT.rmsgs.a", 1, 2, block, payload)) is None


async def put(js: NatsPyJetStream, topic: str, payload: bytes = b"x", lines: bytes = b"") -> int:
    return await publish(js, retained_subject(encode_topic(topic)), payload, set_block(topic, 3, ORIGIN, lines))


async def topics(store: RetainedStore, topic_filter: str, start_seq: int = 0) -> list[list[str]]:
    found = []
    async for page in store.matching(filter_to_subjects(topic_filter)[0], start_seq):
        found.append([message.subject for message in page])
    return found


async def test_get(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = RetainedStore(js)
    assert await store.get("a.b") is None
    await put(js, "a/b", b"1")
    seq = await put(js, "a/b", b"2")
    message = await store.get("a.b")
    assert message is not None
    assert (message.subject, message.qos, message.payload, message.seq) == ("a.b", 1, b"2", seq)
    assert abs(message.time_ns / 1e9 - time.time()) < 5
    assert headers.get(message.headers, "Nmqtt-RTopic") == "a/b"
    assert [page async for page in store.matching("a.b")] == [[message]]
    assert [page async for page in store.matching("a.b", seq + 1)] == []


async def test_a_replica_that_lags(js: NatsPyJetStream) -> None:
    """What was acknowledged before is found, each message once; nothing else than one replica could have told."""
    await ensure_streams(js)
    old = [await put(js, f"a/{number}", b"%d" % number) for number in range(5)]
    await put(js, "a/0", b"new")
    await put(js, "a/5", b"5")
    await put(js, "b", b"other")
    store = RetainedStore(Lagging(js, old[-1]))
    assert await topics(store, "a/+") == [["a.1", "a.2", "a.3", "a.4"]]
    assert await store.get("a.5") is None
    store.replicated = True
    assert await topics(store, "a/+") == [["a.1", "a.2", "a.3", "a.4"], ["a.0", "a.5"]]
    found = await store.get("a.5")
    assert found is not None
    assert found.payload == b"5"


async def test_a_replica_that_lags_far(js: NatsPyJetStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing between its last message and the leader's is left out; no page is larger than others."""
    monkeypatch.setattr(retained, "PAGE_MESSAGES", 60)
    await ensure_streams(js)
    old = await put(js, "a/0")
    wanted = [f"a.{number}" for number in range(1, 101)]
    for number in range(1, 101):
        await put(js, f"a/{number}")
    store = RetainedStore(Lagging(js, old))
    store.replicated = True
    assert await topics(store, "a/+") == [["a.0"], wanted[:60], wanted[60:]]


async def test_without_a_leader_nothing_is_told() -> None:
    """Any replica may have answered, and lack the newest messages."""

    async def info() -> dict[str, Any]:
        return {"cluster": {"name": "c"}, "state": {"last_seq": 1}}

    store = RetainedStore(MemoryJetStream())
    store.read_info_by(info)
    with pytest.raises(NoLeader):
        await topics(store, "#")


async def test_clear_and_delete_the_tombstone(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = RetainedStore(js)
    await put(js, "a")
    seq = await publish(js, retained_subject("a"), b"", tombstone_block("a", ORIGIN))
    assert await store.get("a") is None
    assert await topics(store, "#") == []
    assert await stored.remove(js, STREAM, retained_subject("a"), seq) is True
    assert await stored.remove(js, STREAM, retained_subject("a"), seq) is False
    await put(js, "a")
    assert await topics(store, "#") == [["a"]]


async def test_matching_filters(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = RetainedStore(js)
    for topic in ("a", "a/b", "a/b/c", "b/b", "$foo/b", "a b/*"):
        await put(js, topic)
    third = await store.get("a.b.c")
    assert third is not None
    await publish(js, retained_subject("_INBOX.b"), b"x", set_block("_INBOX/b", 1, ORIGIN))
    assert await topics(store, "#") == [["a", "a.b", "a.b.c", "b.b", "a/_b./~s"]]
    assert await topics(store, "+/b") == [["a.b", "b.b"]]
    assert await topics(store, "a/#") == [["a.b", "a.b.c"]]
    assert await topics(store, "$foo/+") == [["$foo.b"]]
    assert await topics(store, "a b/#") == [["a/_b./~s"]]
    assert await topics(store, "none/+") == []
    assert await topics(store, "#", third.seq) == [["a.b.c", "b.b", "a/_b./~s"]]


async def many(js: NatsPyJetStream, count: int, payload: bytes = b"x") -> list[str]:
    """Store so many retained messages, every third of them cleared again; returns the subjects of the others."""
    await ensure_streams(js)
    expected = []
    for number in range(count):
        await put(js, f"many/{number}", payload)
        if number % 3 == 0:
            await publish(js, retained_subject(f"many.{number}"), b"", tombstone_block(f"many/{number}", ORIGIN))
        else:
            expected.append(f"many.{number}")
    return expected


async def consumers(js: NatsPyJetStream) -> list[str]:
    return await consumer_names(js, retained.STREAM)


@pytest.mark.long
async def test_more_matches_than_one_multi_get_allows(js: NatsPyJetStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "PAGE_MESSAGES", 300)
    expected = await many(js, 1100)
    found = await topics(RetainedStore(js), "many/#")
    assert [subject for page in found for subject in page] == expected
    assert len(found) >= 4
    assert max(map(len, found)) <= 300
    assert await consumers(js) == []


async def test_a_reader_that_ends_early_leaves_nothing(js: NatsPyJetStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_FIRST", 10)
    monkeypatch.setattr(retained, "PAGE_MESSAGES", 10)
    await many(js, 60)
    every = RetainedStore(js).matching("many.>")
    await anext(every)
    await anext(every)
    assert len(await consumers(js)) == 1
    await every.aclose()
    assert await consumers(js) == []


async def test_the_reader_is_lost_between_two_pages(js: NatsPyJetStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_FIRST", 10)
    monkeypatch.setattr(retained, "PAGE_MESSAGES", 20)
    expected = await many(js, 150)
    found, names = [], set()
    async for page in RetainedStore(js).matching("many.>"):
        found += [message.subject for message in page]
        for name in await consumers(js):
            names.add(name)
            await delete_consumer(js, retained.STREAM, name)
    assert found == expected
    assert len(names) > 2


class Losing(NatsPyJetStream):
    """Every fifth message of a consumer does not arrive; or no consumer can be had."""

    def __init__(self, js: NatsPyJetStream, refuses: bool) -> None:
        super().__init__(js.client, js.api_prefix)
        self.refuses = refuses
        self.came = self.refused = self.got = 0

    async def _answers(
        self, subject: str, payload: bytes, headers: bytes, timeout: float, inbox: str
    ) -> AsyncGenerator[Reply, None]:
        if self.refuses and ".CONSUMER.CREATE." in subject:
            self.refused += 1
            error = b'{"code":400,"err_code":10026,"description":"maximum consumers limit reached"}'
            yield Reply(inbox, b"", b'{"error":%b}' % error)
            return
        self.got += ".DIRECT.GET." in subject
        async for answer in super()._answers(subject, payload, headers, timeout, inbox):
            if answer.reply.startswith("$JS.ACK."):
                self.came += 1
                if self.came % 5 == 0:
                    continue
            yield answer


@pytest.mark.parametrize("refuses", [False, True])
async def test_what_a_consumer_does_not_bring(
    js: NatsPyJetStream, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    monkeypatch.setattr(pages, "PAGE_FIRST", 10)
    monkeypatch.setattr(retained, "PAGE_MESSAGES", 20)
    expected = await many(js, 90)
    losing = Losing(js, refuses)
    assert [subject for page in await topics(RetainedStore(losing), "many/#") for subject in page] == expected
    assert losing.refused == refuses
    assert losing.came > 10 or refuses
    assert losing.got > 2
    assert await consumers(js) == []


async def test_pages_are_bounded_in_bytes(js: NatsPyJetStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_FIRST", 2)
    await ensure_streams(js)
    for number in range(12):
        await put(js, f"big/{number}", bytes(900_000))
    sizes = [sum(len(message.payload) for message in page) async for page in RetainedStore(js).matching("big.*")]
    assert sum(sizes) == 12 * 900_000
    assert max(sizes) <= pages.PAGE_BYTES + 1_000_000
    assert len(sizes) > 4


async def test_a_message_larger_than_a_page(js: NatsPyJetStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_FIRST", 2)
    monkeypatch.setattr(retained, "PAGE_BYTES", 10_000)
    await ensure_streams(js)
    for number in range(20):
        await put(js, f"some/{number}", bytes(50_000 if number in (5, 6, 19) else 1_000))
    sizes = [[len(message.payload) for message in page] async for page in RetainedStore(js).matching("some.*")]
    assert sum(map(len, sizes)) == 20
    assert [page for page in sizes if 50_000 in page] == [[50_000]] * 3


async def test_ends_although_messages_keep_coming(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    for number in range(300):
        await put(js, f"t/{number}")
    found = []
    async for page in RetainedStore(js).matching("t.*"):
        found += [message.subject for message in page]
        for number in range(300, 400):
            await put(js, f"t/{number}")
    assert sorted(found) == sorted(f"t.{number}" for number in range(300))


async def test_expired_messages_are_gone(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = RetainedStore(js)
    await put(js, "short", b"x", b"Nats-TTL:1s\r\n")
    await put(js, "long")

    async def expired() -> bool:
        return await store.get("short") is None

    await eventually(expired)
    assert await topics(store, "#") == [["long"]]


async def test_a_forged_subject_header_is_ignored(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    await put(js, "a", b"x", b"Nats-Subject:$MQTT.rmsgs.forged\r\n")
    assert await topics(RetainedStore(js), "+") == [["a"]]


async def test_a_stream_without_direct_get(js: NatsPyJetStream) -> None:
    config = {"name": "$MQTT_rmsgs", "subjects": ["$MQTT.rmsgs.>"], "allow_rollup_hdrs": True}
    await call(js, "STREAM.CREATE.$MQTT_rmsgs", config)
    await put(js, "a")
    with pytest.raises(NoResponders):
        await topics(RetainedStore(js), "+")
