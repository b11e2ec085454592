# SPDX-License-Identifier: Apache-2.0
"""Held QoS 2 publishes and owed PUBRELs: formats, and both stores against a real server."""

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_streams import headers, pubrel, qos2, stored
from mqtt_streams.api import ApiError, Reply, call, publish
from mqtt_streams.consumers import create_consumer
from mqtt_streams.definitions import ensure_streams
from mqtt_streams.error_codes import STORE_FAILED
from mqtt_streams.hashing import subject_token
from mqtt_streams.pubrel import Owed, PubrelStore, pubrel_block, pubrel_subject
from mqtt_streams.qos2 import Held, Qos2Store, held_block, held_subject, held_subjects, release_id
from mqtt_streams.repeats import find_stored_keys, search_key
from mqtt_streams.stored import StoredMessage
from tests.harness.fence import fence
from tests.streams.support import NatsPyJetStream

MESSAGE_ID = b"0123456789abcdef0123456789abcdef"


def test_held_block() -> None:
    block = held_block(b"a.b", 5, 17, MESSAGE_ID, b"Nmqtt-Expiry:9\r\n")
    assert block == (
        b"NATS/1.0\r\nNmqtt-Pub:25\r\nNmqtt-Subject:a.b\r\nNmqtt-Epoch:17\r\n"
        b"Nmqtt-Id:0123456789abcdef0123456789abcdef\r\nNmqtt-Expiry:9\r\n\r\n"
    )
    held = qos2.parse(StoredMessage("$MQTT.qos2.in.sub-1.7", 3, 99, block, b"x"))
    assert held == Held(7, 3, "a.b", 5, 17, MESSAGE_ID.decode(), block, 99)
    assert held is not None
    assert held.retain
    assert qos2.release_id(held.seq) == "q2-3"


@pytest.mark.parametrize(("value", "flags"), [("24", 4), ("2", 0), ("2d", 13), ("2z", 0)])
def test_records_of_nats_server(value: str, flags: int) -> None:
    block = b"NATS/1.0\r\nNmqtt-Pub:%b\r\nNmqtt-Subject:a.b\r\n\r\n" % value.encode()
    held = qos2.parse(StoredMessage("$MQTT.qos2.in.a/b.65535", 3, 99, block, b""))
    assert held == Held(65535, 3, "a.b", flags, 0, "", block, 99)


