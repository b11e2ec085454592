# SPDX-License-Identifier: Apache-2.0
"""The end of the stream of messages: marks, and what a leader says that has just been elected."""

from __future__ import annotations

import asyncio

import pytest

from mqtt_nats.sessions.message_stream import QUESTIONS_MOST, StreamHead, mark
from mqtt_streams.api import ApiError, Reply
from mqtt_streams.messages import STREAM as MESSAGES
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeInbox, FakeServices, as_inbox

INFO = f"$JS.API.STREAM.INFO.{MESSAGES}"
GET = f"$JS.API.STREAM.MSG.GET.{MESSAGES}"
DELETE = f"$JS.API.STREAM.MSG.DELETE.{MESSAGES}"


# -- marks --------------------------------------------------------------------------------------------


async def test_the_refusal_of_a_mark_names_the_last_sequence() -> None:
    services = FakeServices()
    asked = mark(services.nats)
    ((target, headers, payload, operation),) = services.fake_store.fake_put
    assert target == b"HPUB $MQTT.msgs.mark "
    assert b"Nats-Expected-Last-Sequence:9223372036854775807" in headers
    assert payload == b""
    operation.failed(ApiError(400, 10071, "wrong last sequence: 41"))
    assert await asked.position(as_inbox(services.fake_inbox)) == 41
    assert services.fake_inbox.asked == []


async def test_a_refusal_without_a_sequence() -> None:
    """A stream that refuses for another reason is asked for its state."""
    services = FakeServices()
    services.fake_inbox.last[MESSAGES] = 7
    asked = mark(services.nats)
    asked.failed(ApiError(503, 10077, "maximum messages exceeded"))
    asked.failed(ApiError(400, 10071, "wrong last sequence: 41"))  # of a repetition: the first one counts
    assert await asked.position(as_inbox(services.fake_inbox)) == 7


async def test_who_waits_for_a_mark_may_be_cancelled() -> None:
    """The mark is also asked by others."""
    services = FakeServices()
    asked = mark(services.nats)
    waiting = asyncio.create_task(asked.position(as_inbox(services.fake_inbox)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    asked.failed(ApiError(400, 10071, "wrong last sequence: 5"))
    assert await asked.position(as_inbox(services.fake_inbox)) == 5


# -- state --------------------------------------------------------------------------------------------


async def test_a_leader_decides_before_it_is_believed() -> None:
    services = FakeServices()
    services.fake_inbox.replicas = 3
    head = StreamHead(as_inbox(services.fake_inbox))
    assert (await head.state())["last_seq"] == 0
    assert services.fake_inbox.asked == [DELETE, INFO]
    assert head.replicated


async def test_a_stream_without_replicas_needs_no_decision() -> None:
    services = FakeServices()
    head = StreamHead(as_inbox(services.fake_inbox))
    await head.state()
    await head.state()
    assert services.fake_inbox.asked == [DELETE, INFO, INFO]


async def test_a_stream_that_denies_deletes_is_read_all_the_same() -> None:
    services = FakeServices()

    def deny(subject: str) -> None:
        if subject == DELETE:
            raise ApiError(500, 10052, "message delete not permitted")

    services.fake_inbox.before = deny
    assert (await StreamHead(as_inbox(services.fake_inbox)).state())["last_seq"] == 0


async def test_a_stream_without_a_leader_says_nothing() -> None:
    services = FakeServices()

    def refuse(subject: str) -> None:
        if subject == DELETE:  # a former leader goes on answering questions for a while
            raise ApiError(503, 10118, "raft general error")

    services.fake_inbox.before = refuse
    with pytest.raises(ApiError):
        await StreamHead(as_inbox(services.fake_inbox)).state()


async def test_who_asks_at_the_same_time_shares_one_answer_that_is_later_than_the_question() -> None:
    services = FakeServices()
    head = StreamHead(as_inbox(services.fake_inbox))
    head.replicated = False
    await asyncio.gather(*(head.state() for _ in range(5)))
    assert services.fake_inbox.asked.count(INFO) == 2  # the first answer may be too old for the others


# -- what is left -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "since", "passed"), [(1, 1, True), (1, 2, False), (3, 9, True), (2, 1, True)])
async def test_whether_a_consumer_has_anything_left(start: int, since: int, passed: bool) -> None:
    services = FakeServices()
    services.fake_inbox.put("$MQTT.msgs.other")
    services.fake_inbox.put("$MQTT.msgs.a")
    assert await services.head.beyond("$MQTT.msgs.a", start, since) is passed


async def test_a_new_leader_is_asked_again_when_it_finds_nothing() -> None:
    services = FakeServices()
    services.fake_inbox.replicas = 3
    assert await services.head.beyond("$MQTT.msgs.a", 1, 9)
    assert services.fake_inbox.asked == [GET, DELETE, INFO, GET]


@pytest.mark.parametrize(("position", "left"), [(0, False), (1, True), (5, True)])
async def test_whether_any_of_many_filters_has_something_left(position: int, left: bool) -> None:
    services = FakeServices()
    services.fake_inbox.put("$MQTT.msgs.a50")
    subjects = [f"$MQTT.msgs.a{number}" for number in range(100)]
    assert await services.head.nothing_left(subjects, position, 5) is left


class SlowInbox(FakeInbox):
    """JetStream that answers when it is let, and knows how many requests wait."""

    def __init__(self) -> None:
        super().__init__()
        self.let = asyncio.Event()
        self.waiting = self.most = 0

    async def request(
        self, subject: str, payload: bytes = b"", headers: bytes = b"", *, timeout: float = 5.0, reply: str = ""
    ) -> Reply:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await self.let.wait()
        self.waiting -= 1
        return await super().request(subject, payload, headers, timeout=timeout, reply=reply)


async def test_sessions_of_a_gateway_do_not_all_ask_at_once() -> None:
    """When thousands are handed over at the same time, requests of others do not wait behind all of theirs."""
    inbox = SlowInbox()
    head = StreamHead(as_inbox(inbox))
    sessions = [asyncio.create_task(head.nothing_left([f"$MQTT.msgs.{one}"], 0, 9)) for one in range(1000)]
    await aeventually(lambda: inbox.waiting == QUESTIONS_MOST)
    inbox.let.set()
    assert all(await asyncio.gather(*sessions))
    assert inbox.most == QUESTIONS_MOST
