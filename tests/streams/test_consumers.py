# SPDX-License-Identifier: Apache-2.0
"""Consumer management and acknowledgement subjects, against a real server."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_streams import consumers, messages, pubrel
from mqtt_streams.api import NoResponders, Reply, RequestTimeout, publish
from mqtt_streams.consumers import (
    Ack,
    ConsumerExists,
    ConsumerNotFound,
    ConsumerRef,
    DeliverSubjectBusy,
    consumer_info,
    consumer_names,
    create_consumer,
    delete_consumer,
    delete_for_good,
    parse_ack,
    update_consumer,
)
from mqtt_streams.definitions import ensure_streams
from mqtt_streams.headers import PUB_BLOCKS
from mqtt_streams.subjects import ESCAPES, encode_topic
from tests.harness.fence import fence
from tests.streams.support import NatsPyJetStream

V1 = b"$JS.ACK.$MQTT_msgs.A4a1Bsn5_n.2.300.7.1700000000000000001.5"
V2 = b"$JS.ACK._.AABBCC.$MQTT_msgs.A4a1Bsn5_n.2.300.7.1700000000000000001.5"
ACK = Ack("$MQTT_msgs", "A4a1Bsn5_n", 2, 300, 7, 1700000000000000001, 5)


@pytest.mark.parametrize("subject", [V1, V2, V2 + b".rAnDoM"])
def test_ack_subjects(subject: bytes) -> None:
    assert parse_ack(subject) == ACK


@pytest.mark.parametrize(
    "subject", [b"", b"a.b", V1 + b".x", V1.rpartition(b".")[0], V1.replace(b"ACK", b"NAK"), V1.replace(b"300", b"x")]
)
def test_no_ack_subjects(subject: bytes) -> None:
    assert parse_ack(subject) is None


@given(st.binary(max_size=60))
def test_any_reply_subject(subject: bytes) -> None:
    assert parse_ack(subject) is None or subject.count(b".") >= 8


def consumer(deliver: str = "d1", name: str = "n1", subject: str = "a.>", **options: Any) -> ConsumerRef:
    return messages.subscription_consumer(
        "A4a1Bsn5", subject, name_nuid=name, deliver_nuid=deliver, max_ack_pending=options.pop("window", 10), **options
    )


class Leaderless(NatsPyJetStream):
    """Deletes consumers as nats-server does while they have no leader: the first answers are missing."""

    def __init__(self, js: NatsPyJetStream, missing: int) -> None:
        super().__init__(js.client, js.api_prefix)
        self.missing = missing
        self.asked = 0

    async def request(
        self, subject: str, payload: bytes = b"", headers: bytes = b"", *, timeout: float = 5.0, reply: str = ""
    ) -> Reply:
        answer = await super().request(subject, payload, headers, timeout=5.0, reply=reply)
        if "DELETE" not in subject:
            return answer
        assert timeout == consumers.DELETED
        self.asked += 1
        if self.asked <= self.missing:
            raise RequestTimeout(subject)
        return answer


@pytest.mark.parametrize("missing", [0, 1, consumers.DELETIONS])
async def test_a_consumer_without_a_leader_is_deleted(js: NatsPyJetStream, missing: int) -> None:
    """nats-server deletes it and does not answer; the answer to the next request is that there is none."""
    await ensure_streams(js)
    await create_consumer(js, messages.STREAM, consumer())
    leaderless = Leaderless(js, missing)
    name = consumer().durable_name
    if missing < consumers.DELETIONS:
        assert await delete_for_good(leaderless, messages.STREAM, name)
        assert not await delete_for_good(js, messages.STREAM, name)
    else:
        with pytest.raises(RequestTimeout):
            await delete_for_good(leaderless, messages.STREAM, name)
    assert leaderless.asked == min(missing + 1, consumers.DELETIONS)
    assert await consumer_info(js, messages.STREAM, name) is None


async def test_create_info_names_delete(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    created = await create_consumer(js, messages.STREAM, consumer())
    assert created.config["max_ack_pending"] == 10
    assert created.config["ack_wait"] == 30_000_000_000
    assert created.config["deliver_subject"] == "$MQTT.sub.d1"
    assert created.config["filter_subject"] == "$MQTT.msgs.a.>"
    assert not created.push_bound
    await create_consumer(js, messages.STREAM, consumer())
    with pytest.raises(ConsumerExists):
        await create_consumer(js, messages.STREAM, consumer(window=11))
    await create_consumer(js, messages.STREAM, ConsumerRef("other", "$MQTT.sub.o", "$MQTT.msgs.b", 1))
    assert await consumer_names(js, messages.STREAM, "A4a1Bsn5_") == ["A4a1Bsn5_n1"]
    assert len(await consumer_names(js, messages.STREAM)) == 2
    assert await delete_consumer(js, messages.STREAM, "A4a1Bsn5_n1") is True
    assert await delete_consumer(js, messages.STREAM, "A4a1Bsn5_n1") is False
    assert await consumer_info(js, messages.STREAM, "A4a1Bsn5_n1") is None
    with pytest.raises(ConsumerNotFound):
        await update_consumer(js, messages.STREAM, consumer())


@pytest.mark.long
async def test_names_of_more_than_one_page(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    for number in range(1030):
        await create_consumer(js, messages.STREAM, consumer(f"d{number}", f"n{number}"))
    await create_consumer(js, messages.STREAM, ConsumerRef("other", "$MQTT.sub.o", "$MQTT.msgs.b", 1))
    assert len(await consumer_names(js, messages.STREAM, "A4a1Bsn5_")) == 1030
    keep = frozenset({"A4a1Bsn5_n5"})
    assert len(await messages.delete_session_consumers(js, "A4a1Bsn5", keep)) == 1029
    assert sorted(await consumer_names(js, messages.STREAM)) == ["A4a1Bsn5_n5", "other"]


async def test_a_new_deliver_subject_resends_what_is_pending(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    old = await js.client.subscribe("$MQTT.sub.d1")
    await fence(js.client)
    await create_consumer(js, messages.STREAM, consumer())
    for number in range(4):
        await publish(js, messages.message_subject("a.x"), b"%d" % number, PUB_BLOCKS[1])
    got = [await old.next_msg(5) for _ in range(4)]
    first = parse_ack(got[0].reply.encode())
    assert first is not None
    assert (first.delivered, first.stream_seq, first.consumer_seq) == (1, 1, 1)
    await js.request(got[1].reply, b"+ACK")
    info = await consumer_info(js, messages.STREAM, "A4a1Bsn5_n1")
    assert info is not None
    assert (info.push_bound, info.num_ack_pending, info.delivered_seq, info.ack_floor_seq) == (True, 3, 4, 0)

    with pytest.raises(DeliverSubjectBusy):
        await update_consumer(js, messages.STREAM, consumer("d2"))
    await old.unsubscribe()
    await fence(js.client)
    new = await js.client.subscribe("$MQTT.sub.d2")
    await fence(js.client)
    await update_consumer(js, messages.STREAM, consumer("d2"))
    await publish(js, messages.message_subject("a.x"), b"new", PUB_BLOCKS[1])
    again = [await new.next_msg(5) for _ in range(4)]
    assert [message.data for message in again] == [b"0", b"2", b"3", b"new"]
    counts = [ack.delivered for message in again if (ack := parse_ack(message.reply.encode()))]
    assert counts == [2, 2, 2, 1]


async def test_start_sequence(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    for number in range(3):
        await publish(js, messages.message_subject("a.x"), b"%d" % number, PUB_BLOCKS[1])
    delivered = await js.client.subscribe("$MQTT.sub.d1")
    await fence(js.client)
    await create_consumer(js, messages.STREAM, consumer(start_seq=2))
    assert [(await delivered.next_msg(5)).data for _ in range(2)] == [b"1", b"2"]


async def test_the_pubrel_consumer_uses_the_same_code(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    ref = pubrel.pubrel_consumer("A4a1Bsn5", max_ack_pending=5)
    assert ref.durable_name == "$MQTT_PUBREL_A4a1Bsn5"
    await create_consumer(js, pubrel.STREAM, ref)
    moved = pubrel.pubrel_consumer("A4a1Bsn5", max_ack_pending=5, deliver_nuid="n1")
    assert moved.deliver_subject == "$MQTT.deliver.pubrel.A4a1Bsn5.n1"
    info = await update_consumer(js, pubrel.STREAM, moved)
    assert info.config["deliver_subject"] == moved.deliver_subject


async def test_no_jetstream(js: NatsPyJetStream) -> None:
    nowhere = NatsPyJetStream(js.client, "$JS.nowhere.API")
    with pytest.raises(NoResponders):
        await consumer_info(nowhere, messages.STREAM, "x")


async def test_escaped_subjects_work_as_filters(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    topic = "x" + "".join(ESCAPES) + "\x01\x1f\x85\xa0\u2028\U0001f600.y"
    subject = encode_topic(topic)
    delivered = await js.client.subscribe("$MQTT.sub.d1")
    core = await js.client.subscribe(subject)
    await fence(js.client)
    await create_consumer(js, messages.STREAM, consumer(subject=subject))
    await js.client.publish(subject, b"core")
    await publish(js, messages.message_subject(subject), b"stored", PUB_BLOCKS[1])
    assert (await core.next_msg(5)).data == b"core"
    assert (await delivered.next_msg(5)).subject == messages.PREFIX + subject