@pytest.mark.parametrize(
    ("subject", "block"),
    [
        ("$MQTT.qos2.in.c.1", b""),
        ("$MQTT.qos2.in.c.1", b"NATS/1.0\r\nNmqtt-Pub:24\r\n\r\n"),
        ("$MQTT.qos2.in.c.1", b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Subject:a\r\n\r\n"),
        ("$MQTT.qos2.in.c.x", b"NATS/1.0\r\nNmqtt-Pub:24\r\nNmqtt-Subject:a\r\n\r\n"),
        ("$MQTT.qos2.in.c.0", b"NATS/1.0\r\nNmqtt-Pub:24\r\nNmqtt-Subject:a\r\n\r\n"),
        ("$MQTT.qos2.in.c.65536", b"NATS/1.0\r\nNmqtt-Pub:24\r\nNmqtt-Subject:a\r\n\r\n"),
        ("$MQTT.qos2.in.c.1234567", b"NATS/1.0\r\nNmqtt-Pub:24\r\nNmqtt-Subject:a\r\n\r\n"),
    ],
)
def test_unusable_held_records(subject: str, block: bytes) -> None:
    assert qos2.parse(StoredMessage(subject, 1, 1, block, b"")) is None


@given(st.text(), st.binary(max_size=40))
def test_any_held_record(subject: str, tail: bytes) -> None:
    qos2.parse(StoredMessage(subject, 1, 1, b"NATS/1.0\r\nNmqtt-Pub:2" + tail, b""))


async def hold(js: NatsPyJetStream, token: str, packet_id: int, payload: bytes = b"x") -> int:
    return await publish(js, held_subject(token, packet_id), payload, held_block(b"a.b", 4, 1, MESSAGE_ID))


async def test_hold_list_load_delete(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = Qos2Store(js)
    assert await store.held("sub-1") == []
    sequences = [await hold(js, "sub-1", packet_id, b"%d" % packet_id) for packet_id in (9, 3, 65535)]
    with pytest.raises(ApiError) as caught:
        await hold(js, "sub-1", 3)
    assert caught.value.err_code == STORE_FAILED
    held = await store.held("sub-1")
    assert [(record.packet_id, record.seq) for record in held] == list(zip((9, 3, 65535), sequences, strict=True))
    assert [record.epoch for record in held] == [1, 1, 1]
    assert await store.load(sequences[1]) == (held[1], b"3")
    assert await store.find("sub-1", 9) == held[0]
    assert await store.delete(sequences[1]) is True
    assert await store.delete(sequences[1]) is False
    assert await store.load(sequences[1]) is None
    assert await store.find("sub-1", 3) is None
    await hold(js, "sub-1", 3)


async def test_purge_touches_one_client_only(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = Qos2Store(js)
    tokens = [subject_token(client_id) for client_id in ("*", ">", "a.b", "a", "sub 1", "sub-1")]
    for token in tokens:
        await hold(js, token, 1)
        await hold(js, token, 2)
    (first, _) = await store.held(tokens[0])
    assert await stored.purge(js, qos2.STREAM, held_subjects(tokens[0]), first.seq) == 1
    assert [one.packet_id for one in await store.held(tokens[0])] == [2]
    assert await stored.purge(js, qos2.STREAM, held_subjects(tokens[0])) == 1
    assert await stored.purge(js, qos2.STREAM, held_subjects(tokens[0])) == 0
    assert [len(await store.held(token)) for token in tokens] == [0, 2, 2, 2, 2, 2]


@pytest.mark.long
async def test_a_release_is_found_whenever_it_was(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = Qos2Store(js)

    async def message(subject: str, message_id: str) -> None:
        block = headers.build([("Nmqtt-Pub", "2"), ("Nats-Msg-Id", message_id)])
        await publish(js, "$MQTT.msgs." + subject, bytes(5000), block)

    start: int = (await call(js, "STREAM.INFO.$MQTT_qos2in"))["state"]["last_seq"] + 1
    await message("a.b", release_id(start))  # of an older hold with the same sequence: the stream was made anew
    await hold(js, "sub-1", 1)
    await hold(js, "sub-1", 2)
    first, second = await store.held("sub-1")
    for _ in range(600):
        await publish(js, "$MQTT.msgs.a.b", bytes(5000), headers.PUB_BLOCKS[1])
    await message("a.b", release_id(start + 1) + "2")
    await message("a.c", release_id(start))
    assert (first.seq, second.seq) == (start, start + 1)
    assert await store.was_released(first) is False
    assert await store.was_released(second) is False
    await message("a.b", release_id(start + 1))
    assert await store.was_released(first) is False
    assert await store.was_released(second) is True


async def test_unusable_held_records_are_removed(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = Qos2Store(js)
    seq = await publish(js, "$MQTT.qos2.in.sub-1.5", b"no headers")
    good = await hold(js, "sub-1", 6)
    assert [record.seq for record in await store.held("sub-1")] == [good]
    assert await store.delete(seq) is False


def test_pubrel_block() -> None:
    assert pubrel_block(12, 345, 6) == b"NATS/1.0\r\nNmqtt-PubRel:12\r\nNmqtt-Seq:345\r\nNmqtt-Epoch:6\r\n\r\n"
    assert pubrel.parse(pubrel_block(12, 345, 6), 9) == Owed(12, 9, 345, 6)
    assert pubrel.parse(pubrel_block(12, 345), 9) == Owed(12, 9, 345)
    assert pubrel.parse(b"NATS/1.0\r\nNmqtt-PubRel:1\r\n\r\n", 9) == Owed(1, 9, 0)


@pytest.mark.parametrize("value", ["", "0", "65536", "-1", "x", "99999999999999999999"])
def test_unusable_pubrels(value: str) -> None:
    assert pubrel.parse(headers.build([("Nmqtt-PubRel", value)]), 1) is None


async def owe(js: NatsPyJetStream, client_hash: str, packet_id: int) -> int:
    return await publish(js, pubrel_subject(client_hash), b"", pubrel_block(packet_id, packet_id + 100))


async def test_owed_until_acknowledged(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = PubrelStore(js)
    deliveries = {}
    for client_hash in ("A4a1Bsn5", "B4a1Bsn5"):
        consumer = pubrel.pubrel_consumer(client_hash, max_ack_pending=10)
        deliveries[client_hash] = await js.client.subscribe(consumer.deliver_subject)
        await fence(js.client)
        await create_consumer(js, pubrel.STREAM, consumer)
    sequences = [await owe(js, "A4a1Bsn5", packet_id) for packet_id in (5, 2)]
    await owe(js, "B4a1Bsn5", 5)
    assert await store.owed("A4a1Bsn5") == [Owed(5, sequences[0], 105), Owed(2, sequences[1], 102)]
    delivered = await deliveries["A4a1Bsn5"].next_msg(5)
    await js.request(delivered.reply, b"+ACK")
    assert await store.owed("A4a1Bsn5") == [Owed(2, sequences[1], 102)]
    assert await stored.purge(js, pubrel.STREAM, pubrel.pubrel_subject("A4a1Bsn5")) == 1
    assert await store.owed("A4a1Bsn5") == []
    assert [owed.packet_id for owed in await store.owed("B4a1Bsn5")] == [5]


@pytest.mark.parametrize("behind", [False, True])
async def test_many_that_are_owed_come_in_one_page(
    js: NatsPyJetStream, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    """Unless a replica lacks some of them."""
    await ensure_streams(js)
    await create_consumer(js, pubrel.STREAM, pubrel.pubrel_consumer("A4a1Bsn5", max_ack_pending=10))
    sequences = [await owe(js, "A4a1Bsn5", packet_id) for packet_id in range(1, 31)]
    asked: list[str] = []
    request, page = js.request, stored.direct_page

    async def counted(subject: str, payload: bytes = b"", **options: Any) -> Reply:
        asked.append(subject)
        return await request(subject, payload, **options)

    async def lagging(*arguments: Any, **options: Any) -> Any:
        found, more = await page(*arguments, **options)
        return found[:-1], more

    monkeypatch.setattr(js, "request", counted)
    if behind:
        monkeypatch.setattr(stored, "direct_page", lagging)
    owed = await PubrelStore(js).owed("A4a1Bsn5")
    assert owed == [Owed(number + 1, seq, number + 101) for number, seq in enumerate(sequences)]
    assert (len(asked) > 30) == behind
    assert len(asked) < 6 or behind


async def test_nothing_is_kept_for_a_session_without_consumer(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    await owe(js, "A4a1Bsn5", 1)
    assert await PubrelStore(js).owed("A4a1Bsn5") == []


async def test_unusable_pubrels_are_removed(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = PubrelStore(js)
    await create_consumer(js, pubrel.STREAM, pubrel.pubrel_consumer("A4a1Bsn5", max_ack_pending=10))
    seq = await publish(js, pubrel_subject("A4a1Bsn5"), b"no headers")
    await asyncio.gather(*(owe(js, "A4a1Bsn5", packet_id) for packet_id in range(1, 31)))
    assert sorted(owed.packet_id for owed in await store.owed("A4a1Bsn5")) == list(range(1, 31))
    assert await store.delete(seq) is False


async def test_ids_that_are_stored_are_found(js: NatsPyJetStream) -> None:
    """From a time on, over several pages, whatever else there is."""
    await ensure_streams(js)

    async def store(identity: str, payload: bytes = b"x") -> int:
        block = headers.build([("Nmqtt-Pub", "1"), ("Nats-Msg-Id", identity)])
        return await publish(js, "$MQTT.msgs.a.b", payload, block)

    assert await find_stored_keys(js, {b"a"}, time.time() - 1) == ({}, True)
    first = await store("a")
    for number in range(60):
        await store(f"other-{number}", bytes(100_000))
    second = await store("b")
    assert await find_stored_keys(js, {b"a", b"b", b"c"}, time.time() - 1) == ({b"a": first, b"b": second}, True)
    assert await find_stored_keys(js, {b"a"}, time.time() - 1) == ({b"a": first}, True)
    assert await find_stored_keys(js, {b"a"}, time.time() + 60) == ({}, True)
    await stored.delete(js, "$MQTT_msgs", second)
    found, complete = await find_stored_keys(js, {b"a", b"c"}, time.time() - 1)
    assert (found, complete) == ({b"a": first}, True), "no replica lags where there is one"


async def test_messages_without_an_id_of_the_stream_are_found_by_their_own(js: NatsPyJetStream) -> None:
    """Together with the subject; from a sequence on, when that is known and the stream is the same."""
    await ensure_streams(js)

    async def store(subject: str, *pairs: tuple[str, str]) -> int:
        return await publish(js, subject, b"x", headers.build([("Nmqtt-Pub", "1"), ("Nmqtt-Id", "m"), *pairs]))

    copy = await store("$MQTT.msgs.copy", ("Nats-Msg-Id", "copy-of-m"))
    key, now = b"m $MQTT.msgs.a.b", time.time()
    assert search_key(headers.build([("Nmqtt-Id", "m")]), b"$MQTT.msgs.a.b") == key
    assert search_key(headers.build([("Nmqtt-Id", "m"), ("Nats-Msg-Id", "id")]), b"$MQTT.msgs.a.b") == b"id"
    assert search_key(headers.build([("Nmqtt-Pub", "1")]), b"$MQTT.msgs.a.b") == b""
    await store("$MQTT.msgs.c")
    assert await find_stored_keys(js, {key, b"m $MQTT.msgs.copy"}, now) == ({}, True)
    there = await store("$MQTT.msgs.a.b")
    for after in (0, copy, there - 1, there + 1000):
        assert await find_stored_keys(js, {key}, now, after) == ({key: there}, True)
    assert await find_stored_keys(js, {key}, now, there) == ({}, True)
